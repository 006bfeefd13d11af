"""What a query may see, written out: what the tests of attention compare with."""

import torch


def seen(window, queries, keys):
    """bool [queries, keys], written out; the ends are aligned."""
    rows = []
    for i in range(keys - queries, keys):
        low = 0 if window.left is None else i - window.left
        high = keys if window.right is None else i + window.right
        rows.append([low <= j <= high for j in range(keys)])
    return torch.tensor(rows, dtype=torch.bool).view(queries, keys)


def documents_seen(window, q_packing, kv_packing):
    """bool [queries, keys] of a pack: blocks on the diagonal, nothing for the places of the padding."""
    visible = torch.zeros(sum(q_packing.places), sum(kv_packing.places), dtype=torch.bool)
    row = column = 0
    for n, rows, m, columns in zip(
        q_packing.lengths, q_packing.places, kv_packing.lengths, kv_packing.places, strict=True
    ):
        visible[row : row + n, column : column + m] = seen(window, n, m)
        row, column = row + rows, column + columns
    return visible
