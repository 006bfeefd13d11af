"""The head's autograd function, whatever makes the logits: what is saved, which gradients are asked for, what is sent
and given back. It can be differentiated any number of times on one graph, and once.

How a call's logits are passed over is a `Way`: of hidden states with exponentials kept (`linear.py`), with fixed bits
(`fixed_bits/linear.py`) or chunk by chunk, and of logits that exist (both in `chunked/ways.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.autograd import differentiable_once, without_autocast
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine.linear_passes import start_sum_of_ranks
from megatron_ext.head.engine.plan import Plan


class Passed(NamedTuple):
    """Outputs of a forward pass over the logits.

    Attributes:
        stats: of all shards together; None: no read-out wanted the softmax.
        results: of each read-out, which all ranks have.
        saved: what its gradient wants of forward.
        kept: tensors that the way wants in backward, beside its inputs.
    """

    stats: Statistics | None
    results: list[list[Tensor]]
    saved: list[list[Tensor]]
    kept: Sequence[Tensor] = ()


class Asked(NamedTuple):
    """Inputs of a backward pass over the logits.

    Attributes:
        inputs, kept, stats, saved: those of forward.
        grads: of each read-out's first result; None: none.
        needs: whether the gradient of each input is wanted.
        parameter: the weight itself, where its gradient goes into `main_grad`: hooks on saved tensors (offloading,
            recomputation) hand back another object, without its attributes.
    """

    plan: Plan
    inputs: list[Any]
    kept: list[Tensor]
    stats: Any
    saved: list[list[Tensor]]
    grads: list[Tensor | None]
    needs: Sequence[bool]
    parameter: Tensor | None


class Way:
    """Pass over the logits of one call. It holds what the pass takes beside its inputs, which are tensors."""

    def forward(self, plan: Plan, *inputs: Any) -> Passed:
        """Statistics and results."""
        raise NotImplementedError

    def backward(self, asked: Asked) -> tuple[Tensor | None, ...]:
        """The gradients of the first inputs; the others have none."""
        raise NotImplementedError


class ReadFunction(torch.autograd.Function):
    """The results of `plan`'s read-outs, one after the other, of `inputs` as `way` takes them.

    Communicates what the way does.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, plan: Plan, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        with without_autocast(inputs[0]):
            stats, results, saved, kept = way.forward(plan, *inputs)
        ctx.set_materialize_grads(False)
        ctx.way, ctx.plan, ctx.parameter = way, plan, inputs[1] if plan.call.fuse_main_grad else None
        ctx.counts = len(inputs), len(kept), 0 if stats is None else len(stats), [len(each) for each in saved]
        first = inputs[0] if plan.held is None or inputs[0] is None else inputs[0].to(plan.held)  # widened from it
        ctx.save_for_backward(first, *inputs[1:], *kept, *(stats or ()), *(x for each in saved for x in each))
        ctx.lengths = [len(each) for each in results]
        plain = []  # the first result of each read-out may have a gradient
        for readout, each in zip(plan.readouts, results, strict=True):
            plain += each[1:] if readout.differentiable else each
        ctx.mark_non_differentiable(*plain)
        return tuple(x for each in results for x in each)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)  # asked for once: recomputation hands out each tensor once
        inputs, kept, stats, saved = ctx.counts

        def taken(count: int) -> list[Any]:
            return [next(tensors) for _ in range(count)]

        given = taken(inputs)
        if ctx.plan.held is not None:
            given[0] = given[0].to(torch.float32)
        asked = Asked(
            ctx.plan,
            given,
            taken(kept),
            Statistics(*taken(stats)) if stats else None,
            [taken(count) for count in saved],
            _of_first_results(ctx, grads),
            ctx.needs_input_grad[2:],
            ctx.parameter,
        )
        with without_autocast(given[0]):
            found = ctx.way.backward(asked)
        return None, None, *found, *[None] * (inputs - len(found))


class HeadGradients:
    """The gradients of hidden states, weight, bias and low rank, a way's first inputs, that one backward is asked for.

    Attributes:
        dx, dw, db, dlow: whether each is wanted; dweights: that of the weight or of the low rank.
        fused: the weight's `main_grad`, where the gradient is added into it; None: `dw_VD` is to be filled.
        dw_VD, db_V, dlow_VR: the gradients once they are there, in any dtype.

    Args:
        sizes: with the sequence layout the number of each rank's tokens; else None.
    """

    dw_VD: Tensor | None = None
    db_V: Tensor | None = None
    dlow_VR: Tensor | None = None

    def __init__(self, asked: Asked, sizes: list[int] | None):
        self._asked, self._sizes = asked, sizes
        self.dx, self.dw, self.db, self.dlow = asked.needs[:4]
        self.dweights = self.dw or self.dlow
        self.fused = None if asked.parameter is None or not self.dw else main_grad.buffer_of(asked.parameter)
        self._sum: Pending | None = None

    def send(self, dx_TD: Tensor) -> None:
        """Begins to add up every rank's dx. Communicates: see `start_sum_of_ranks`."""
        self._sum = start_sum_of_ranks(dx_TD, self._asked.inputs[0], self._asked.plan.call, self._sizes)

    def given(self) -> tuple[Tensor | None, ...]:
        """Return the gradients for autograd, each in its input's dtype."""
        dw_VD, (_, weight_VD, bias_V, low_VR) = self.dw_VD, self._asked.inputs[:4]
        if self.fused is not None and self._asked.parameter is not None:
            dw_VD = main_grad.finish(self._asked.parameter, weight_VD.dtype)
        elif dw_VD is not None:
            dw_VD = dw_VD.to(weight_VD.dtype)
        dx_TD = None if self._sum is None else self._sum.wait()
        db_V = None if self.db_V is None else self.db_V.to(bias_V.dtype)
        return dx_TD, dw_VD, db_V, None if self.dlow_VR is None else self.dlow_VR.to(low_VR.dtype)


def _of_first_results(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the read-outs' first results, of those of all results."""
    found, at = [], 0
    for readout, length in zip(ctx.plan.readouts, ctx.lengths, strict=True):
        found.append(grads[at] if readout.differentiable else None)
        at += length
    return found
