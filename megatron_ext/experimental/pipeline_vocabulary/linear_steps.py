"""The fused linear head as separate steps that a pipeline schedule calls, for stages that share one vocabulary.

The steps are the passes of `head/engine/linear.py`. The products with the weight come first, before anything is known
of the other ranks:

    E = exp(z - m),  P = E @ W                                 `products`: no communication
    alpha = exp(m - lse), u = alpha * P + the label's terms    `result`: after one all-gather of the statistics
    dx = g * (u summed over the ranks)                         the rank that holds g, the gradient of the losses
    dW = E.T @ (g alpha * x) + the label's terms               `weight_gradient`: whenever there is time

Rows are scaled after the products, so the sum over ranks needs no g: that is what lets the exchange be hidden. The
order of passes is that of "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288); the products
and the passes over rows are the head's own. FLOPs are those of that file at `cache=1`: 6 T D V / R.

Legend: T tokens, D hidden size, V columns of this rank's shard, K statistics, R ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head.call import matmul, statistics
from megatron_ext.head.call.logit_gradient import basis_of
from megatron_ext.head.call.matmul import is_quantised
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import Statistics, check_exchange
from megatron_ext.head.checks import check_floating, linear_fault
from megatron_ext.head.engine.linear import WeightGradient, finished_dx, leaf_weights, statistics_pass
from megatron_ext.head.engine.plan import Plan


class Products(NamedTuple):
    """Products of a rank, which it computes before the exchange."""

    x_TD: Tensor
    plan: Plan
    stats_KT: Tensor  # with one more column, for the exchange
    exp_TV: Tensor  # E, `[T, 0]` if no gradient is wanted
    shift_T: Tensor  # m of E = exp(z - m)
    product_TD: Tensor | None  # E @ W, fp32 (fp64 for fp64); None if no gradient is wanted

    def tensors(self) -> list[Tensor]:
        """List the tensors that later steps read, maybe on another stream."""
        mine = [self.x_TD, self.stats_KT, self.exp_TV, self.shift_T, *self.plan.tensors()]
        return mine if self.product_TD is None else [*mine, self.product_TD]


class Result(NamedTuple):
    """Result of a rank after the exchange.

    Attributes:
        results: of each read-out, the same on every rank, in the dtype of the passes.
        unit_dx_TD: this rank's part of the hidden states' gradient for a gradient of 1 of the first read-out's first
            result, in the weight's dtype; None if no gradient is wanted. Summed over the ranks and multiplied by that
            result's gradient it is dx.
    """

    results: list[list[Tensor]]
    unit_dx_TD: Tensor | None
    products: Products
    stats: Statistics | None
    saved: list[list[Tensor]]

    @property
    def loss_T(self) -> Tensor:
        """Return the first result of the first read-out."""
        return self.results[0][0]

    @property
    def hits_T(self) -> Tensor | None:
        """Return the result of the second read-out, if there is one."""
        return self.results[1][0] if len(self.results) > 1 else None


def plan_steps(readouts: Any, call: ResolvedHead, hidden_TD: Tensor) -> Plan:
    """Plan the read-outs of hidden states `[T, D]` in steps; only the first one has a gradient.

    Raises:
        ValueError: a read-out's gradient is not a row's factor times E, and so is known only after the exchange.
    """
    if call.softcap is not None or any(r.needs_logits or r.expected for r in readouts):
        names = ", ".join(type(r).__name__ for r in readouts)
        raise ValueError(
            f"softcap is {call.softcap}, read-outs are {names}: the head in steps takes no softcap, and only "
            "read-outs of labels, since its products come before the ranks' statistics; use linear_cross_entropy"
        )
    return Plan([r.copied() for r in readouts], call, lambda x: x, hidden_TD.shape[0], hidden_TD)


@torch.no_grad()
def products(hidden_TD: Tensor, weight_VD: Tensor, readouts: Any, call: ResolvedHead, backward: bool) -> Products:
    """Compute the first step, of hidden states `[T, D]` that every rank holds, with this rank's shard `[V/R, D]`.

    Raises:
        ValueError: the read-outs cannot be computed in steps, a label is outside the vocabulary, or dtypes or shapes do
            not fit.
    """
    check_floating("hidden", hidden_TD, 2)
    fault = linear_fault(hidden_TD, weight_VD, None, call.vocab, call.ranks)
    for r in readouts:
        fault = fault or r.check(call.vocab.size, call.vocab, call.group)
    if fault is not None:
        raise fault
    if weight_VD.dtype != hidden_TD.dtype or is_quantised(weight_VD):
        raise ValueError(
            f"weight is {type(weight_VD).__name__} of {weight_VD.dtype}, hidden {hidden_TD.dtype}: in steps they must "
            f"be plain and of one dtype; cast one, or use linear_cross_entropy"
        )
    plan = plan_steps(readouts, call, hidden_TD)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        _, leaves = leaf_weights(weight_VD, None, None, plan, hidden_TD)
        stats_KT, (exp_TV,), (shift_T,) = statistics_pass(hidden_TD, weight_VD, leaves, plan, sizes=None, keep=backward)
        product_TD = matmul.add_product(None, exp_TV, weight_VD) if backward else None
    return Products(hidden_TD, plan, stats_KT, exp_TV, shift_T, product_TD)


def start_exchange(found: Products) -> Pending:
    """Begin the second step's exchange. Communicates: 1 all-gather of `[K, T + 1]`."""
    call = found.plan.call
    own_KT = found.stats_KT[: statistics.own_rows(call)]
    statistics.sign(own_KT, call.vocab)
    return collectives.start_all_gather(own_KT.unsqueeze(0), call.group)


@torch.no_grad()
def result(found: Products, stats_RKT: Tensor, weight_VD: Tensor) -> Result:
    """Compute the second step. `stats_RKT`: the exchange's result.

    Raises:
        ValueError: the ranks' shards do not make up the vocabulary.
    """
    plan = found.plan
    check_exchange(stats_RKT, plan.asked, plan.call)
    stats = plan.passes.combined(stats_RKT, found.stats_KT, found.shift_T, plan.call)
    results, saved = plan.results(stats, stats_RKT, found.stats_KT)
    unit_TD = None
    if found.product_TD is not None:
        grad = _gradient(plan, stats, saved, torch.ones_like(results[0][0]))
        _, (leaf,) = leaf_weights(weight_VD, None, None, plan, found.x_TD)
        tokens = slice(0, plan.tokens)
        unit_TD = finished_dx(tokens, found.product_TD, grad, leaf, plan, passing=False)
    return Result(results, unit_TD, found._replace(product_TD=None), stats, saved)


@torch.no_grad()
def weight_gradient(found: Result, grad_T: Tensor, weight: Tensor) -> Tensor | None:
    """Compute the last step: dW `[V/R, D]` in the weight's dtype, from the gradient of the first read-out's result.

    With `call.fuse_main_grad` dW is added to `weight.main_grad`, and the result is the gradient to give autograd in its
    place (None: none).
    """
    x_TD, plan = found.products.x_TD, found.products.plan
    call = plan.call
    grad = _gradient(plan, found.stats, found.saved, grad_T)
    out_VD = main_grad.buffer_of(weight) if call.fuse_main_grad else torch.empty_like(weight)
    _, (leaf,) = leaf_weights(weight, None, None, plan, x_TD)
    total = WeightGradient(out_VD, x_TD, leaf, grad, plan, accumulate=call.fuse_main_grad)
    total.add(slice(0, weight.shape[0]), found.products.exp_TV)
    total.finish()
    return main_grad.finish(weight, weight.dtype) if call.fuse_main_grad else out_VD


def _gradient(plan: Plan, stats: Any, saved: list[list[Tensor]], grad_T: Tensor) -> Any:
    """Return the gradient of the first read-out alone."""
    basis = basis_of(plan.readouts, stats, saved, [grad_T, *[None] * (len(plan.readouts) - 1)])
    return plan.passes.token_gradient(stats, plan.kept_T, plan.target_T, basis, plan.call, plan.labelled)
