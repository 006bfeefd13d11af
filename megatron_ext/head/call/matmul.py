"""The head's matmuls: 16-bit operands, fp32 sums, one rounding; by a weight, or by a weight and a low rank beside it;
and the transform of logits.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). CPUs have no such product, and an fp32 matmul of 16-bit
operands takes four times as long where the processor has 16-bit products: there a 16-bit product is rounded once
(`megatron_ext.numerics.cpu_products`), and sums of several products are fp32.

A head's own weight `[V, D]` and the low rank `[V, r]` of LoRA are one operand `[V, D + r]`. It is never made: each part
is multiplied with its columns of hidden states, and gradients have their own tensor for each part.

Legend: T tokens, D columns of hidden states (those of all parts), V vocabulary columns. G_TV: the gradient matrix, or
the exponentials in its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.numerics import cpu_products
from megatron_ext.numerics.tensors import accumulation_dtype, new_matrix, on_tensor_cores, pieces, widens

# Rows of a product at a time on CPU, which is faster than the whole, and bounds the memory of 16-bit products that are
# added to an fp32 sum. The number of chunks into which such a sum is cut: several rounded products err less than one.
CPU_ROWS, _CPU_CHUNKS = 2048, 4


class SideBySide:
    """An operand of several parts `[V, D]`, in the order of their columns; methods named as a tensor's do the same."""

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
        """Return all parts in `dtype`; parts that have it are not copied."""
        return SideBySide([part.to(dtype) for part in self.parts])

    def index_select(self, dim: int, index: Tensor) -> "SideBySide":
        return SideBySide([part.index_select(dim, index) for part in self.parts])

    def across(self, x_TD: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of columns of `x` and the part that they are multiplied with."""
        return [(x_TD[:, span], part) for span, part in zip(self.columns, self.parts, strict=True)]


Operand = Tensor | SideBySide


def operand(weight_VD: Tensor, low_VD: Tensor | None) -> Operand:
    """Return a head's weight, dequantised if need be, with the low rank beside it if there is one."""
    own_VD = weight_VD if type(weight_VD).dequantize is Tensor.dequantize else numbers(weight_VD)
    return own_VD if low_VD is None else SideBySide([own_VD, low_VD])


def numbers(weight: Tensor) -> Tensor:
    """Return the weight, or a quantised weight dequantised; each pass calls this anew, and frees the copy."""
    return weight.dequantize() if is_quantised(weight) else weight


def is_quantised(weight: Any) -> bool:
    """Return whether `weight` is of a class with a `dequantize` of its own, as torchao's and quanto's are."""
    return isinstance(weight, Tensor) and type(weight).dequantize is not Tensor.dequantize


def column_spans(parts: Sequence[Tensor]) -> list[slice]:
    """Return the columns of the whole operand that each part has."""
    spans, start = [], 0
    for part in parts:
        spans.append(slice(start, start + part.shape[1]))
        start += part.shape[1]
    return spans


def in_one(w_VD: Operand) -> Tensor:
    """Return the operand as one tensor, concatenated if it has several parts."""
    return torch.cat(w_VD.parts, 1) if isinstance(w_VD, SideBySide) else w_VD


def logits(x_TD: Tensor, w_VD: Operand, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
    """Return `x @ W.T`: fp32 on CUDA for 16-bit operands, unless `rounds`; else in the operands' dtype, and written to
    `out_TV` if given. The last part's product is the first of the sum: where sums are rounded, it is the smallest."""
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
    if x_TD.itemsize > 2:  # does not depend on the processor's 16-bit products
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
    """Return `softcap * tanh((z + bias) / softcap) / temperature` in `dtype`, in `out` if given; `z` if unchanged."""
    if z.dtype == dtype and bias is None and softcap is None and temperature == 1.0:
        return z
    out = z.to(dtype, copy=True) if out is None else out if out is z else out.copy_(z)
    if bias is not None:
        out.add_(bias)
    if softcap is not None:
        out.mul_(1.0 / softcap).tanh_().mul_(softcap)
    if temperature != 1.0:  # torch divides by a number on CUDA as `* (1 / temperature)`, rounded twice
        out.div_(out.new_full((), temperature) if out.is_cuda else temperature)
    return out


def bend(z: Tensor, bias: Tensor | None, softcap: float, dtype: torch.dtype) -> Tensor:
    """Return the softcap's slope `1 - tanh(x)^2`, x = (z + bias) / softcap, as `4 t / (1 + t)^2`, t = exp(-2 |x|).

    `1 - tanh^2` loses digits where tanh is near 1; on a CPU torch's cosh has other bits in a tensor's last elements.
    """
    t = z.to(dtype, copy=True)
    if bias is not None:
        t.add_(bias)
    t.mul_(2.0 / softcap).abs_().neg_().exp_()
    squared = t.add(1.0).square_()
    return t.mul_(4.0).div_(squared)


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Operand) -> Tensor:
    """Return `total + G @ W` in fp32 (fp64 for fp64), in place, or in a new tensor without a total."""
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
    """Return `G.T @ x` on a CPU in fp32 (fp64 for fp64). Callers take `CPU_ROWS` rows of it at a time: with 16-bit
    operands this is faster than the whole (294 ms against 380 at T 4096, D 512, V 32768), and takes little memory."""
    tokens = x_TD.shape[0]
    step = max(64, -(-tokens // _CPU_CHUNKS))
    total_VD = g_TV.new_empty(g_TV.shape[1], x_TD.shape[1], dtype=accumulation_dtype(g_TV.dtype))
    for at in range(0, tokens or 1, step):  # without tokens the product is 0
        product_VD = cpu_products.mm(g_TV[at : at + step].t(), x_TD[at : at + step])
        total_VD = total_VD.add_(product_VD) if at else total_VD.copy_(product_VD)
        del product_VD  # before the next one is made
    return total_VD


def write_transposed(out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
    """Write `out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""
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
    """Add `G.sum(0)` to `total`, in its dtype."""
    total_V += g_TV.sum(0, dtype=total_V.dtype)


def column_sums(g_TV: Tensor, factor_T: Tensor) -> Tensor:
    """Return `(factor * G).sum(0)`, made as a product, in the dtype of G."""
    return cpu_products.mm(g_TV.t(), factor_T.to(g_TV.dtype).unsqueeze(1)).squeeze(1)


def weighed_sum(x_ND: Tensor, factor_N: Tensor) -> Tensor:
    """Return `(factor * x).sum(0)` in the factor's dtype, a few rows at a time."""
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
    """Add `G.T @ x` by `add_product` to each part's total that is not None; `columns`: each part's columns of `x`."""
    for total_VD, span in zip(totals, columns, strict=True):
        if total_VD is not None:
            add_product(total_VD, g_TV, x_TD if len(columns) == 1 else x_TD[:, span])
