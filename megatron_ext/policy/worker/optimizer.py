"""Optimizer and schedule from their descriptions in the configuration."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from megatron_ext.policy.config import check_kwargs, import_from_path


def make_optimizer(parameters: Iterable[torch.nn.Parameter], description: Mapping[str, Any] | None) -> Optimizer:
    """The optimizer of `{"name": "torch.optim.AdamW", "kwargs": {...}}`."""
    if not description or "name" not in description:
        raise ValueError(
            f"optimizer is {description!r}: pass {{'name': 'torch.optim.AdamW', 'kwargs': {{'lr': 1e-5}}}}"
        )
    cls = import_from_path(description["name"])
    kwargs = dict(description.get("kwargs") or {})
    check_kwargs("optimizer", kwargs)
    if "foreach" in inspect.signature(cls).parameters and not kwargs.get("fused"):
        kwargs.setdefault("foreach", False)  # torch's multi-tensor kernels take no DTensors of different meshes at once
    return cls([p for p in parameters if p.requires_grad], **kwargs)


def make_scheduler(
    optimizer: Optimizer, description: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> LRScheduler:
    """The schedule of `{"name": ..., "kwargs": ...}`, or of a list of such with one `{"milestones": [...]}` where one
    follows another. None: the learning rate stays.
    """
    if description is None:
        return LambdaLR(optimizer, lr_lambda=lambda step: 1.0)
    if isinstance(description, Mapping):
        cls = import_from_path(description["name"])
        if isinstance(cls, type) and issubclass(cls, ReduceLROnPlateau):
            raise ValueError(
                f"scheduler is {description['name']}: it follows a metric, and `train` has none to give; pass one that "
                f"follows the number of steps, as torch.optim.lr_scheduler.CosineAnnealingLR"
            )
        kwargs = description.get("kwargs") or {}
        check_kwargs("scheduler", kwargs)
        return cls(optimizer, **kwargs)
    milestones = [entry["milestones"] for entry in description if "milestones" in entry]
    if len(milestones) != 1:
        raise ValueError(f"scheduler is a list with {len(milestones)} entries of milestones: it must have one")
    parts = [make_scheduler(optimizer, entry) for entry in description if "milestones" not in entry]
    return SequentialLR(optimizer, parts, list(milestones[0]))
