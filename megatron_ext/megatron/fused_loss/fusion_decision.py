"""The decision whether a model's loss is fused, which its tensor-parallel ranks take together at its first call.

Where the output layer and the loss are Megatron's own or ours, by identity, the model is fused as it is. Where anything
else stands there, the first batch proves the fusion, or the model keeps its own loss. A rank that alone sees something
else must not go another way alone: ranks tell each other at the first call, by one exchange. What has changed later is
told by a word among the head's options, which the head compares on all ranks in the exchange that it makes anyway: on
all of them, they decide anew; on some alone, every rank raises.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head.call import statistics
from megatron_ext.head.call.statistics import OptionsDiffer
from megatron_ext.megatron.fused_loss import known_code, patch_points
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.promised_logits import tp_group
from megatron_ext.proof import (
    Proof,
    ProofBasis,
    ProofMode,
    cannot_prove_now,
    code_values,
    module_values,
    proof_mode,
    warn_of_changes,
    words_of_change,
)

# What of a configuration decides about an output layer and a loss.
_CONFIG = (
    *("sequence_parallel", "tensor_model_parallel_size", "params_dtype", "gradient_accumulation_fusion"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "defer_embedding_wgrad_compute"),
    *("bf16", "fp16", "fp8", "fp4"),
)
_PLAIN = (bool, float, str)  # whole numbers may be counters


@dataclass
class Decision:
    """The decision about one model, the same on all ranks that share its vocabulary.

    Attributes:
        settings: under which it was taken.
        left: why the model keeps its own loss; None: it is fused, or proved.
        verify: how many of its losses are taken both ways.
        mode: when it is proved; None: never, as nothing of it is unknown.
        seen: what `_seen` found on this rank.
        basis: of what is not known on this rank, if anything.
        proof: the last one.
        changes: how often it was taken anew.
    """

    settings: HeadSettings
    left: str | None = None
    verify: int = 0
    mode: ProofMode | None = None
    seen: tuple[str | None, str | None] = (None, None)
    basis: ProofBasis | None = None
    proof: Proof | None = None
    changes: int = 0

    def wants_proof(self) -> bool:
        """Tell whether the loss that is about to be taken must be compared first."""
        return self.mode is not None and (self.proof is None or self.mode == "always")


# By whether the model trains, as its own loss may be another one when it does not, and whether a loss is asked for.
_Decisions = WeakKeyDictionary[Any, Decision]
_decisions: defaultdict[tuple[bool, bool], _Decisions] = defaultdict(WeakKeyDictionary)


def decision_of(model: Any, settings: HeadSettings, loss: bool = True) -> Decision:
    """The decision about a model, of its first call with these settings.

    All tensor-parallel ranks call it together; a group of one rank decides anew when the model has changed. `loss`:
    whether its loss is asked for, or what is read out of hidden states alone, for which its output layer must be known.
    """
    found = taken(model, settings, loss)
    if found is None:
        return decide(model, settings, loss)
    alone = group_size(tp_group(patch_points.output_layer(model))) == 1
    return decide(model, settings, loss) if alone and has_changed(model, found, loss) else found


def taken(model: Any, settings: HeadSettings, loss: bool = True) -> Decision | None:
    """The decision as it was taken by an earlier call, or earlier in this one; None if there is none."""
    found = _decisions[model.training, loss].get(model)
    return None if found is None or found.settings != settings else found


def decide(model: Any, settings: HeadSettings, loss: bool = True) -> Decision:
    """Take the decision about a model anew.

    Communicates: one all-gather of a small object over several tensor-parallel ranks.
    """
    layer = patch_points.output_layer(model)
    group = tp_group(layer)
    if group_size(group) > 1 and (reason := cannot_prove_now()) is not None:
        return Decision(settings, f"{reason}, and its tensor-parallel ranks have not agreed before: run a step first")
    seen = _seen(model, loss)
    asked = (*seen, proof_mode(settings.proof), settings.verify)
    reasons, unknowns, (mode, *_), (verify, *_) = zip(*all_gather_object(asked, group), strict=True)
    decision = Decision(settings, next(filter(None, reasons), None), verify, seen=seen)
    decision.mode = "always" if mode == "always" else None
    if decision.left is None and (found := next(filter(None, unknowns), None)) is not None:
        decision.mode = mode
        if len(set(unknowns)) > 1:  # where one alone raised on a sample, the others would wait for it
            decision.left = f"{found}, on some tensor-parallel ranks alone"
        elif mode == "off":
            decision.left = f"{found}, and proof is off"
    decision.basis = None if seen[1] is None else _basis(model, layer)
    decisions = _decisions[model.training, loss]
    before = decisions.get(model)
    if before is not None and before.settings == settings and decision.basis is not None:
        decision.changes = before.changes + 1
        warn_of_changes(decision.changes)
    decisions[model] = decision
    return decision


def has_changed(model: Any, decision: Decision, loss: bool = True) -> bool:
    """Tell whether this rank sees another model than the one about which was decided."""
    if _seen(model, loss) != decision.seen:
        return True
    return decision.basis is not None and not decision.basis.same_as(_basis(model, patch_points.output_layer(model)))


def forget(model: Any = None) -> None:
    """Drop the decision about a model, or about all: their next calls decide anew. For all ranks together."""
    for decisions in _decisions.values():
        if model is None:
            decisions.clear()
        else:
            decisions.pop(model, None)


@contextmanager
def telling_of_change(model: Any) -> Iterator[None]:
    """Have the head tell the other ranks that the model has changed; raises ValueError unless it has on all of them.

    On CUDA a device-side assertion tells; where a graph is captured, its replay ends on every rank.
    """
    try:
        with statistics.agreeing_on(words_of_change(group_rank(tp_group(patch_points.output_layer(model))))):
            yield
    except OptionsDiffer as fault:
        raise ValueError(_CHANGED.format(type(model).__name__, _why(model), fault)) from fault


_CHANGED = (
    "the output layer or the loss of this {} has changed since its tensor-parallel ranks decided to fuse it ({}), and "
    "they cannot decide anew: {}. Change it on every rank alike, as also a counter that the loss function keeps, or "
    "before its first call, or patch it again"
)


def _why(model: Any) -> str:
    return next(filter(None, _seen(model, loss=True)), "it has another function, or its code reads another value")


def _seen(model: Any, loss: bool) -> tuple[str | None, str | None]:
    """Return why a model's logits cannot be promised, as this rank sees it, and which of its code is not known."""
    if (left := patch_points.why_not_fused(model)) is not None:
        return left, None
    if not loss:
        return known_code.why_not_known(patch_points.output_layer(model)), None
    return None, known_code.what_is_not_known(model)


def _basis(model: Any, layer: Any) -> ProofBasis:
    """The parts that decide whether the layer and the loss are what the head takes them for, by identity."""
    config = getattr(model, "config", None)
    weight = getattr(layer, "weight", None)
    return ProofBasis(
        *(type(model), known_code.function_of(patch_points.own_loss(model)), _values(model)),
        *(layer, type(layer), type(layer).forward, known_code.function_of(vars(layer).get("forward"))),
        known_code.function_of(getattr(layer, "_forward_impl", None)),
        [(type(one), type(one).forward, module_values(one)) for one in layer.modules()],
        [code_values(one.forward) for one in layer.modules()],
        [code_values(code) for code in (patch_points.own_loss(model), vars(layer).get("_forward_impl"))],
        None if weight is None else weight.dtype,
        [getattr(config, name, None) for name in _CONFIG],
        list(known_code.in_places().values()),
    )


def _values(owner: Any) -> list[tuple[str, Any]]:
    """The factors, caps, temperatures and switches that an object holds."""
    own = vars(owner) if isinstance(owner, torch.nn.Module) else {}
    return [(name, value) for name, value in own.items() if type(value) in _PLAIN]
