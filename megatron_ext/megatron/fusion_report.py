"""Report of the fused head in this process: losses fused, logits made and by which code, models left to Megatron.

The counters are on the host: reading them communicates nothing and waits for no GPU.
"""

import logging
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron_ext.verify.side_by_side import TwoRuns

_LOG = logging.getLogger(__name__)

_MEGATRON_KERNELS = {"native": "Megatron's own fused loss", "te": "Transformer Engine's fused loss"}


@dataclass
class ModelFusion:
    """The counters of one model.

    Attributes:
        model: its class name, and its virtual pipeline stage if there is one.
        losses_fused: calls of the loss that went from hidden states to losses without logits.
        read_outs: calls of an output processor (log-probabilities, top-k, divergence) without logits.
        logits_made: how often logits were made although there were labels, by the code that read them: "file:line", or
            "Megatron's own loss" for a model that is left to Megatron.
        left_to_megatron: why the model keeps Megatron's own loss; None if it does not.
        stock_losses: calls of Megatron's own loss.
        megatron_kernel: the fused loss of Megatron's that its config asks for (`cross_entropy_loss_fusion`), "native"
            or "te"; None if it asks for none. That loss runs only for `stock_losses`.
        proof: the outcome of comparing the head with the model's own output layer and loss; None before that.
        verified: the losses computed by the model's own code and by the head; None unless the patch got `verify=`.
        layers: the number of its tensor-parallel layers, by the package that they come from.
        sizes: the head's sizes and `cache`, as options of `megatron-ext memory`: those of the first loss since any
            model was last patched or unpatched ("" before that loss); for an unpatched model, those of its last head.
        kept: the largest percentage of exponentials that this `cache` keeps for backward; None if it is "auto".
        z_loss, entropy: means over the tokens of the last loss that have a label, 0-dim fp32; None if not asked for.
        unpatched: whether the patch of the model was taken back; later losses are not counted.
    """

    model: str
    losses_fused: int = 0
    read_outs: int = 0
    logits_made: Counter[str] = field(default_factory=Counter)
    left_to_megatron: str | None = None
    stock_losses: int = 0
    megatron_kernel: str | None = None
    proof: str | None = None
    verified: TwoRuns | None = None
    layers: Counter[str] = field(default_factory=Counter)
    sizes: str = ""
    kept: float | None = None
    z_loss: Tensor | None = None
    entropy: Tensor | None = None
    unpatched: bool = False

    def __str__(self) -> str:
        parts = [f"{self.model}: {_counted(self.losses_fused, 'loss', 'es')} fused"]
        if self.read_outs:
            parts.append(f"{_counted(self.read_outs, 'read-out')} without logits")
        made = "".join(f" ({count} for {place})" for place, count in self.logits_made.items())
        parts.append(f"logits made {_counted(self.logits_made.total(), 'time')}{made}")
        if self.losses_fused and self.proof is not None:
            parts.append(self.proof)
        if self.verified is not None:
            verified = _counted(len(self.verified.ours), "loss", "es")
            parts.append(f"{verified} verified, {self.verified.differences}")
        if self.stock_losses:
            parts.append(f"{_counted(self.stock_losses, 'loss', 'es')} by Megatron")
        if self.left_to_megatron is not None:
            parts.append(f"left to Megatron: {self.left_to_megatron}")
        if self.megatron_kernel is not None:
            asked = _MEGATRON_KERNELS.get(self.megatron_kernel, self.megatron_kernel)
            own = self.stock_losses or self.unpatched
            runs = "that runs where Megatron's loss does" if own else "the fused head runs instead of it"
            parts.append(f"the config asks for {asked}, {runs}")
        if self.unpatched:
            parts.append("unpatched since then")
        lines = [", ".join(parts)]
        if self.layers:
            lines.append(f"  {layers_in_words(self.layers)}")
        if self.sizes:
            if self.kept is not None:
                lines.append(f"  cache: up to {self.kept:.0f} % of the exponentials are kept for backward")
            lines.append(f"  to count the head's peak memory, stock and ours, run: megatron-ext memory {self.sizes}")
        return "\n".join(lines)


def layers_in_words(layers: Counter[str]) -> str:
    return f"tensor-parallel layers: {', '.join(f'{count} of {home}' for home, count in sorted(layers.items()))}"


def _counted(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending * (count != 1)}"


@dataclass
class FusionReport:
    """The counters of the models that a patched `forward` ran in this process, in the order of their first calls."""

    models: list[ModelFusion] = field(default_factory=list)

    @property
    def losses_fused(self) -> int:
        return sum(one.losses_fused for one in self.models)

    @property
    def logits_made(self) -> int:
        return sum(one.logits_made.total() for one in self.models)

    @property
    def stock_losses(self) -> int:
        return sum(one.stock_losses for one in self.models)

    def __str__(self) -> str:
        if not self.models:
            return "fused head: no model has taken a loss on this rank yet"
        return "\n".join(f"fused head: {one}" for one in self.models)


_counters: list[ModelFusion] = []
_told: dict[str, int] = {}
_said: set[str] = set()
_by_model: "weakref.WeakKeyDictionary[Any, ModelFusion]" = weakref.WeakKeyDictionary()


def fusion_report() -> FusionReport:
    """Return what was fused so far on this rank, as a copy that later steps do not change. Models that have computed no
    loss are left out."""
    return FusionReport([replace(one, logits_made=Counter(one.logits_made)) for one in _counters])


def reset_fusion_report() -> None:
    """Drop all counters, and allow each warning once more; a model returns to the report with its next loss."""
    _counters.clear()
    _told.clear()
    _by_model.clear()
    _said.clear()


def counts_since_last_call() -> dict[str, int]:
    """Count losses and logits on this rank since the last call, by the names under which Megatron logs them."""
    report = FusionReport(_counters)
    now = {
        "fused losses": report.losses_fused,
        "losses by Megatron": report.stock_losses,
        "logits made": report.logits_made,
    }
    since = {name: count - _told.get(name, 0) for name, count in now.items()}
    _told.update(now)
    return since


def say_once(text: str, key: str | None = None) -> None:
    """Warn with `text`, unless there was a warning or log with the same `key` before; the key defaults to the text."""
    if (key or text) not in _said:
        _said.add(key or text)
        warnings.warn(text, stacklevel=3)


def tell_once(text: str) -> None:
    """Log `text` at level INFO, the first time only."""
    if text not in _said:
        _said.add(text)
        _LOG.info(text)


def name_of(model: Any) -> str:
    """Return the model's class name, with its virtual pipeline stage if there is one."""
    stage, kind = getattr(model, "vp_stage", None), type(model).__name__.removeprefix("FSDP")
    return kind if stage is None else f"{kind} (virtual stage {stage})"


def counted_models() -> list[tuple[Any, ModelFusion]]:
    """Return the counted models that are still alive, with their counters."""
    return list(_by_model.items())


def counters_of(model: Any) -> ModelFusion:
    """Return the counters of a model, to which the patch adds; the first call makes them."""
    if model not in _by_model:
        config = getattr(model, "config", None)
        asked = getattr(config, "cross_entropy_loss_fusion", False)
        entry = ModelFusion(
            name_of(model),
            megatron_kernel=getattr(config, "cross_entropy_fusion_impl", "native") if asked else None,
        )
        _by_model[model] = entry
        _counters.append(entry)
    return _by_model[model]
