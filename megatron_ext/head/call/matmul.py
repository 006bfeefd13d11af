"""The head's matmuls: 16-bit operands, fp32 sums, one rounding; by a weight, or by weights that lie side by side; and
the transform of the logits that they make.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). On CPU that does not exist and an fp32 matmul of 16-bit
operands takes four times as long where the processor has 16-bit products: there such a product is rounded once
(`megatron_ext.numerics.tensors`), and sums of several run in fp32.

A head's own weight `[V, D]` and the low rank `[V, r]` of LoRA are one operand `[V, D + r]`. It is never made: each part
is multiplied with its columns of hidden states, and gradients have their own tensor for each part.

Legend: T tokens, D columns of hidden states (those of all parts), V vocabulary columns. G_TV: a gradient matrix, or
what stands for one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.numerics import cpu_products
from megatron_ext.numerics.tensors import accumulation_dtype, new_matrix, on_tensor_cores, pieces, widens

# Rows of a product at a time on CPU: it comes faster so, and a 16-bit one, which is added to wider memory, takes little
# of its own. That one is summed over this many chunks of columns: several rounded products err less than one.
CPU_ROWS, _CPU_CHUNKS = 2048, 4


class SideBySide:
    """Parts `[V, D]` of an operand, in the order of their columns; what is here of a tensor does what a tensor does."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = [*parts]
        self.columns = column_spans(self.parts)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.parts[0].shape[0], self.columns[-1].stop))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all parts, once `to` has made them alike."""
        return self.parts[0].dtype

    def __getitem__(self, rows: slice) -> "SideBySide":
        return SideBySide([part[rows] for part in self.parts])

    def to(self, dtype: torch.dtype) -> "SideBySide":
        """All parts in `dtype`: what has it already is not copied."""
        return SideBySide([part.to(dtype) for part in self.parts])

    def index_select(self, dim: int, index: Tensor) -> "SideBySide":
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


def logits(x_TD: Tensor, w_VD: Operand, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
    """`x @ W.T`: fp32 on CUDA for 16-bit operands, if they are not to be rounded; else in their dtype, and then in
    `out_TV`'s memory if given. Of parts the last product comes first: where sums are rounded, it is the smallest."""
    if isinstance(w_VD, SideBySide):
        *others, last = w_VD.across(x_TD)
        out_TV = logits(*last, out_TV, rounds)
        for x_TP, w_VP in reversed(others):
            main_grad.add_product(out_TV, x_TP.t(), w_VP.t())
        return out_TV
    if x_TD.is_cuda and widens(x_TD, rounds):
        out_TV = new_matrix(x_TD, x_TD.shape[0], w_VD.shape[0], torch.float32)
        return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32, out=out_TV)
    out_TV = new_matrix(x_TD, x_TD.shape[0], w_VD.shape[0]) if out_TV is None else out_TV
    if x_TD.itemsize > 2:  # nothing has to be asked of the processor
        return torch.mm(x_TD, w_VD.t(), out=out_TV)
    return cpu_products.mm(x_TD, w_VD.t(), out_TV)


def transformed(
    z: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    temperature: float,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """`softcap * tanh((z + bias) / softcap) / temperature` in `dtype`, in `out`; `z` itself where nothing changes."""
    if z.dtype == dtype and bias is None and softcap is None and temperature == 1.0:
        return z
    out = z.to(dtype, copy=True) if out is None else out if out is z else out.copy_(z)
    if bias is not None:
        out.add_(bias)
    if softcap is not None:
        out.mul_(1.0 / softcap).tanh_().mul_(softcap)
    if temperature != 1.0:  # `* (1 / temperature)`, by which torch divides by a number on CUDA, would round twice
        out.div_(out.new_full((), temperature) if out.is_cuda else temperature)
    return out


def bend(z: Tensor, bias: Tensor | None, softcap: float, dtype: torch.dtype) -> Tensor:
    """The softcap's slope `1 - tanh^2` at `z + bias`, as `4 t / (1 + t)^2`, t = exp(-2 |x|).

    Near 1 tanh has no digit to spare, and torch's cosh on a CPU has other bits for a tensor's last elements.
    """
    t = z.to(dtype, copy=True)
    if bias is not None:
        t.add_(bias)
    t.mul_(2.0 / softcap).abs_().neg_().exp_()
    squared = t.add(1.0).square_()
    return t.mul_(4.0).div_(squared)


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Operand) -> Tensor:
    """`total + G @ W` in fp32 (fp64 for fp64), in place; a new tensor without a total."""
    wide = accumulation_dtype(g_TV.dtype)
    if isinstance(w_VD, SideBySide):
        if total_TD is None:
            total_TD = g_TV.new_zeros(g_TV.shape[0], w_VD.shape[1], dtype=wide)
        for part_TD, w_VP in w_VD.across(total_TD):
            add_product(part_TD, g_TV, w_VP)
        return total_TD
    if g_TV.is_cuda:
        if total_TD is None:
            return torch.mm(g_TV, w_VD) if g_TV.dtype == wide else torch.mm(g_TV, w_VD, out_dtype=wide)
        main_grad.add_product(total_TD, g_TV.t(), w_VD)
        return total_TD
    tokens, columns = g_TV.shape
    if total_TD is None and g_TV.dtype == wide and tokens <= CPU_ROWS:
        return torch.mm(g_TV, w_VD)
    if total_TD is None:
        total_TD = g_TV.new_zeros(tokens, w_VD.shape[1], dtype=wide)
    step = max(columns, 1) if g_TV.dtype == wide else max(64, -(-columns // _CPU_CHUNKS))
    for start in range(0, tokens, CPU_ROWS):
        rows = slice(start, start + CPU_ROWS)
        for at in range(0, columns, step):
            parts = g_TV[rows, at : at + step], w_VD[at : at + step]
            if g_TV.dtype == wide:
                total_TD[rows].addmm_(*parts)
            else:
                total_TD[rows] += cpu_products.mm(*parts)
    return total_TD


def transposed(g_TV: Tensor, x_TD: Tensor) -> Tensor:
    """`G.T @ x` on a CPU in fp32 (fp64 for fp64); of 16-bit operands it comes faster so, `CPU_ROWS` rows of it at a
    time, than as a whole (294 ms against 380 at T 4096, D 512, V 32768), and takes little memory."""
    tokens = x_TD.shape[0]
    step = max(64, -(-tokens // _CPU_CHUNKS))
    total_VD = g_TV.new_empty(g_TV.shape[1], x_TD.shape[1], dtype=accumulation_dtype(g_TV.dtype))
    for at in range(0, tokens or 1, step):  # of no token the product is 0
        product_VD = cpu_products.mm(g_TV[at : at + step].t(), x_TD[at : at + step])
        total_VD = total_VD.add_(product_VD) if at else total_VD.copy_(product_VD)
        del product_VD  # before the next one is made
    return total_VD


def write_transposed(out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
    """`out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""
    if accumulate:
        main_grad.add_product(out_VD, g_TV, x_TD)
    elif out_VD.dtype == g_TV.dtype:
        torch.mm(g_TV.t(), x_TD, out=out_VD)
    elif on_tensor_cores(g_TV) and out_VD.dtype == torch.float32:
        torch.mm(g_TV.t(), x_TD, out_dtype=torch.float32, out=out_VD)
    else:
        out_VD.copy_(torch.mm(g_TV.t(), x_TD))


add_transposed = main_grad.add_product


def add_column_sums(total_V: Tensor, g_TV: Tensor) -> None:
    """`total += G.sum(0)`."""
    total_V += g_TV.sum(0, dtype=total_V.dtype)


def column_sums(g_TV: Tensor, factor_T: Tensor) -> Tensor:
    """`(factor * G).sum(0)` as a product, in the dtype of G."""
    return cpu_products.mm(g_TV.t(), factor_T.to(g_TV.dtype).unsqueeze(1)).squeeze(1)


def weighed_sum(x_ND: Tensor, factor_N: Tensor) -> Tensor:
    """`(factor * x).sum(0)` in the factor's dtype, a few rows at a time."""
    total_D = factor_N.new_zeros(x_ND.shape[1])
    for rows in pieces(x_ND):
        total_D += (x_ND[rows] * factor_N[rows].unsqueeze(1)).sum(0)
    return total_D


def add_to_parts(
    totals: Sequence[Tensor | None],
    g_TV: Tensor,
    x_TD: Tensor,
    columns: Sequence[slice],
    add_product: Callable[..., Any] = main_grad.add_product,
) -> None:
    """Add `G.T @ x` to the total of each part of an operand that has one, by `add_product`; `columns`: of each."""
    for total_VD, span in zip(totals, columns, strict=True):
        if total_VD is not None:
            add_product(total_VD, g_TV, x_TD if len(columns) == 1 else x_TD[:, span])
