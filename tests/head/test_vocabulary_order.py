"""The first k of many columns, found by groups of them, against a stable sort."""

import pytest
import torch

from megatron_ext.head.readouts.gather import largest_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns, k", [(16384, 3), (4160, 32), (900, 5), (129, 1), (300, 300)])
def test_among_equals_the_lowest_id_is_first(columns, k, dtype):
    """Values that differ, few values, zeros of both signs, -inf, falling and rising rows."""
    z = torch.randn(24, columns).to(dtype)
    z[4:16] = torch.randint(-2, 2, (12, columns)).to(dtype)
    z[5] *= -1
    z[6, :-2] = -torch.inf
    z[7] = -torch.inf
    z[8] = 0
    z[16], z[17] = z[16].sort().values, z[17].sort(descending=True).values
    want = z.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(largest_columns(z, k), want)
