"""Rows of a batch that go through the model together: lists of row numbers, each row in exactly one.

`unit` consecutive rows belong to each other (the pairs of DPO) and are not parted.
"""

from collections.abc import Sequence


def fixed(rows: int, size: int, unit: int = 1) -> list[list[int]]:
    """Runs of `size` rows, in order; the last may be shorter."""
    if size < 1 or size % unit:
        raise ValueError(
            f"micro-batch size is {size}: it must be a positive multiple of {unit}, rows that stay together"
        )
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


def within_tokens(lengths: Sequence[int], tokens: int, unit: int = 1) -> list[list[int]]:
    """Rows of similar lengths, so many that all of them as long as the longest take at most `tokens` positions."""
    found: list[list[int]] = []
    longest = 0
    for rows in sorted(_units(lengths, unit), key=lambda rows: -max(lengths[i] for i in rows)):
        if found and longest * (len(found[-1]) + unit) <= tokens:
            found[-1] += rows
            continue
        longest = max(lengths[i] for i in rows)
        _check_fits(longest * unit, tokens, rows)
        found.append(rows)
    return found


def packed(lengths: Sequence[int], tokens: int, unit: int = 1) -> list[list[int]]:
    """Rows of at most `tokens` tokens together: longest first, where they fit.

    First-fit decreasing needs at most 11/9 of the fewest bins, and one (Johnson, 1973).
    """
    found: list[list[int]] = []
    room: list[int] = []

    def length(rows: list[int]) -> int:
        return sum(lengths[i] for i in rows)

    for rows in sorted(_units(lengths, unit), key=length, reverse=True):
        need = length(rows)
        _check_fits(need, tokens, rows)
        bin_ = next((i for i, left in enumerate(room) if left >= need), None)
        if bin_ is None:
            found.append(rows)
            room.append(tokens - need)
        else:
            found[bin_] += rows
            room[bin_] -= need
    return found


def _units(lengths: Sequence[int], unit: int) -> list[list[int]]:
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows: they must be a multiple of {unit}, rows that belong together")
    return [list(range(start, start + unit)) for start in range(0, len(lengths), unit)]


def _check_fits(need: int, tokens: int, rows: list[int]) -> None:
    if need > tokens:
        raise ValueError(
            f"rows {rows} take {need} tokens, a micro-batch holds {tokens}: raise train_mb_tokens or "
            f"logprob_mb_tokens, or shorten the rows"
        )
