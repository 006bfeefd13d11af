"""How many columns a program works on at a time, and with how many warps: the one table of tuned sizes.

The statistics pass keeps a whole row in registers where it fits, without spilling: one read, one write. Wider rows are
walked through twice, the second time to write the exponentials, when the row's maximum is known.
"""

# (widest shard in columns, columns per step, warps), the first that fits; fp64 takes half the columns.
Table = tuple[tuple[int, int, int], ...]
_UP_TO_16K = (
    (1024, 1024, 4),
    (2048, 2048, 4),
    (4096, 4096, 8),
    (8192, 8192, 16),
    (16384, 16384, 32),
)
STATISTICS: Table = (*_UP_TO_16K, (32768, 32768, 32), (1 << 31, 4096, 8))
# With sums for smoothing, entropy or hits, a bias or a softcap a row takes more registers.
STATISTICS_AND_MORE: Table = (*_UP_TO_16K, (1 << 31, 4096, 8))
GRADIENT: Table = ((1024, 1024, 4), (1 << 31, 2048, 4))


def sizes(table: Table, columns: int, double: bool) -> tuple[int, int]:
    """(columns per step, warps) for a shard of `columns` columns."""
    step, warps = next((step, warps) for widest, step, warps in table if columns <= widest)
    return (max(step // 2, 16), warps) if double else (step, warps)
