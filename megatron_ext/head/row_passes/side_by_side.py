"""Weights that lie side by side: a head's own `[V, D]` and the low rank `[V, r]` of LoRA, one operand `[V, D + r]`.

It is never made: `matmul.py` multiplies part by part with the same columns of hidden states, and gradients have their
own tensor for each part. The engine takes it where it takes a weight.

Legend: T tokens, D columns of hidden states (those of all parts), V vocabulary columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad


class SideBySide:
    """Parts `[V, D]` of an operand, in the order of their columns; what is here of a tensor does what a tensor does."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = [*parts]
        self.columns = column_spans(self.parts)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the operand."""
        return torch.Size((self.parts[0].shape[0], self.columns[-1].stop))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all parts, once `to` has made them alike."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def element_size(self) -> int:
        """Return the element size of the first part."""
        return self.parts[0].element_size()

    def __getitem__(self, rows: slice) -> "SideBySide":
        return SideBySide([part[rows] for part in self.parts])

    def to(self, dtype: torch.dtype) -> "SideBySide":
        """All parts in `dtype`: what has it already is not copied."""
        return SideBySide([part.to(dtype) for part in self.parts])

    def index_select(self, dim: int, index: Tensor) -> "SideBySide":
        """Some rows of each part."""
        return SideBySide([part.index_select(dim, index) for part in self.parts])

    def across(self, x_TD: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part behind its columns of `x`."""
        return [(x_TD[:, span], part) for span, part in zip(self.columns, self.parts, strict=True)]


Operand = Tensor | SideBySide


def operand(weight_VD: Tensor, low_VD: Tensor | None) -> Operand:
    """A head's weight as numbers, and beside it the low rank where there is one."""
    own_VD = weight_VD if type(weight_VD).dequantize is Tensor.dequantize else numbers(weight_VD)
    return own_VD if low_VD is None else SideBySide([own_VD, low_VD])


def numbers(weight: Tensor) -> Tensor:
    """Itself, or those of a quantised weight: each pass asks for them, and what is made lives as long as that."""
    return weight.dequantize() if is_quantised(weight) else weight


def is_quantised(weight: Any) -> bool:
    """Return whether `weight` is of a class with a `dequantize` of its own, as torchao's and quanto's are."""
    return isinstance(weight, Tensor) and type(weight).dequantize is not Tensor.dequantize


def tensors_of(w_VD: Operand) -> list[Tensor]:
    """The tensors that it is made of."""
    return w_VD.parts if isinstance(w_VD, SideBySide) else [w_VD]


def column_spans(parts: Sequence[Tensor]) -> list[slice]:
    """Return the columns of the operand that each part is."""
    spans, start = [], 0
    for part in parts:
        spans.append(slice(start, start + part.shape[1]))
        start += part.shape[1]
    return spans


def in_one(w_VD: Operand) -> Tensor:
    """The operand as one tensor, made of its parts if there are several."""
    return torch.cat(w_VD.parts, 1) if isinstance(w_VD, SideBySide) else w_VD


class WeightSums:
    """The gradients of an operand's parts, summed over chunks of tokens.

    `totals`: where those of each part are added; None for one that wants none. `columns`: the parts' of the operand.
    """

    def __init__(self, columns: Sequence[slice], totals: Sequence[Tensor | None]):
        self._columns, self.totals = columns, totals
        self.wanted = any(total is not None for total in totals)

    def rows(self, rows: slice) -> "WeightSums":
        """Return the sums of some rows of the operand."""
        return WeightSums(self._columns, [None if total is None else total[rows] for total in self.totals])

    def add(self, g_TV: Tensor, x_TD: Tensor, add_product: Callable[..., Any] = main_grad.add_product) -> None:
        """`G.T @ x` of these tokens, to each part's with its columns of `x`, by `add_product`."""
        for total_VD, span in zip(self.totals, self._columns, strict=True):
            if total_VD is not None:
                add_product(total_VD, g_TV, x_TD if len(self._columns) == 1 else x_TD[:, span])
