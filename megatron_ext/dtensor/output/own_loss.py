"""The way back from losses without logits to a model's own loss, and a report of which loss a model uses."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.decisions import not_fusable
from megatron_ext.dtensor.output.fused_loss import FusedLoss, model_inside, proofs_of
from megatron_ext.dtensor.output.stand_ins import (
    FUSED,
    KEEPS_LOGITS,
    is_registered,
    leave_fused_class,
    why_logits_are_made,
)
from megatron_ext.proof import Proof, why_fusion_is_off


def restore_own_loss(model: nn.Module) -> nn.Module:
    """Undo `use_fused_loss` in place, and return `model`: `model(input_ids, labels=labels)` gives its own loss, and
    logits.

    For a model from `parallelize`, `causal_lm_loss` and `causal_lm_log_probs` then read logits too; for any other model
    they read hidden states, as before `use_fused_loss`. Parameters, hooks and wrappers stay as they are, and
    `use_fused_loss(model)` undoes this call. Without a fused loss the model's own loss stays. Communicates nothing.

    Raises:
        ValueError: `model` is no causal language model; if DDP or FSDP1 wraps one, pass its `.module`.
    """
    inside, _ = _inside_and_head(model)
    inside.__dict__.pop(FUSED, None)
    leave_fused_class(inside)
    if is_registered(inside):
        inside.__dict__[KEEPS_LOGITS] = "restore_own_loss was called"
    return model


@dataclass(frozen=True)
class FusedLossReport:
    """Report of how a model of transformers computes its losses; as a string, a sentence.

    Attributes:
        model: its class name.
        uses_fused_loss: whether `use_fused_loss` was called, and not undone.
        proofs: the outcomes of comparing its own loss with the fused one, one for each kind of call, in order.
        makes_logits: why its logits are made, if that is known without a call; else None.
        made_logits: which calls in training made logits so far, in words.
    """

    model: str
    uses_fused_loss: bool
    proofs: tuple[Proof, ...]
    makes_logits: str | None
    made_logits: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.makes_logits is not None:
            return f"{self.model}: its logits are made, {self.makes_logits}"
        if not self.uses_fused_loss:
            return (
                f"{self.model}: use_fused_loss was not called, so a call with labels makes logits; causal_lm_loss and "
                "log-probabilities are computed from hidden states"
            )
        ways = [f"{'fused' if proof.fused else 'its own loss'} ({proof})" for proof in self.proofs]
        ways = ways or ["use_fused_loss was called, and no loss was fused yet"]
        return f"{self.model}: " + "; ".join([*ways, *self.made_logits])


def fused_loss_report(model: nn.Module) -> FusedLossReport:
    """Report whether a model's losses are fused, and if not, why not. Nothing is computed or communicated."""
    inside, path = _inside_and_head(model)
    uses = FUSED in inside.__dict__
    if uses:
        gathers = any(isinstance(module, FSDPModule) for module in model.modules())
        reason = why_fusion_is_off() or not_fusable(inside, path, inside.get_submodule(path), gathers)
    else:
        reason = why_logits_are_made(inside)
    fused: FusedLoss | None = inside.__dict__.get(FUSED)
    made = []
    if fused is not None and fused.calls_without_labels:
        made.append(f"calls in training without labels, which made logits: {fused.calls_without_labels}")
    if fused is not None and fused.compiled:
        made.append("its own loss in graphs of torch.compile")
    name = type(inside).__name__.removeprefix("FSDP")
    return FusedLossReport(name, uses, proofs_of(inside), reason, tuple(made))


def _inside_and_head(model: nn.Module) -> tuple[Any, str]:
    """Return the model inside of a wrapper by PEFT or torch.compile, and the path of its head. Raises ValueError for
    any other wrapper, also for FSDP1's, which has the attributes of the model inside."""
    inside = model_inside(model)
    path = output_head_path(inside)
    for name, module in inside.named_modules():
        if FUSED in vars(module) and FUSED not in vars(inside):
            raise ValueError(
                f"model is {type(inside).__name__} around a {type(module).__name__} with a fused loss: pass the model "
                f"inside, model.{name}"
            )
    return inside, path
