"""A worker's weights and optimizer as named tensors and JSON, and back: what its checkpoints hold."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_ext.policy import checkpoint

if TYPE_CHECKING:
    from megatron_ext.policy.worker import PolicyWorker

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_policy(worker: "PolicyWorker", weights_path: str, optimizer_path: str | None) -> None:
    checkpoint.save(weights_path, worker._state(), {})
    if optimizer_path is not None:
        tensors, numbers = _optimizer_state(worker)
        facts = {"numbers": numbers, "scheduler": worker.scheduler.state_dict() if worker.scheduler else None}
        checkpoint.save(optimizer_path, _as_global(worker, tensors), facts)


def load_policy(worker: "PolicyWorker", weights_path: str, optimizer_path: str | None) -> None:
    if optimizer_path is not None:
        tensors, _ = _optimizer_state(worker)
        facts = checkpoint.load(optimizer_path, _as_global(worker, tensors))
    with torch.no_grad():
        checkpoint.load(weights_path, worker._state())
    if optimizer_path is not None:
        assert worker.optimizer is not None
        flat: Any = {**tensors, **facts["numbers"]}
        set_optimizer_state_dict(worker.model, worker.optimizer, flat, options=_FLAT)
        if worker.scheduler is not None:
            worker.scheduler.load_state_dict(facts["scheduler"])


def _optimizer_state(worker: "PolicyWorker") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors, by "state.<weight>.<name>", and its numbers, by "param_groups.<weight>.<name>"."""
    if worker.optimizer is None:
        raise ValueError("optimizer_path without an optimizer: the worker was made with init_optimizer=False")
    flat: dict[str, Any] = get_optimizer_state_dict(worker.model, worker.optimizer, options=_FLAT)
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in flat.items() if name not in tensors}


def _as_global(worker: "PolicyWorker", tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each of them cut like its weight; numbers (the step) are the same everywhere."""
    found = {}
    for name, x in tensors.items():
        weight = name.removeprefix("state.").rpartition(".")[0]
        found[name] = worker._as_global(weight, x) if x.dim() else x
    return found
