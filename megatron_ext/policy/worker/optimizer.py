"""Optimizer and schedule from their descriptions in the configuration, and the loss scale of fp16 gradients."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from megatron_ext.policy.config import check_kwargs, import_from_path

GROWTH_STEPS = 1000


def make_optimizer(parameters: Iterable[torch.nn.Parameter], description: Mapping[str, Any] | None) -> Optimizer:
    """Make the optimizer that `{"name": "torch.optim.AdamW", "kwargs": {...}}` describes."""
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


def check_elementwise(description: Mapping[str, Any], device: torch.device) -> None:
    """Raise ValueError for an optimizer whose step of a matrix is not that of the matrix's parts, each by itself.

    Two steps of a small matrix, and of its halves with the same gradients, are compared. Nothing is communicated.
    """
    generator = torch.Generator().manual_seed(0)
    whole, *gradients = torch.randn(3, 8, 8, generator=generator).to(device)

    def stepped(parts: int, dim: int = 0) -> torch.Tensor:
        weights = [torch.nn.Parameter(part.clone()) for part in whole.chunk(parts, dim)]
        optimizer = make_optimizer(weights, description)
        for gradient in gradients:
            for weight, part in zip(weights, gradient.chunk(parts, dim), strict=True):
                weight.grad = part.clone()
            optimizer.step()
        return torch.cat([weight.detach() for weight in weights], dim) - whole

    together = stepped(1)
    for dim in (0, 1):
        if (stepped(2, dim) - together).abs().max() > 1e-3 * together.abs().max():
            raise ValueError(
                f"optimizer is {description['name']}, whose step of a weight depends on the whole weight, and each "
                f"tensor-parallel rank has a part of it: use an elementwise optimizer such as torch.optim.AdamW, "
                f"tensor_model_parallel_size 1, or DTensorPolicyWorker"
            )


def make_scheduler(
    optimizer: Optimizer, description: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> LRScheduler:
    """Make the schedule that `{"name": ..., "kwargs": ...}` describes, or a sequence of them: a list with one entry
    `{"milestones": [...]}`, the steps at which the next schedule begins. None: the learning rate is constant.
    """
    if description is None:
        return LambdaLR(optimizer, lr_lambda=lambda step: 1.0)
    if isinstance(description, Mapping):
        cls = import_from_path(description["name"])
        if isinstance(cls, type) and issubclass(cls, ReduceLROnPlateau):
            raise ValueError(
                f"scheduler is {description['name']}: it depends on a metric, which `train` does not have; pass one "
                "that depends on the number of steps, such as torch.optim.lr_scheduler.CosineAnnealingLR"
            )
        kwargs = description.get("kwargs") or {}
        check_kwargs("scheduler", kwargs)
        return cls(optimizer, **kwargs)
    milestones = [entry["milestones"] for entry in description if "milestones" in entry]
    if len(milestones) != 1:
        raise ValueError(f"scheduler is a list with {len(milestones)} entries of milestones: it must have one")
    parts = [make_scheduler(optimizer, entry) for entry in description if "milestones" not in entry]
    return SequentialLR(optimizer, parts, list(milestones[0]))


class LossScale:
    """Loss scale against overflow: halved if gradients are not finite, doubled after `GROWTH_STEPS` good steps.

    Every rank sees the same norms, so that all have the same scale. If not `dynamic`, the scale is always 1.
    (Micikevicius et al., "Mixed precision training", 2018.)
    """

    def __init__(self, dynamic: bool):
        self.value = 2.0**14 if dynamic else 1.0
        self._dynamic, self._good_steps = dynamic, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state; empty if not dynamic, since a dynamic scale that loads it should not begin at 1."""
        if not self._dynamic:
            return {}
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self._dynamic and state:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    def overflowed(self, norm: float) -> bool:
        """Adapt the scale to this gradient norm; return whether the step must be skipped as the scale was too large."""
        if not self._dynamic:
            return False
        if math.isfinite(norm):
            self._good_steps += 1
            if self._good_steps % GROWTH_STEPS == 0:
                self.value *= 2
            return False
        self._good_steps = 0
        self.value /= 2
        return self.value >= 1  # below 1 the scale is not the cause
