"""Forward and backward over a global batch, whose loss is one once all ranks know that it is."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.data.agreement_of_ranks import RuntimeErrorElsewhere
from megatron_ext.policy.data.batch_plan import Counts, Step
from megatron_ext.policy.worker.loss_inputs import LossInputs
from megatron_ext.policy.worker.open_step import Metrics


def loss_pass(
    backend: Backend,
    inputs: LossInputs,
    number: int,
    step: Step,
    batch: BatchedDataDict,
    counts: Counts,
    loss_scale: float,
) -> tuple[float, Metrics]:
    """Forward and backward over global batch `number`, or a part of it: its loss, and the metrics of this rank's
    micro-batches. Gradients are of the loss times `loss_scale`.

    Args:
        counts: divisors of the loss.

    Raises:
        ValueError, RuntimeError: a loss failed or is not finite; on every rank, with gradients cleared.
    """
    divisors = {name: torch.tensor(n, device=backend.device) for name, n in counts._asdict().items()}
    total = torch.zeros((), dtype=torch.float64, device=backend.device)
    fault: Exception | None = None
    metrics: Metrics = []

    def loss_of(output: Tensor, micro_batch: BatchedDataDict, _: list[int], real: bool) -> Tensor | None:
        nonlocal fault, total
        nothing = output[:0].sum()  # 0, through which backward reaches every weight on every rank
        loss, found = nothing, None
        if real and fault is None:
            try:
                loss, found = _validated(inputs.call(output, micro_batch, divisors))
            except Exception as error:  # the other ranks wait for this one's share of the model
                fault = error
        total += loss.detach()
        if found is not None:
            metrics.append(found)
        if not torch.is_grad_enabled():
            return None
        # FSDP2 and Megatron average gradients over the data-parallel ranks, whose losses add up.
        return (loss + nothing) * loss_scale * backend.dp_size

    with backend.mode():
        backend.run_passes(step, batch, inputs.read, loss_of)
    try:
        return _agreed_loss(backend, number, total, fault), backend.from_last_stage(metrics)
    except Exception:
        backend.zero_grad()
        raise


def _agreed_loss(backend: Backend, number: int, own: Tensor, fault: Exception | None) -> float:
    """The sum of all data-parallel ranks' losses, unless one of them is none."""
    mine = torch.stack([own, own.new_tensor(float(fault is not None))])
    found = all_gather(mine[None], dist.group.WORLD)
    if fault is not None:
        raise fault
    if failed := found[:, 1].nonzero().flatten().tolist():
        raise RuntimeErrorElsewhere(
            f"loss_fn failed on ranks {failed} in global batch {number}; see what it raised there"
        )
    if not bool(torch.isfinite(found[:, 0]).all()):
        wrong = {rank: value for rank, value in enumerate(found[:, 0].tolist()) if not abs(value) < float("inf")}
        raise ValueError(
            f"the loss of global batch {number} is not finite, by rank {wrong}: the weights are those before it; "
            f"look into its data, or lower the learning rate"
        )
    return float(found[list(backend.coordinates.first_ranks(backend.coordinates.stages - 1)), 0].sum())


def _validated(returned: Any) -> tuple[Tensor, dict[str, float]]:
    """Return what a loss function returned, if it can be trained on and its metrics are numbers."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ValueError(
            f"loss_fn returned {_kinds(returned)}: it must return the loss, a 0-d tensor, and a dict of metrics"
        )
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.dim() or (torch.is_grad_enabled() and not loss.requires_grad):
        raise ValueError("loss_fn's loss must be a 0-d tensor with a gradient to the log-probabilities; reduce it")
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"loss_fn's metric {name!r} must be one number, a 0-d tensor or a Python number: {error}"
            ) from None
    return loss, found


def _kinds(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return f"{len(returned)} things ({', '.join(type(one).__name__ for one in returned)})"
    return "None" if returned is None else f"a {type(returned).__name__}"
