"""The fused linear head as separate steps that a pipeline schedule calls, for stages that share one vocabulary.

`LinearHead` (see `linear.py`) is their simplest user: `first_pass`, the exchange and `token_losses` are its forward,
and what comes after the loss is its backward. A schedule has the products with the weight come first, before anything
is known of the other ranks:

    E = exp(z - m),  P = E @ W                                 `products`: no communication
    alpha = exp(m - lse), u = alpha * P + the label's terms    `result`: after one all-gather of the statistics
    dx = g * (u summed over the ranks)                         whoever holds g, the gradient of each token's loss
    dW = E.T @ (g alpha * x) + the label's terms               `weight_gradient`: whenever there is time

Rows are scaled after the products, so the sum over ranks needs no g: that is what lets the exchange be hidden. The
order of passes is that of "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288); the products
and the passes over rows are the head's own. FLOPs are those of `LinearHead` at `cache=1`: 6 T D V / R.

Legend: T tokens, D hidden size, V columns of this rank's shard, K statistics, R ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head.engine import linear_passes, statistics
from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.head.engine.weight_gradient import WeightGradient
from megatron_ext.head.row_passes import matmul, token_terms
from megatron_ext.head.row_passes.dispatch import token_gradient, token_results
from megatron_ext.head.validation.argument_checks import check_exchange, check_floating, check_labels, linear_fault


class FirstPass(NamedTuple):
    """What a rank has of a batch of tokens from its logits alone.

    Attributes:
        labels_T: as given.
        kept_T: bool, the labels that count.
        target_T: the label's column, -1 where it is another rank's or does not count.
        stats_KT: this rank's statistics, with a place more in each row for the exchange.
        exp_TV: exponentials (or logits) that are kept, `[T, 0]` if no gradient is wanted.
        shift_T: what they are relative to.
    """

    labels_T: Tensor
    kept_T: Tensor
    target_T: Tensor
    stats_KT: Tensor
    exp_TV: Tensor
    shift_T: Tensor


class Products(NamedTuple):
    """What a rank has before the exchange, where its product with the weight does not wait for that."""

    x_TD: Tensor
    first: FirstPass
    product_TD: Tensor | None  # E @ W, fp32 (fp64 for fp64); None if no gradient is wanted


class Result(NamedTuple):
    """What a rank has of it after the exchange.

    Attributes:
        loss_T: the losses, the same on every rank, in the dtype of the passes.
        hits_T: bool, whether the labels have the largest logits; None if `options.hits` did not ask for it.
        unit_dx_TD: this rank's part of the gradient of the hidden states where every loss has the gradient 1, in the
            weight's dtype; None if no gradient is wanted. Summed over the ranks and multiplied by the losses' gradient
            it is dx.
    """

    loss_T: Tensor
    hits_T: Tensor | None
    unit_dx_TD: Tensor | None
    products: Products
    stats: statistics.Statistics


def check_options(options: HeadOptions) -> None:
    """Raises ValueError for options whose gradient is not a row's factor times E: those know it after the exchange."""
    if options.entropy or options.softcap is not None:
        raise ValueError(
            f"entropy is {options.entropy}, softcap {options.softcap}: the head in steps takes neither, its products "
            f"are made before the ranks' statistics are known; use linear_cross_entropy"
        )


def first_pass(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    options: HeadOptions,
    sizes: list[int] | None,
    keep: bool,
) -> FirstPass:
    """Logits, their statistics, and what is kept of them. Arguments, and what is communicated: see `LinearHead`."""
    kept_T = labels_T != options.ignore_index
    target_T = (labels_T.long() - options.vocab.start).where(options.vocab.owns(labels_T) & kept_T, -1)
    found = linear_passes.statistics_pass(hidden_TD, weight_VD, bias_V, target_T, options, sizes, keep)
    return FirstPass(labels_T, kept_T, target_T, *found)


def token_losses(
    first: FirstPass, stats_RKT: Tensor, options: HeadOptions
) -> tuple[statistics.Statistics, token_terms.Results]:
    """The statistics of all shards together, and the losses with what else is read out.

    Raises:
        ValueError: the ranks' shards do not make up the vocabulary.
    """
    check_exchange(stats_RKT, first.labels_T, options)
    return token_results(stats_RKT, first.stats_KT, first.shift_T, first.kept_T, options)


@torch.no_grad()
def products(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, options: HeadOptions, backward: bool) -> Products:
    """The first step, of hidden states `[T, D]` that every rank holds, with this rank's shard `[V/R, D]`.

    Raises:
        ValueError: the options cannot be had in steps, a label is outside the vocabulary, dtypes or shapes do not fit.
    """
    check_options(options)
    check_floating("hidden", hidden_TD, 2)
    fault = linear_fault(hidden_TD, weight_VD, None, options.vocab, options.ranks)
    if fault is not None:
        raise fault
    check_labels(labels_T, options.ignore_index, options.vocab.size)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        first = first_pass(hidden_TD, weight_VD, None, labels_T, options, sizes=None, keep=backward)
        product_TD = matmul.add_product(None, first.exp_TV, weight_VD) if backward else None
    return Products(hidden_TD, first, product_TD)


def start_exchange(found: Products, options: HeadOptions) -> Pending:
    """Begin the second step's exchange. Communicates: 1 all-gather of `[K, T + 1]`."""
    own_KT = found.first.stats_KT[: statistics.written_rows(options)]
    return collectives.start_all_gather(own_KT.unsqueeze(0), options.group)


@torch.no_grad()
def result(found: Products, stats_RKT: Tensor, weight_VD: Tensor, options: HeadOptions) -> Result:
    """The second step. `stats_RKT`: the exchange's result.

    Raises:
        ValueError: the ranks' shards do not make up the vocabulary.
    """
    _, kept_T, target_T, *_ = found.first
    stats, results = token_losses(found.first, stats_RKT, options)
    unit_TD = None
    if found.product_TD is not None:
        grad = token_gradient(stats, kept_T, target_T, torch.ones_like(results.loss), None, options)
        rows = slice(0, target_T.shape[0])
        unit_TD = linear_passes.finished_dx(
            rows, found.product_TD, grad, target_T, weight_VD, None, options, passing=False
        )
    return Result(results.loss, results.hits, unit_TD, found._replace(product_TD=None), stats)


@torch.no_grad()
def weight_gradient(found: Result, grad_loss_T: Tensor, weight: Tensor, options: HeadOptions) -> Tensor | None:
    """The last step: dW `[V/R, D]` in the weight's dtype.

    With `options.fuse_main_grad` it is added to `weight.main_grad`, and what autograd is to be given in its place
    comes back (None if it wants nothing).
    """
    x_TD, (_, kept_T, target_T, _, exp_TV, _), _ = found.products
    grad = token_gradient(found.stats, kept_T, target_T, grad_loss_T, None, options)
    out_VD = main_grad.buffer_of(weight) if options.fuse_main_grad else torch.empty_like(weight)
    counted_V = None
    if grad.offset is not None:
        counted_V = linear_passes.counted(None, weight.shape[0], options, grad.offset)
    parts = (grad.scale, target_T, grad.target, grad.offset, counted_V)
    total = WeightGradient(out_VD, x_TD, *parts, accumulate=options.fuse_main_grad)
    total.add(slice(0, weight.shape[0]), exp_TV)
    total.finish()
    return main_grad.finish(weight, weight.dtype) if options.fuse_main_grad else out_VD
