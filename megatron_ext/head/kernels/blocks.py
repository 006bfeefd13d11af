"""Columns that a program works on at a time, and its warps: the one place of tuned sizes.

A row of logits takes 32 to 40 elements of each thread, whose registers hold 64 numbers: two programs of 16 warps share
an SM then, and one computes while the other's row is on its way.
"""

from typing import Any

# (widest row in columns, columns per step, warps), the first that fits; fp64 takes half the columns.
Table = tuple[tuple[int, int, int], ...]
GRADIENT: Table = ((1024, 1024, 4), (1 << 31, 4096, 4))
FIXED_SUM = 1024  # numbers that a program adds to as many sums, whose order it then decides
SELECTED = 2048  # logits at a time that are compared
CHOSEN_FROM, CHOSEN = 8192, 512  # columns that a top-k compares in registers, 16 of a thread, and how many it finds
NUCLEUS = 512  # logits at a time by 8 warps, each for eight sums in fp64 and in fp32: 48 registers of a thread's 128
# Rows of hidden size, 8 elements a thread; of the label's rows 16: a program waits for four loads one after the other,
# and most have one row to add, so that fewer programs take less time.
WIDTH: Table = ((512, 512, 2), (1024, 1024, 4), (1 << 31, 2048, 8))
LABEL_WIDTH: Table = (*WIDTH[:2], (2048, 2048, 4), (1 << 31, 4096, 8))

# Widest row that is kept in registers; narrower with sums for smoothing, entropy or hits, a bias or a softcap, which
# take more of them. Wider ones need 32 warps: an SM has registers for one such program, and waits for its row.
_WHOLE_ROW, _WHOLE_ROW_AND_MORE = 20480, 16384
_SMALLEST = 1024  # columns, by 4 warps


def sizes(table: Table, columns: int, double: bool) -> tuple[int, int]:
    """(columns per step, warps) for rows of `columns` columns."""
    step, warps = next((step, warps) for widest, step, warps in table if columns <= widest)
    return (max(step // 2, 16), warps) if double else (step, warps)


def whole_row(columns: int, counted: int, more: bool, double: bool) -> tuple[dict[str, Any], int] | None:
    """Constants of the kernel that reads a row once, and its warps; None for rows that are too wide for it.

    A row is a power of two and the rest of it: lanes for the next power of two would be up to half idle.
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
    """Constants of the kernel that takes a row by blocks, and its warps: 32 elements a thread, 16 with `more`."""
    steps, lanes, warps = (2, 1024, 4) if more else (4, 2048, 8)
    return {"STEPS": steps // 2 if double else steps, "LANES": lanes}, warps
