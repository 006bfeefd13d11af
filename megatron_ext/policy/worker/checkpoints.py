"""A worker's weights, optimizer state and step counters as named tensors and JSON values, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from megatron_ext.policy import checkpoint
from megatron_ext.policy.checkpoint.fact_checks import check_keys, check_like, check_loss_scale, refuse_fact
from megatron_ext.policy.checkpoint.sharded_files import Found, Part
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.worker.backend import Backend

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_policy(worker: Backend, weights_path: str, optimizer_path: str | None) -> None:
    """Writes both, or leaves what the paths held."""
    parts = [Part("weights", Path(weights_path), worker._state(), {})]
    if optimizer_path is not None:
        optimizer = _optimizer(worker)
        tensors: dict[str, Tensor] = {}
        assert worker.scheduler is not None
        facts: dict[str, Any] = {
            "scheduler": worker.scheduler.state_dict(),
            "loss_scale": worker._loss_scale.state_dict(),
        }
        if optimizer.state:
            tensors, numbers = _optimizer_state(worker)
            facts["numbers"] = _of_all_ranks(numbers)
        else:  # DCP would take a step to have something to save
            facts["groups"] = _groups(optimizer)
        parts.append(Part("optimizer", Path(optimizer_path), _as_global(worker, tensors), facts))
    checkpoint.save_together(*parts)


@torch.no_grad()
def load_policy(worker: Backend, weights_path: str, optimizer_path: str | None) -> None:
    """Both folders are checked, and compared with the worker, before either is read."""
    weights = worker._state()
    if optimizer_path is None:
        [saved] = checkpoint.find(weights=weights_path)
        checkpoint.must_hold(saved, weights)
        checkpoint.read(saved, weights)
        return
    optimizer = _optimizer(worker)
    saved, saved_optimizer = checkpoint.find(weights=weights_path, optimizer=optimizer_path)
    facts = saved_optimizer.facts
    checkpoint.must_hold(saved, weights)
    assert worker.scheduler is not None
    schedule = worker.scheduler.state_dict()
    agree(lambda: _check_facts(optimizer_path, facts, schedule))
    if "groups" in facts:
        agree(lambda: _same_groups(optimizer_path, facts["groups"], _groups(optimizer)))
        checkpoint.read(saved, weights)
        optimizer.state.clear()
        for group, values in zip(optimizer.param_groups, facts["groups"], strict=True):
            group.update(values)
    else:
        _load_both(worker, optimizer, saved, saved_optimizer)
    worker.scheduler.load_state_dict(facts["scheduler"])
    worker._loss_scale.load_state_dict(facts["loss_scale"])


def _check_facts(path: str, facts: Any, schedule: Mapping[str, Any]) -> None:
    """Refuse facts that can be told without the optimizer's own state."""
    check_keys(path, facts)
    check_loss_scale(path, facts["loss_scale"])
    _same_keys(path, "schedule", facts["scheduler"], schedule)
    check_like(path, "scheduler", facts["scheduler"], schedule)


def _load_both(worker: Backend, optimizer: Optimizer, weights: Found, state: Found) -> None:
    fresh = not optimizer.state
    try:
        tensors, numbers = _optimizer_state(worker)
        own = _of_all_ranks(numbers)
        _same_keys(state.path, "optimizer", state.facts["numbers"], own)
        check_like(state.path, "numbers", state.facts["numbers"], own)
        parts = _as_global(worker, tensors)
        checkpoint.must_hold(state, parts)
        checkpoint.read(weights, worker._state())
        checkpoint.read(state, parts)
    except ValueError:
        if fresh:
            optimizer.state.clear()
        raise
    flat: Any = {**tensors, **{name: state.facts["numbers"][name] for name in numbers}}
    set_optimizer_state_dict(worker.model, optimizer, flat, options=_FLAT)


def _same_groups(path: str, saved: Any, own: list[dict[str, Any]]) -> None:
    if not isinstance(saved, list):
        refuse_fact(path, "groups", saved, f"a list of {len(own)} groups of parameters")
    if len(saved) != len(own):
        raise ValueError(
            f"the checkpoint {path} has {len(saved)} groups of parameters and this optimizer {len(own)}: they must be "
            f"the same optimizer; change the configuration, or load the weights alone"
        )
    for there, here in zip(saved, own, strict=True):
        _same_keys(path, "optimizer", there, here)
    check_like(path, "groups", saved, own)


def _same_keys(path: str | Path, what: str, saved: Any, own: Mapping[str, Any]) -> None:
    """Refuse saved keys that are not this worker's: keys are the same on all ranks, and so is the refusal."""
    if not isinstance(saved, Mapping):
        refuse_fact(path, f"the state of its {what}", saved, "a mapping")
    if odd := sorted(saved.keys() ^ own.keys()):
        raise ValueError(
            f"the checkpoint {path} is of another {what}: only one of them has {', '.join(odd[:3])}; change the "
            f"configuration, or load the weights alone"
        )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]


def _optimizer(worker: Backend) -> Optimizer:
    if worker.optimizer is None:
        raise ValueError("optimizer_path without an optimizer: the worker was made with init_optimizer=False")
    return worker.optimizer


def _optimizer_state(worker: Backend) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors, by "state.<weight>.<name>", and its numbers, by "param_groups.<weight>.<name>"."""
    flat: dict[str, Any] = get_optimizer_state_dict(worker.model, _optimizer(worker), options=_FLAT)
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in flat.items() if name not in tensors}


def _of_all_ranks(numbers: dict[str, Any]) -> dict[str, Any]:
    """Join the numbers of every rank: the stages of a pipeline have different weights."""
    return {name: value for found in agree(lambda: numbers) for name, value in found.items()}


def _as_global(worker: Backend, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each of them cut like its weight; numbers (the step) are the same everywhere."""
    found = {}
    for name, x in tensors.items():
        weight = name.removeprefix("state.").rpartition(".")[0]
        found[name] = worker._as_global(weight, x) if x.dim() else x
    return found
