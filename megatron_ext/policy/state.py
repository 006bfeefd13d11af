"""A worker's weights and optimizer as named tensors and JSON, and back: what its checkpoints hold."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from megatron_ext.policy import checkpoint

if TYPE_CHECKING:
    from megatron_ext.policy.worker import PolicyWorker

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_policy(worker: "PolicyWorker", weights_path: str, optimizer_path: str | None) -> None:
    if optimizer_path is not None:
        optimizer = _optimizer(worker)
        facts: dict[str, Any] = {"scheduler": worker.scheduler.state_dict() if worker.scheduler else None}
        if optimizer.state:
            tensors, facts["numbers"] = _optimizer_state(worker)
        else:  # DCP would take a step to have something to save
            groups = [{k: x for k, x in group.items() if k != "params"} for group in optimizer.param_groups]
            tensors, facts["groups"] = {}, groups
    checkpoint.save(weights_path, worker._state(), {})
    if optimizer_path is not None:
        checkpoint.save(optimizer_path, _as_global(worker, tensors), facts)


@torch.no_grad()
def load_policy(worker: "PolicyWorker", weights_path: str, optimizer_path: str | None) -> None:
    """Both folders are checked before either is read."""
    weights = worker._state()
    if optimizer_path is None:
        checkpoint.load(weights_path, weights)
        return
    optimizer = _optimizer(worker)
    facts = checkpoint.check(optimizer_path)
    checkpoint.check(weights_path)
    checkpoint.must_hold(weights_path, weights)
    if "groups" in facts:
        checkpoint.read(weights_path, weights)
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
            group.update(saved)
    else:
        _load_both(worker, optimizer, facts, weights_path, optimizer_path)
    if worker.scheduler is not None:
        worker.scheduler.load_state_dict(facts["scheduler"])


def _load_both(
    worker: "PolicyWorker", optimizer: Optimizer, facts: dict[str, Any], weights_path: str, optimizer_path: str
) -> None:
    fresh = not optimizer.state
    try:
        tensors, _ = _optimizer_state(worker)
        parts = _as_global(worker, tensors)
        checkpoint.must_hold(optimizer_path, parts)
        checkpoint.read(weights_path, worker._state())
        checkpoint.read(optimizer_path, parts)
    except ValueError:
        if fresh:
            optimizer.state.clear()
        raise
    flat: Any = {**tensors, **facts["numbers"]}
    set_optimizer_state_dict(worker.model, optimizer, flat, options=_FLAT)


def _optimizer(worker: "PolicyWorker") -> Optimizer:
    if worker.optimizer is None:
        raise ValueError("optimizer_path without an optimizer: the worker was made with init_optimizer=False")
    return worker.optimizer


def _optimizer_state(worker: "PolicyWorker") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors, by "state.<weight>.<name>", and its numbers, by "param_groups.<weight>.<name>"."""
    flat: dict[str, Any] = get_optimizer_state_dict(worker.model, _optimizer(worker), options=_FLAT)
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in flat.items() if name not in tensors}


def _as_global(worker: "PolicyWorker", tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each of them cut like its weight; numbers (the step) are the same everywhere."""
    found = {}
    for name, x in tensors.items():
        weight = name.removeprefix("state.").rpartition(".")[0]
        found[name] = worker._as_global(weight, x) if x.dim() else x
    return found
