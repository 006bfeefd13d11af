"""The decision whether a model's loss is fused, which its tensor-parallel ranks take together at its first call.

If the output layer and the loss are Megatron's own or ours, by identity, the model is fused without a proof. If other
code is in their place, the first batch proves the fusion, or the model keeps its own loss. Ranks must not decide
differently, so one exchange at the first call tells each rank what the others see. A later change is a word among the
head's options, which the head compares over all ranks in the exchange that it makes anyway: if all ranks have seen a
change, they decide anew; if only some have, every rank raises.

Code is known if it is Megatron's own or ours, by identity and not by name. A function made with `functools.wraps` has
the names and the `__module__` of the function that it wraps, but not the globals, which are those of its own file. An
object of wrapt's has even the globals, and passes `isinstance`.
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
_TORCH = ("torch._dynamo", "torch.amp.")  # a wrapper by torch.compile or autocast computes what the function does
# Names that Megatron's own output layer and loss look up when they run, so that other code may replace the objects
# under these names. Some versions lack some of the names.
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
# Fields of a config that decide what an output layer and a loss compute.
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
        settings: the settings under which it was taken.
        left: why the model keeps its own loss; None if the loss is fused, perhaps after a proof.
        verify: how many of the model's losses are also computed by its own code.
        mode: when the fusion is proved; None: never, as all code is known.
        seen: what `_seen` found on this rank.
        alone: whether one rank has the whole vocabulary.
        basis: the objects on which `seen` rests, and the proof too if code is unknown on this rank.
        proof: the last proof.
        changes: how often the decision was taken anew after a change of the code.
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


# By two flags: whether the model trains (its own loss may differ in eval mode), and whether a loss is computed.
_Decisions = WeakKeyDictionary[Any, Decision]
_decisions: defaultdict[tuple[bool, bool], _Decisions] = defaultdict(WeakKeyDictionary)


def decision_of(model: Any, settings: HeadSettings, loss: bool = True) -> Decision:
    """Return the decision about a model, which its first call with these settings takes.

    All tensor-parallel ranks call it together; a group of one rank decides anew when the model has changed. `loss`:
    True for a loss; False for read-outs of hidden states, which need only a known output layer.
    """
    found = _decisions[model.training, loss].get(model)
    if found is None or found.settings != settings:
        return decide(model, settings, loss)
    if not found.alone:
        return found
    # `Region.why_not` looks for other changes when the loss is computed; with `skip_ignored` labels are masked by then.
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
        if len(set(unknowns)) > 1:  # ranks must run the same code on a sample: if one raised, the others would wait
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
    """Tell whether the model differs, on this rank, from the one that `decision` is about; `promised`: whether the call
    has checked already that logits can be promised."""
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
    """Drop the decisions about all models, so that their next calls decide anew. All ranks call it together."""
    _decisions.clear()


@contextmanager
def telling_of_change(model: Any) -> Iterator[None]:
    """Have the head tell the other ranks that the model has changed; raises ValueError unless it has changed on all.

    On CUDA the error is a device-side assertion; of a captured graph, the replay ends with it on every rank.
    """
    try:
        with statistics.agreeing_on(words_of_change(group_rank(tp_group(output_layer(model))))):
            yield
    except OptionsDiffer as fault:
        raise ValueError(_CHANGED.format(type(model).__name__, _why(model), fault)) from fault


_CHANGED = (
    "the output layer or the loss of this {} has changed since its tensor-parallel ranks decided to fuse it ({}), and "
    "they cannot decide anew: {}. Change it on every rank alike (also counters that the loss function keeps), or "
    "before its first call, or patch it again"
)


def _why(model: Any) -> str:
    return next(filter(None, _seen(model, loss=True)), "it has another function, or its code reads another value")


def output_layer(model: Any) -> Any:
    """Return the layer that makes logits, the model's own or its `lm_head`'s (T5Model); None on a stage without one."""
    if not getattr(model, "post_process", True):
        return None
    layer = getattr(model, "output_layer", None)
    return getattr(getattr(model, "lm_head", None), "output_layer", None) if layer is None else layer


def multi_token_layers(model: Any) -> int:
    """Count a model's layers of multi-token prediction."""
    return getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0


def why_not_fused(model: Any) -> str | None:
    """Return why the logits of this model cannot be promised, whatever its output layer computes; None if they can.

    `what_is_not_known` and the proof say whether the logits are a product and the loss is a cross entropy.
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
    # The config of a layer without a weight of its own gives the dtype of its operands.
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
    """Return why a model's logits cannot be promised, and which code is unknown, both as this rank sees the model."""
    if (left := why_not_fused(model)) is not None:
        return left, None
    if not loss:
        return why_not_known(output_layer(model)), None
    return None, what_is_not_known(model)


def _basis(model: Any, layer: Any, known: bool) -> ProofBasis:
    """Return the objects that `what_is_not_known` looks at, compared by identity; if code is unknown, also the values
    that decide what the layer and the loss compute."""
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
    """Return function and arguments of a partial, which may be made anew at each step; any other value as it is."""
    return (value.func, value.args) if type(value) is partial and not value.keywords else value


def _values(owner: Any) -> list[tuple[str, Any]]:
    """Return a module's own bools, floats and strings: factors, caps, temperatures, switches."""
    own = vars(owner) if isinstance(owner, torch.nn.Module) else {}
    return [(name, value) for name, value in own.items() if type(value) in _PLAIN]


def in_places() -> dict[str, Any]:
    """Return the objects that Megatron's output layer and loss look up, and the methods of classes, by full name."""
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
    """Return the function of a method, or of a partial that binds a module alone; any other value as it is."""
    bound = value.args if type(value) is partial and not value.keywords else ()
    if len(bound) == 1 and isinstance(bound[0], torch.nn.Module):
        return value.func
    return value.__func__ if type(value) is MethodType else value


def is_own(value: Any) -> bool:
    """Tell whether a function or class, and every function that it wraps, is defined in Megatron or here."""
    while value is not None:
        function = function_of(value)
        home = function.__module__ if issubclass(type(function), type) else _home(function)
        inner = getattr(function, "__wrapped__", None)
        if not home.startswith(_HOMES) and not (home.startswith(_TORCH) and inner is not None):
            return False
        value = inner
    return True


def what_is_not_known(model: Any) -> str | None:
    """Name the part of a model's output layer or loss that is neither Megatron's own nor ours; None without one."""
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
    """Return the file and line that define a function, as " (file:line)"; "" if it has none."""
    code = getattr(function_of(value), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


# A loss or forward that other code replaced before this module was imported counts as unknown.
_LOSS = LanguageModule.compute_language_model_loss if is_own(LanguageModule.compute_language_model_loss) else None
_OURS = our_layers.ColumnParallelLinear
_LINEAR: list[Any] = [megatrons_own_layer(_OURS), _OURS, OutputLayer]
_FORWARDS = [kind.forward for kind in _LINEAR if is_own(kind.forward)]
