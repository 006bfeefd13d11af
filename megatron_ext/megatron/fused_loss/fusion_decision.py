"""The decision whether a model's loss is fused, which its tensor-parallel ranks take together at its first call.

Where the output layer and the loss are Megatron's own or ours, by identity, the model is fused as it is. Where anything
else stands there, the first batch proves the fusion, or the model keeps its own loss. A rank that alone sees something
else must not go another way alone: ranks tell each other at the first call, by one exchange. What has changed later is
told by a word among the head's options, which the head compares on all ranks in the exchange that it makes anyway: on
all of them, they decide anew; on some alone, every rank raises.

The code between hidden states and loss that is known is Megatron's own and ours, by identity and not by names. A
decorator with `functools.wraps` has every name of the function that it wraps, and its `__module__`. It does not have
its globals: those are of the file that defines it. An object of wrapt's has even these, and `isinstance` believes it.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.nn.modules import module as torch_module

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head.call import statistics
from megatron_ext.head.call.statistics import OptionsDiffer
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.module_calls import CALL, standing
from megatron_ext.megatron.fused_loss.promised_logits import tp_group
from megatron_ext.megatron.output_layer import OutputLayer
from megatron_ext.megatron.substitute import megatrons_own_layer
from megatron_ext.proof import (
    Proof,
    ProofBasis,
    ProofMode,
    cannot_prove_now,
    code_values,
    module_values,
    proof_mode,
    warn_of_changes,
    why_fusion_is_off,
    words_of_change,
)
from megatron_ext.tensor_parallel import layers as our_layers

FORWARD = "forward"
LOSS = "compute_language_model_loss"
_MXFP8_HEAD = "TELMHeadColumnParallelLinear"  # Megatron's output layer for `fp8_output_proj`, since 0.20
_ATTRIBUTES = ("weight", "bias", "sequence_parallel", "gather_output", "skip_bias_add", "gradient_accumulation_fusion")
_HOMES = ("megatron.core.", "megatron_ext.")
_TORCH = ("torch._dynamo", "torch.amp.")  # what is compiled, or told of autocast, is the same function still
# What Megatron's own output layer and loss look up where it stands, and others replace there; some versions lack some.
_PLACES = {
    "megatron.core.tensor_parallel": ("vocab_parallel_cross_entropy",),
    "megatron.core.tensor_parallel.cross_entropy": (
        *("vocab_parallel_cross_entropy", "_VocabParallelCrossEntropy", "VocabParallelCrossEntropy", "VocabUtility"),
    ),
    "megatron.core.fusions.fused_cross_entropy": (
        *("_VocabParallelCrossEntropy", "VocabParallelCrossEntropy", "VocabUtility"),
        *("calculate_logits_max", "calculate_predicted_logits", "calculate_cross_entropy_loss", "calculate_gradients"),
    ),
    "megatron.core.tensor_parallel.layers": (
        *("linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"),
        *("linear_with_frozen_weight", "LinearWithFrozenWeight", "copy_to_tensor_model_parallel_region"),
    ),
    "megatron.core.tensor_parallel.mappings": ("_CopyToModelParallelRegion", "_reduce"),
    LanguageModule.__module__: ("fused_vocab_parallel_cross_entropy", "te_parallel_cross_entropy"),
}
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
        alone: whether one rank has the whole vocabulary.
        basis: what `seen` rests on, and the proof of what is not known on this rank, if anything.
        proof: the last one.
        changes: how often it was taken anew.
    """

    settings: HeadSettings
    left: str | None = None
    verify: int = 0
    mode: ProofMode | None = None
    seen: tuple[str | None, str | None] = (None, None)
    alone: bool = False
    basis: ProofBasis = field(default_factory=ProofBasis)
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
    found = _decisions[model.training, loss].get(model)
    if found is None or found.settings != settings:
        return decide(model, settings, loss)
    if not found.alone:
        return found
    # What else may have changed is looked at when the loss is taken; by then `skip_ignored` has masked labels.
    if loss and found.left is None and not settings.skip_ignored:
        changed = why_not_fused(model) is not None
    else:
        changed = has_changed(model, found, loss)
    return decide(model, settings, loss) if changed else found


def decide(model: Any, settings: HeadSettings, loss: bool = True) -> Decision:
    """Take the decision about a model anew.

    Communicates: one all-gather of a small object over several tensor-parallel ranks.
    """
    layer = output_layer(model)
    group = tp_group(layer)
    if group_size(group) > 1 and (reason := cannot_prove_now()) is not None:
        return Decision(settings, f"{reason}, and its tensor-parallel ranks have not agreed before: run a step first")
    seen = _seen(model, loss)
    asked = (*seen, proof_mode(settings.proof), settings.verify)
    reasons, unknowns, (mode, *_), (verify, *_) = zip(*all_gather_object(asked, group), strict=True)
    decision = Decision(settings, next(filter(None, reasons), None), verify, seen=seen, alone=group_size(group) == 1)
    decision.mode = "always" if mode == "always" else None
    if decision.left is None and (found := next(filter(None, unknowns), None)) is not None:
        decision.mode = mode
        if len(set(unknowns)) > 1:  # where one alone raised on a sample, the others would wait for it
            decision.left = f"{found}, on some tensor-parallel ranks alone"
        elif mode == "off":
            decision.left = f"{found}, and proof is off"
    decision.basis = _basis(model, layer, known=seen[1] is None)
    decisions = _decisions[model.training, loss]
    before = decisions.get(model)
    if before is not None and before.settings == settings and seen[1] is not None:
        decision.changes = before.changes + 1
        warn_of_changes(decision.changes)
    decisions[model] = decision
    return decision


def has_changed(model: Any, decision: Decision, loss: bool = True, promised: bool = False) -> bool:
    """Tell whether this rank sees another model than the one about which was decided; `promised`: whether the call has
    looked before for what keeps logits from being promised."""
    if not loss:
        return _seen(model, loss) != decision.seen
    layer, known = output_layer(model), decision.seen[1] is None
    if not promised and why_not_fused(model) != decision.seen[0]:
        return True
    now = _basis(model, layer, known)
    if decision.basis.same_as(now):
        return False
    if not known or _seen(model, loss=True) != decision.seen:
        return True
    decision.basis = now
    return False


def forget() -> None:
    """Drop the decisions about all models: their next calls decide anew. For all ranks together."""
    _decisions.clear()


@contextmanager
def telling_of_change(model: Any) -> Iterator[None]:
    """Have the head tell the other ranks that the model has changed; raises ValueError unless it has on all of them.

    On CUDA a device-side assertion tells; where a graph is captured, its replay ends on every rank.
    """
    try:
        with statistics.agreeing_on(words_of_change(group_rank(tp_group(output_layer(model))))):
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


def output_layer(model: Any) -> Any:
    """The layer that makes logits: the model's own, or that of its `lm_head` (T5Model); None on another stage."""
    if not getattr(model, "post_process", True):
        return None
    layer = getattr(model, "output_layer", None)
    return getattr(getattr(model, "lm_head", None), "output_layer", None) if layer is None else layer


def multi_token_layers(model: Any) -> int:
    """Count a model's layers of multi-token prediction."""
    return getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0


def why_not_fused(model: Any) -> str | None:
    """Return why the logits of this model cannot be promised, whatever its output layer is; None if they can.

    Whether they are a product, and its loss a cross entropy, is for `fusion_decision` and the proof to say.
    """
    return why_fusion_is_off() or why_not_promised(output_layer(model))


def why_not_promised(layer: Any) -> str | None:
    """Return why an output layer's logits cannot be promised; None if they can."""
    if not isinstance(layer, torch.nn.Module):
        return f"its output layer is a {type(layer).__name__} and no torch.nn.Module"
    if not all(map(partial(hasattr, layer), _ATTRIBUTES)):
        lacking = [name for name in _ATTRIBUTES if not hasattr(layer, name)]
        return f"its output layer is a {type(layer).__name__}, which lacks {', '.join(lacking)} of Megatron's"
    if type(call := standing(layer, CALL)) is not MethodType or call.__func__ is not torch.nn.Module._call_impl:
        return f"its output layer has a {CALL} of its own, which would not run"
    mxfp8_head = getattr(transformer_engine, _MXFP8_HEAD, None)
    if isinstance(mxfp8_head, type) and isinstance(layer, mxfp8_head):
        return (
            f"its output layer is a {_MXFP8_HEAD}, which multiplies in MXFP8 (fp8_output_proj), and the fused head "
            f"multiplies in the dtype of the hidden states; for the fused head set fp8_output_proj=False"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return (
            "generalized tensor parallelism cuts its output layer's weight over ranks that the fused head does not "
            "gather from; for the fused head set the size of generalized tensor parallelism to 1"
        )
    rounded, weight = getattr(layer, "output_dtype", None), getattr(layer, "weight", None)
    # One that borrows its weight says by its config what it multiplies in.
    operands = getattr(getattr(layer, "config", None), "params_dtype", None) if weight is None else weight.dtype
    if rounded not in (None, operands, torch.float32):
        return (
            f"its output layer rounds logits to {rounded} (logit_dtype) and multiplies in {operands}, and the fused "
            f"head rounds to the operands' dtype or not at all; for the fused head set logit_dtype to None or float32"
        )
    of_all = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    if layer._backward_hooks or layer._backward_pre_hooks or of_all:
        return "its output layer has backward hooks, which need real logits"
    return None


def _seen(model: Any, loss: bool) -> tuple[str | None, str | None]:
    """Return why a model's logits cannot be promised, as this rank sees it, and which of its code is not known."""
    if (left := why_not_fused(model)) is not None:
        return left, None
    if not loss:
        return why_not_known(output_layer(model)), None
    return None, what_is_not_known(model)


def _basis(model: Any, layer: Any, known: bool) -> ProofBasis:
    """The parts by which `what_is_not_known` goes; where code is not known, also those that decide whether the layer
    and the loss are what the head takes them for. By identity."""
    kind, own = type(layer), getattr(layer, "__dict__", {})
    parts = [
        *(type(model), _taken_apart(standing(model, LOSS)), layer, kind, _taken_apart(own.get("forward"))),
        *(_taken_apart(getattr(layer, "_forward_impl", None)), hasattr(layer, "softcap"), hasattr(layer, "to_wrap")),
    ]
    for one in kind.__mro__:
        parts.append(vars(one).get("forward"))
    parts += in_places().values()
    if known:
        return ProofBasis(*parts)
    config, weight = getattr(model, "config", None), getattr(layer, "weight", None)
    return ProofBasis(
        *parts,
        _values(model),
        [(type(one), type(one).forward, module_values(one)) for one in layer.modules()],
        [code_values(one.forward) for one in layer.modules()],
        [code_values(code) for code in (standing(model, LOSS), own.get("_forward_impl"))],
        None if weight is None else weight.dtype,
        [getattr(config, name, None) for name in _CONFIG],
    )


def _taken_apart(value: Any) -> Any:
    """A partial, which may be made anew at each step, as its function and what it binds."""
    return (value.func, value.args) if type(value) is partial and not value.keywords else value


def _values(owner: Any) -> list[tuple[str, Any]]:
    """The factors, caps, temperatures and switches that an object holds."""
    own = vars(owner) if isinstance(owner, torch.nn.Module) else {}
    return [(name, value) for name, value in own.items() if type(value) in _PLAIN]


def in_places() -> dict[str, Any]:
    """Collect what stands in the places that Megatron's output layer and loss look up, by its full name."""
    found: dict[str, Any] = {}
    for home, names in _PLACES.items():
        module = sys.modules.get(home)
        for name in names:
            if (value := getattr(module, name, None)) is not None:
                found[f"{home}.{name}"] = value
                if isinstance(value, type):
                    for method, inner in vars(value).items():
                        if isinstance(inner, staticmethod | classmethod | FunctionType):
                            found[f"{home}.{name}.{method}"] = getattr(inner, "__func__", inner)
    return found


def function_of(value: Any) -> Any:
    """The function of a method, also as a partial of its model alone; itself where it is none.

    Any other partial is another function.
    """
    bound = value.args if type(value) is partial and not value.keywords else ()
    if len(bound) == 1 and isinstance(bound[0], torch.nn.Module):
        return value.func
    return value.__func__ if type(value) is MethodType else value


def is_own(value: Any) -> bool:
    """Tell whether a function or class is defined in Megatron or here, and all that it wraps too."""
    while value is not None:
        function = function_of(value)
        home = function.__module__ if issubclass(type(function), type) else _home(function)
        inner = getattr(function, "__wrapped__", None)
        if not home.startswith(_HOMES) and not (home.startswith(_TORCH) and inner is not None):
            return False
        value = inner
    return True


def what_is_not_known(model: Any) -> str | None:
    """Say what of a model's output layer and loss is not Megatron's own or ours; None if all is."""
    layer = output_layer(model)
    if (reason := why_not_known(layer)) is not None:
        return reason
    if hasattr(layer, "softcap") and not isinstance(layer, OutputLayer):
        return f"its output layer is a {type(layer).__name__} with an attribute `softcap`, which may be for other code"
    loss = function_of(standing(model, LOSS))
    if loss is not _LOSS:
        return f"it has a {LOSS} of its own{_where(loss)}"
    for name, value in in_places().items():
        if not is_own(value):
            return f"{name} is not Megatron's own{_where(value)}"
    return None


def why_not_known(layer: Any) -> str | None:
    """Return why an output layer is not known to be linear, with a bias and a softcap or without; None if it is."""
    kind = type(layer)
    if FORWARD in vars(layer):
        return "its output layer has a forward of its own, put there by somebody else"
    if (inner := getattr(layer, "_forward_impl", None)) is not None and not is_own(inner):
        return f"its output layer has a _forward_impl of its own{_where(inner)}"
    forwards = [vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one) and one is not torch.nn.Module]
    if kind.forward in _FORWARDS and all(map(is_own, forwards)):
        return None
    said_by_user = hasattr(layer, "softcap") and not isinstance(layer, OutputLayer)
    if said_by_user and not hasattr(kind.forward, "__wrapped__"):
        return None
    if hasattr(layer, "to_wrap"):
        return (
            f"its output layer is a {kind.__name__}, which adds an adapter to another layer's logits; leave "
            f"output_layer out of the adapter's target modules, or merge the adapter into the weight"
        )
    return (
        f"its output layer is a {kind.__name__} with a forward of its own{_where(kind.forward)}; if that is a linear "
        f"layer, with a softcap or without, give it an attribute `softcap` (a number, or None)"
    )


def _home(function: Any) -> str:
    return str(function.__globals__.get("__name__")) if type(function) is FunctionType else ""


def _where(value: Any) -> str:
    """The file and line that define a function, where it has some."""
    code = getattr(function_of(value), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


# What others have put in these places before this module was imported is not known.
_LOSS = LanguageModule.compute_language_model_loss if is_own(LanguageModule.compute_language_model_loss) else None
_OURS = our_layers.ColumnParallelLinear
_LINEAR: list[Any] = [megatrons_own_layer(_OURS), _OURS, OutputLayer]
_FORWARDS = [kind.forward for kind in _LINEAR if is_own(kind.forward)]
