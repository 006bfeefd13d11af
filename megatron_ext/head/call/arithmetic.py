"""Products and sums of a head: what `bits` selects, and the only thing that it selects.

`FAST` has those of `matmul.py`, a library's, whose order of additions follows from their shapes. `FIXED` has those of
`numerics/fixed_order.py`: every sum has one order, which no other token, chunk or kept column changes, and is one of a
leaf's columns alone. Leaves and ranks are added in the order of a tree (`leaves.py`).

Legend: T tokens, D hidden size, V columns of a leaf or of a block of it. G_TV: a gradient matrix, or what stands for
one.
"""

from typing import Any, Protocol

from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.head.call import matmul
from megatron_ext.numerics import fixed_order


class Arithmetic(Protocol):
    """The products and sums of one call; those of gradients are in fp32 (fp64 for fp64).

    Attributes:
        rows: of dW that `transposed` makes at a time on a CPU.
    """

    rows: int

    def logits(self, x_TD: Tensor, w_VD: Any, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
        """`x @ W.T`, see `matmul.logits`; `w`: an `Operand`, with fixed bits in one."""

    def add_product(self, total_TD: Tensor | None, g_TV: Tensor, w_VD: Any) -> Tensor:
        """`total + G @ W`, in place; a new tensor without a total."""

    def transposed(self, g_TV: Tensor, x_TD: Tensor) -> Tensor:
        """`G.T @ x` on a CPU."""

    def write_transposed(self, out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
        """`out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""

    def add_transposed(self, total_VD: Tensor, g_TV: Tensor, x_TD: Tensor) -> None:
        """`total += G.T @ x`; the total is a sum over chunks of tokens."""

    def add_column_sums(self, total_V: Tensor, g_TV: Tensor) -> None:
        """`total += G.sum(0)`; the total is a sum over chunks of tokens."""

    def column_sums(self, g_TV: Tensor, factor_T: Tensor) -> Tensor:
        """`(factor * G).sum(0)` of a gradient matrix."""

    def weighed_sum(self, x_TD: Tensor, factor_T: Tensor) -> Tensor:
        """`(factor * x).sum(0)` of hidden states."""


class _Fast:
    """Products of the library that PyTorch takes."""

    rows = matmul.CPU_ROWS
    logits = staticmethod(matmul.logits)
    add_product = staticmethod(matmul.add_product)
    transposed = staticmethod(matmul.transposed)
    write_transposed = staticmethod(matmul.write_transposed)
    add_transposed = staticmethod(main_grad.add_product)
    add_column_sums = staticmethod(matmul.add_column_sums)
    column_sums = staticmethod(matmul.column_sums)
    weighed_sum = staticmethod(matmul.weighed_sum)


class _Fixed:
    """Products and sums of one order."""

    rows = fixed_order.COLUMNS
    logits = staticmethod(fixed_order.logits)
    add_product = staticmethod(fixed_order.add_product)
    transposed = staticmethod(fixed_order.transposed)
    write_transposed = staticmethod(fixed_order.write_transposed)
    add_transposed = staticmethod(fixed_order.add_transposed)
    add_column_sums = staticmethod(fixed_order.add_column_sums)
    column_sums = staticmethod(fixed_order.column_sums)
    weighed_sum = staticmethod(fixed_order.weighed_sum)


FAST: Arithmetic = _Fast()
FIXED: Arithmetic = _Fixed()
