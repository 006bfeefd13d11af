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
from torch.optim.lr_scheduler import LRScheduler

from megatron_ext.policy import checkpoint
from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.checkpoint.fact_checks import check_kinds, check_like, refuse_fact
from megatron_ext.policy.checkpoint.sharded_files import Found, Part
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.losses.worker_protocol import Timer, timed
from megatron_ext.policy.worker.trainer import Trainer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """Saving of a policy's weights, optimizer and tokenizer to folders, and loading."""

    def __init__(self, backend: Backend, trainer: Trainer, tokenizer: Any = None):
        self.backend, self.trainer, self.tokenizer = backend, trainer, tokenizer

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        checkpointing_cfg: Mapping[str, Any] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Write the weights and, if their paths are given, optimizer with schedule, and tokenizer, to these folders.

        Weights and optimizer are replaced together or not at all, after every rank has seen all new files; see
        `megatron_ext.policy.checkpoint.sharded_files`. A path that is a link is followed.

        Args:
            checkpointing_cfg: NeMo-RL's configuration of checkpoints. A key that asks for files of another kind is
                refused; the other keys say when to save and what to keep, which the caller decides.
            timer: as NeMo-RL's, measures "save_checkpoint".

        Raises:
            ValueError: on every rank, if the ranks do not share a path, or it holds something that is no checkpoint.
            OSError: on every rank, if the files cannot be written, or read back as they were written.
                The paths still hold what they held before.
        """
        if tokenizer_path is not None and self.tokenizer is None:
            raise ValueError("tokenizer_path without a tokenizer: pass the worker a tokenizer, or leave the path out")
        _check_format(checkpointing_cfg or {})
        self.backend.refuse_reference("save_checkpoint()")

        def save_tokenizer() -> None:
            if self.backend.rank == 0:
                self.tokenizer.save_pretrained(tokenizer_path)

        with timed(timer, "save_checkpoint"):
            parts = [Part("weights", weights_path, self.backend.state(), {})]
            if optimizer_path is not None:
                parts.append(self._optimizer_part(optimizer_path))
            checkpoint.save_together(*parts)
            if tokenizer_path is not None:
                agree(save_tokenizer)

    @torch.no_grad()
    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load what `save_checkpoint` wrote, in this layout of ranks or another one. No code in the files is executed.

        Raises:
            ValueError: on every rank, if it is incomplete, damaged, of another model or optimizer, or of two saves.
                The policy has not changed.
        """
        self.backend.refuse_reference("load_checkpoint()")
        self.trainer.refuse_open_step("load_checkpoint()")
        weights = self.backend.state()
        if optimizer_path is None:
            [saved] = checkpoint.find(weights=weights_path)
            checkpoint.must_hold(saved, weights)
            checkpoint.read(saved, weights)
            return
        optimizer, scheduler = self._optimizer()
        saved, saved_optimizer = checkpoint.find(weights=weights_path, optimizer=optimizer_path)
        facts = saved_optimizer.facts
        checkpoint.must_hold(saved, weights)
        schedule = scheduler.state_dict()
        agree(lambda: _check_facts(optimizer_path, facts, schedule))
        if "groups" in facts:
            agree(lambda: _same_groups(optimizer_path, facts["groups"], _groups(optimizer)))
            checkpoint.read(saved, weights)
            optimizer.state.clear()
            for group, values in zip(optimizer.param_groups, facts["groups"], strict=True):
                group.update(values)
        else:
            self._load_both(optimizer, saved, saved_optimizer)
        scheduler.load_state_dict(facts["scheduler"])
        self.trainer.loss_scale.load_state_dict(facts["loss_scale"])

    def _optimizer_part(self, path: str) -> Part:
        optimizer, scheduler = self._optimizer()
        facts = {"scheduler": scheduler.state_dict(), "loss_scale": self.trainer.loss_scale.state_dict()}
        if not optimizer.state:  # DCP would take an optimizer step to have a state
            return Part("optimizer", path, {}, {**facts, "groups": _groups(optimizer)})
        tensors, numbers = self._optimizer_state(optimizer)
        return Part("optimizer", path, self._as_global(tensors), {**facts, "numbers": _of_all_ranks(numbers)})

    def _load_both(self, optimizer: Optimizer, weights: Found, state: Found) -> None:
        fresh = not optimizer.state
        try:
            tensors, numbers = self._optimizer_state(optimizer)
            own = _of_all_ranks(numbers)
            _same_keys(state.path, "optimizer", state.facts["numbers"], own)
            check_like(state.path, "numbers", state.facts["numbers"], own)
            parts = self._as_global(tensors)
            checkpoint.must_hold(state, parts)
            checkpoint.read(weights, self.backend.state())
            checkpoint.read(state, parts)
        except ValueError:
            if fresh:
                optimizer.state.clear()
            raise
        flat: Any = {**tensors, **{name: state.facts["numbers"][name] for name in numbers}}
        set_optimizer_state_dict(self.backend.model, optimizer, flat, options=_FLAT)

    def _optimizer(self) -> tuple[Optimizer, LRScheduler]:
        if self.trainer.optimizer is None or self.trainer.scheduler is None:
            raise ValueError("optimizer_path without an optimizer: the worker was made with init_optimizer=False")
        return self.trainer.optimizer, self.trainer.scheduler

    def _optimizer_state(self, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's tensors by "state.<weight>.<name>", its numbers by "param_groups.<weight>.<name>"."""
        flat: dict[str, Any] = get_optimizer_state_dict(self.backend.model, optimizer, options=_FLAT)
        tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
        return tensors, {name: x for name, x in flat.items() if name not in tensors}

    def _as_global(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return each tensor sharded like its weight; a 0-d one (the step) is the same on every rank."""
        found = {}
        for name, x in tensors.items():
            weight = name.removeprefix("state.").rpartition(".")[0]
            found[name] = self.backend.as_global(weight, x) if x.dim() else x
        return found


def _check_facts(path: str, facts: Any, schedule: Mapping[str, Any]) -> None:
    """Refuse the faults of facts that show without the optimizer's own state."""
    check_kinds(path, facts)
    _same_keys(path, "schedule", facts["scheduler"], schedule)
    check_like(path, "scheduler", facts["scheduler"], schedule)


def _same_groups(path: str, saved: Any, own: list[dict[str, Any]]) -> None:
    if not isinstance(saved, list):
        refuse_fact(path, "groups", saved, f"a list of {len(own)} groups of parameters")
    if len(saved) != len(own):
        raise ValueError(
            f"the checkpoint {path} has {len(saved)} groups of parameters and this optimizer {len(own)}: they must be "
            "the same optimizer; change the configuration, or load only the weights"
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
            "configuration, or load only the weights"
        )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]


def _of_all_ranks(numbers: dict[str, Any]) -> dict[str, Any]:
    """Join the numbers of every rank: the stages of a pipeline have different weights."""
    return {name: value for found in agree(lambda: numbers) for name, value in found.items()}


def _check_format(checkpointing: Mapping[str, Any]) -> None:
    """Raise ValueError if NeMo-RL's configuration asks for files that `save_checkpoint` does not write."""
    for key in ("model_save_format", "save_consolidated", "is_peft", "is_async"):
        if checkpointing.get(key) not in (None, "torch_save" if key == "model_save_format" else False):
            raise ValueError(
                f"checkpointing_cfg.{key} is {checkpointing[key]!r}: checkpoints are torch.distributed.checkpoint's "
                f"files of whole weights, written before save_checkpoint() returns; leave the key out"
            )
