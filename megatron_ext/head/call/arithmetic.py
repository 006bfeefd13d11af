"""Products and sums of a head: what `bits` selects, and the only thing that it selects.

`FAST` is `matmul.py`, a library's products, whose order of additions follows from their shapes. `FIXED` is
`numerics/fixed_order.py`: every sum has one order, which no other token, chunk or kept column changes, and is one of a
leaf's columns alone. Leaves and ranks are added in the order of a tree (`leaves.py`).

Legend: T tokens, D hidden size, V columns of a leaf or of a block of it. G_TV: a gradient matrix, or what stands for
one.
"""

from typing import Any, Protocol

from torch import Tensor

from megatron_ext.head.call import matmul
from megatron_ext.numerics import fixed_order


class Arithmetic(Protocol):
    """The products and sums of one call; those of gradients are in fp32 (fp64 for fp64).

    Attributes:
        CPU_ROWS: rows of dW that `transposed` makes at a time on a CPU.
    """

    CPU_ROWS: int

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


FAST: Arithmetic = matmul
FIXED: Arithmetic = fixed_order
