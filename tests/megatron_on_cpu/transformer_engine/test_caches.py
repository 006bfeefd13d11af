"""Keys and values of inference: caches in pages and in rows of their own."""

import pytest
import torch

from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from tests.megatron_on_cpu.transformer_engine import numbers

tex = compiled_module((2, 11))
BSHD = tex.NVTE_QKV_Format.NVTE_BSHD


def cumulated(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def copied(caches, table, new, cached, pages, moves):
    """Two sequences with 2 and 1 new tokens, after `cached` older ones each."""
    lens = cumulated(2, 1), cumulated(*(c + n for c, n in zip(cached, (2, 1), strict=True)))
    tex.copy_to_kv_cache(new[0], new[1], *caches, table, *lens, BSHD, 2, 2, 8, pages, moves)


@pytest.mark.parametrize("moves", [False, True])
def test_rows_of_a_cache(moves):
    """Sequences lie in rows 1 and 2: they stay, or move to rows 0 and 1 first."""
    new, caches = numbers(2, 2, 2, 3, 4, seed=0), numbers(2, 3, 8, 3, 4, seed=1)
    expected, found = caches.clone(), caches.clone()
    for i in range(2):
        for row, cached, n in (1, 3, 2), (2, 5, 1):
            to = row - 1 if moves else row
            expected[i, to, :cached] = caches[i, row, :cached]
            expected[i, to, cached : cached + n] = new[i, row - 1, :n]
    copied(list(found), torch.tensor([1, 2], dtype=torch.int32), new, (3, 5), 1, moves)
    assert torch.equal(found, expected)


def test_pages_of_a_cache():
    """Pages of 4 positions, two of each sequence."""
    new, caches = numbers(2, 2, 2, 3, 4, seed=0), numbers(2, 5, 4, 3, 4, seed=1)
    expected, found = caches.clone(), caches.clone()
    for i in range(2):
        expected[i, 3, 3] = new[i, 0, 0]
        expected[i, 1, 0] = new[i, 0, 1]
        expected[i, 4, 1] = new[i, 1, 0]
    copied(list(found), torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), new, (3, 5), 2, False)
    assert torch.equal(found, expected)
