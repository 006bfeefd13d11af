"""Tuned sizes, all in this file: the columns that a program works on at a time, and its number of warps.

Of a row of logits each thread holds 32 to 40 elements in its 64 registers. Two programs of 16 warps then share an SM,
and one computes while the other loads its row.
"""

from typing import Any

# (widest row in columns, columns per step, warps), rising: the first wide enough is taken; fp64 takes half the columns.
Table = tuple[tuple[int, int, int], ...]
GRADIENT: Table = ((1024, 1024, 4), (1 << 31, 4096, 4))
FIXED_SUM = 1024  # partial sums that a program keeps, one a lane; their number decides the order of the additions
SELECTED = 2048  # logits that a program compares at a time
CHOSEN_FROM, CHOSEN = 8192, 512  # most columns that a top-k compares in registers, 16 a thread; its largest k
NUCLEUS = 512  # logits at a time by 8 warps, each for eight sums in fp64 and in fp32: 48 registers of a thread's 128
# Rows of hidden size: 8 elements a thread. Label rows of more than 1024 columns: 16, because a program waits for four
# loads one after the other and mostly adds one row, so that fewer programs take less time.
WIDTH: Table = ((512, 512, 2), (1024, 1024, 4), (1 << 31, 2048, 8))
LABEL_WIDTH: Table = (*WIDTH[:2], (2048, 2048, 4), (1 << 31, 4096, 8))

# Widest row that is kept in registers; the second is for passes with a bias, a softcap, or sums for smoothing, entropy
# or hits, which take more registers. Wider rows need 32 warps: an SM holds one such program, and waits for its row.
_WHOLE_ROW, _WHOLE_ROW_AND_MORE = 20480, 16384
_SMALLEST = 1024  # columns, by 4 warps


def sizes(table: Table, columns: int, double: bool) -> tuple[int, int]:
    """(columns per step, warps) for rows of `columns` columns."""
    step, warps = next((step, warps) for widest, step, warps in table if columns <= widest)
    return (max(step // 2, 16), warps) if double else (step, warps)


def whole_row(columns: int, counted: int, more: bool, double: bool) -> tuple[dict[str, Any], int] | None:
    """Return the constants of the kernel that reads a row once, and its warps; None for rows too wide for registers.

    A row is split into a power of two and the rest: with the next power of two up to half of the lanes would be idle.
    """
    if columns > (_WHOLE_ROW_AND_MORE if more else _WHOLE_ROW) // (2 if double else 1):
        return None
    first, rest = 1 << (columns.bit_length() - 1) if columns else 0, 0
    if first < columns:
        rest = max(1 << (columns - first - 1).bit_length(), _SMALLEST)
    if first < _SMALLEST or rest > first // 4:
        first, rest = max(1 << (columns - 1).bit_length() if columns else 0, _SMALLEST), 0
    warps = min(max(first // 1024 * (2 if double else 1), 4), 32)
    return {"FIRST_WHOLE": first <= counted, "FIRST": first, "REST": rest}, warps


def long_row(more: bool, double: bool) -> tuple[dict[str, Any], int]:
    """Return constants and warps of the kernel that reads a row by blocks: 32 elements a thread, 16 with `more`."""
    steps, lanes, warps = (2, 1024, 4) if more else (4, 2048, 8)
    return {"STEPS": steps // 2 if double else steps, "LANES": lanes}, warps
