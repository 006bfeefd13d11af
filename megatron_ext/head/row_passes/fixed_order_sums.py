"""Sums whose order the shapes decide, so that they have the same bits in each run, on CUDA too; and sums whose order a
row decides alone, so that they have the same bits beside any other rows.

On CUDA `cumsum` and `scatter_add` of floating numbers add in the order in which blocks of threads happen to run, and
torch's deterministic mode refuses `cumsum`. `sum` and a library's products choose their order by the number of rows.

Legend: T tokens, N numbers of each, n numbers of all tokens together.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.numerics.tensors import sums_of_rows

_BLOCK = 64  # numbers


def row_sums(x_TN: Tensor) -> Tensor:
    """Return `sum(1)` in an order that the row alone decides: `[T]`, fp64, of partial sums in the input's dtype."""
    return sums_of_rows(x_TN.contiguous()).double()


def segment_sums(x_n: Tensor, lengths_T: Tensor) -> Tensor:
    """Return the sum of each token's neighbouring `lengths[t]` numbers, in their order: `[T]`, in their dtype."""
    return torch.segment_reduce(x_n, "sum", lengths=lengths_T, unsafe=True)  # unsafe: no wait


def prefix_sums(x_TN: Tensor, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm) -> Tensor:
    """Return `cumsum(1)` in `dtype`. On CUDA products with triangles of ones make it: in blocks, then over their sums.

    `multiply`: makes those products; if the order of a row's product depends on the row alone, so do the sums.
    """
    return _by_products(x_TN.to(dtype), multiply) if x_TN.is_cuda else x_TN.cumsum(1, dtype=dtype)


def _by_products(x_TN: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    tokens, numbers = x_TN.shape
    blocks = -(-numbers // _BLOCK)
    triangle = torch.ones(_BLOCK, _BLOCK, dtype=x_TN.dtype, device=x_TN.device).triu_()
    padded_TN = torch.nn.functional.pad(x_TN, (0, blocks * _BLOCK - numbers))
    within_TBN = multiply(padded_TN.view(tokens * blocks, _BLOCK), triangle).view(tokens, blocks, _BLOCK)
    if blocks > 1:
        within_TBN[:, 1:] += _by_products(within_TBN[:, :-1, -1], multiply).unsqueeze(2)
    return within_TBN.flatten(1)[:, :numbers]


def sums_of_equals(x_TN: Tensor, ids_TN: Tensor) -> Tensor:
    """Replace each number by the sum of all numbers in its row that have the same id.

    Ids are sorted. Then each number adds the numbers 1, 2, 4, ... places before it, if their ids are equal, so that the
    last number of equal ids has the sum of all.
    """
    ids_TN, order_TN = ids_TN.sort(stable=True, dim=1)
    sums_TN, step = x_TN.gather(1, order_TN), 1
    while step < ids_TN.shape[1]:
        same_TN = ids_TN[:, step:] == ids_TN[:, :-step]
        sums_TN = torch.cat([sums_TN[:, :step], sums_TN[:, step:] + sums_TN[:, :-step].where(same_TN, 0.0)], 1)
        step *= 2
    last_TN = torch.searchsorted(ids_TN, ids_TN, right=True) - 1
    return torch.empty_like(x_TN).scatter_(1, order_TN, sums_TN.gather(1, last_TN))
