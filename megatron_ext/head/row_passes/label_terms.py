"""The label's contribution to dx and dW, added outside of the matrix products. No process groups, no autograd.

    dW[y] += value x        dx = scale * product + value W[y]

and with label smoothing a term that is the same for every row of W, or every token. Sums are fp32 (fp64 for fp64), and
each result is rounded once. `kernels/label_terms.py` has the same functions in Triton.

Legend: T tokens, D hidden size, V rows of this rank's weight (or of a block of it).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.head.call.chunk_sizes import column_blocks
from megatron_ext.numerics.tensors import has_values, pieces


def add_label_rows(
    out_VD: Tensor,
    x_TD: Tensor,
    target_T: Tensor,
    value_T: Tensor,
    common_D: Tensor | None = None,
    counted_V: Tensor | None = None,
    *,
    in_order: bool = False,
    labelled: bool = False,
) -> None:
    """`out[target] += value * x` for each token, and `out += counted * common` for each row.

    Args:
        out_VD: added to; any floating dtype.
        x_TD: any floating dtype.
        target_T: int64, the row a token is added to, -1: none.
        value_T: fp32 (fp64 for fp64), the dtype of the sums.
        common_D, counted_V: in `value_T`'s dtype, both or neither.
        in_order: the tokens of a row are added one after the other, however many they are and whatever other labels
            there are; on a CPU they always are.
        labelled: the caller knows that every token has a row.
    """
    dtype, width = value_T.dtype, x_TD.shape[1]
    wide = out_VD.dtype == dtype
    for part in [slice(0, width)] if wide else column_blocks(len(out_VD) + len(x_TD), width, None, value_T):
        out, x = (out_VD, x_TD) if wide else (out_VD[:, part], x_TD[:, part])
        sum_VD = out if wide else out.to(dtype)
        for at in _tokens(target_T, x, labelled):
            row, value = (target_T, value_T) if at is None else (target_T[at], value_T[at])
            if isinstance(at, slice) and not labelled:  # all tokens, and some of them may have no row
                row, value = row.clamp(min=0), value.where(row >= 0, 0.0)
            term = (x if at is None else x[at]) * value.unsqueeze(1)
            term = term if term.dtype == dtype else term.to(dtype)
            if out_VD.is_cuda:  # there `index_add_` sums in another order in each run
                sum_VD.index_put_((row,), term, accumulate=True)
            else:
                sum_VD.index_add_(0, row, term)
        if common_D is not None and counted_V is not None:
            sum_VD.addcmul_(counted_V.unsqueeze(1), common_D[part])
        if not wide:
            out.copy_(sum_VD)


def finish_dx(
    out_TD: Tensor,
    product_TD: Tensor,
    scale_T: Tensor,
    target_T: Tensor,
    value_T: Tensor,
    w_VD: Tensor,
    offset_T: Tensor | None = None,
    common_D: Tensor | None = None,
) -> None:
    """`out = scale * product + value * W[target] + offset * common`, row by row.

    Args:
        out_TD: written. It may be `product_TD`, or in another dtype lie in the first half of its memory.
        product_TD: any floating dtype.
        scale_T, value_T, offset_T: fp32 (fp64 for fp64); value 0 where a token has no row of W.
        target_T: int64, the token's row of W, -1: none.
        common_D: in `scale_T`'s dtype, with `offset_T` or not at all.
    """
    value_T1, scale_T1, target_T = value_T.unsqueeze(1), scale_T.unsqueeze(1), target_T.clamp(min=0)
    for rows in pieces(product_TD):  # in order: rows not read yet lie behind those written
        product, out, row, value, scale, offset = product_TD, out_TD, target_T, value_T1, scale_T1, offset_T
        if rows.stop - rows.start != product_TD.shape[0]:
            product, out, row, value, scale = (x[rows] for x in (product, out, row, value, scale))
            offset = None if offset is None else offset[rows]
        dx_TD = w_VD.index_select(0, row) * value
        product = product if product.dtype == dx_TD.dtype else product.to(dx_TD.dtype)
        dx_TD = torch.addcmul(dx_TD, product, scale, out=out if out.dtype == dx_TD.dtype else dx_TD)
        if offset is not None and common_D is not None:
            dx_TD.addcmul_(offset.unsqueeze(1), common_D)
        if out.dtype != dx_TD.dtype:
            out.copy_(dx_TD)


def scale_rows(out_TD: Tensor, x_TD: Tensor, scale_T: Tensor) -> None:
    """`out = scale * x`, row by row, rounded once; `out` and `x` in any floating dtype, `scale` fp32 (fp64 for fp64).

    torch multiplies 16-bit numbers by fp32 ones at a fifth of the rate at which an H200 reads and writes them.
    """
    for rows in pieces(x_TD):
        if rows.stop - rows.start == len(x_TD):
            torch.mul(x_TD, scale_T.unsqueeze(1), out=out_TD)
        else:
            torch.mul(x_TD[rows], scale_T[rows].unsqueeze(1), out=out_TD[rows])


def _tokens(target_T: Tensor, x_TD: Tensor, labelled: bool) -> Sequence[slice | Tensor | None]:
    """The tokens with a row in pieces, None: all at once; all of them where their number is not known or the host would
    wait for it."""
    if labelled:
        each = pieces(x_TD)
        return each if len(each) > 1 else [None]
    if target_T.is_cuda or not has_values(target_T):
        return pieces(x_TD)
    found_N1, most = (target_T >= 0).nonzero(), pieces(x_TD)[0].stop if len(x_TD) else 1
    if len(found_N1) > most:
        return found_N1.squeeze(1).split(most)
    if len(found_N1) == len(target_T):
        return [None]
    return [found_N1.squeeze(1)] if len(found_N1) else []
