"""The passes over logits together with the product that makes them: in Triton logits stay in registers then.

Options, results and rows of statistics are those of `logit_passes`. There is no softcap, and no sum of all logits.

Legend: T tokens, D hidden size, V columns of this rank's shard (or of a block of it), K statistics.
"""

from torch import Tensor

from megatron_ext.head.call import matmul
from megatron_ext.head.row_passes import logit_passes


def product_statistics(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    shift_T: Tensor,
    exp_TV: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
) -> None:
    """`logit_passes.row_statistics` of the logits `x @ W.T`."""
    sums = {"with_entropy": with_entropy, "with_hits": with_hits}
    options = {"bias_V": bias_V, "counted": counted, "temperature": temperature, **sums}
    logit_passes.row_statistics(matmul.logits(x_TD, w_VD), target_T, stats_KT, exp_TV, shift_T, **options)


def product_gradient(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    shift_T: Tensor,
    out_TV: Tensor,
    scale_T: Tensor | None = None,
    slope_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    temperature: float = 1.0,
) -> None:
    """`logit_passes.row_gradient` of the logits `x @ W.T`."""
    parts = {"scale_T": scale_T, "slope_T": slope_T, "bias_V": bias_V}
    options = {**parts, "counted": counted, "temperature": temperature}
    logit_passes.row_gradient(matmul.logits(x_TD, w_VD), target_T, shift_T, out_TV, **options)
