"""The fused head inside GPTModel: with labels, the loss comes from hidden states and no logits are made.

GPTModel's `_postprocess` asks its output layer for logits and hands them, with the labels, to
`compute_language_model_loss`; it does so once for the main loss and once for each multi-token-prediction layer. Those
two calls are the seams. While a patched `_postprocess` runs with labels, the output layer returns promised logits, and
the loss redeems the promise with `linear_cross_entropy`. All the rest of GPTModel is Megatron's own code; combined
1F1B, which calls `_postprocess` and not `forward`, gets the fused head too.

The patched `forward` takes one argument more, `return_logprobs_for_linear_ce_fusion`, and answers it from the losses.

The patch sits on the class or on single models; `unpatch_...` puts the original objects back.
"""

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megatron.core.utils
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.options import Cache, HeadOptions
from megatron_ext.megatron import versions
from megatron_ext.megatron.log_probs import IGNORE_INDEX, HeadRefusal, forward_with_log_probs
from megatron_ext.megatron.promise import PromisedLogits, promise_logits

_ABSENT = object()
_PATCHED = (versions.FORWARD, versions.POSTPROCESS)
_models: weakref.WeakSet = weakref.WeakSet()  # those with a patch of their own


@dataclass(frozen=True)
class Settings:
    """What a patch was asked for: see `patch_gpt_model_forward_for_linear_ce_fusion`."""

    chunk_size: int | None = None
    chunk_tokens: int | None = None
    cache: Cache = "auto"

    def __post_init__(self) -> None:
        for name, unit in (("chunk_size", "sequence positions"), ("chunk_tokens", "tokens")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is {value!r}: it must be a positive number of {unit}, or None for the head to choose"
                )
        if self.chunk_size is not None and self.chunk_tokens is not None:
            raise ValueError(
                f"chunk_size is {self.chunk_size} and chunk_tokens {self.chunk_tokens}: they say the same thing in "
                f"sequence positions and in tokens; pass one of them"
            )
        HeadOptions(None, VocabShard(0, 1, 1), cache=self.cache)  # has the head's rules for `cache` checked here

    def chunk(self, batch_size: int) -> int | None:
        """Tokens per chunk."""
        return self.chunk_tokens if self.chunk_size is None else self.chunk_size * batch_size


def patch_gpt_model_forward_for_linear_ce_fusion(
    *,
    chunk_size: int | None = None,
    chunk_tokens: int | None = None,
    cache: Cache = "auto",
    model: Any = None,
) -> None:
    """GPTModel with labels computes its per-token losses by the fused head; without labels nothing changes.

    `model(..., labels=labels)` gives `[B, S]` as Megatron does, fp32. Labels of -100 give 0 and no gradient.

    With `return_logprobs_for_linear_ce_fusion=True`, an argument that the patched `forward` has beside Megatron's,
    `labels` are the token ids themselves, not shifted, and the result `[B, S - 1]` are the log-probabilities of each
    next token; 0 where a packed document ends. Under context parallelism `labels` are this rank's part, as the tokens,
    or the whole; the result is that of the whole sequence on every rank, and gradients of all ranks add up. A
    `loss_mask` (read by multi-token prediction) lies as the labels do. Stages without an output layer pass hidden
    states on.

    A model is left to Megatron's own loss, with a warning once, where its output layer or its loss is not known to be
    linear and a cross entropy: see `versions.why_not_fused`.

    Args:
        chunk_size: sequence positions per chunk; None lets the head choose. It changes memory, not results.
        chunk_tokens: the same in tokens, positions times batch size.
        cache: how much of forward's work is kept for backward, as in `linear_cross_entropy`: 1 is fastest, 0 takes
            least memory, "auto" looks at what is free.
        model: one model or a list of them, wrapped (data parallelism, 16-bit) or not: the patch is theirs alone, and
            comes before that of the class. None: every GPTModel, those already built included.

    Patching again replaces the settings.

    Communicates, per loss: tensor parallel 1 collective forward and 1 backward, with sequence parallelism 2 and 2.
    Log-probabilities under context parallelism: 1 all-gather forward and 1 reduce-scatter backward more, and an
    all-gather of labels given in parts.

    Raises:
        ValueError: a size of chunks is not positive; a model is no GPTModel, or lacks what the fused head needs (the
            message says what). From the patched model: gathered logits together with labels, labels of another shape,
            log-probabilities without labels. Of log-probabilities every context-parallel rank raises what the head
            refuses on one.
    """
    settings = Settings(chunk_size, chunk_tokens, cache)
    models = None if model is None else [_unwrap(m) for m in _as_list(model)]
    for owner in [GPTModel] if models is None else map(type, models):
        versions.check_layout(owner)
    versions.warn_if_untested()
    for name in _PATCHED:
        if models is None:
            _replace(GPTModel, name, settings)
        else:
            for one in models:
                setattr(one, name, _wrapper(_original(getattr(type(one), name)), name, settings).__get__(one))
    _models.update(models or [])
    _guard_drain()


def unpatch_gpt_model_forward_for_linear_ce_fusion(*, model: Any = None) -> None:
    """Undo the patch of the class (`model=None`) or of models: the original objects are back. Harmless if unpatched."""
    for name in _PATCHED:
        if model is None:
            _restore(GPTModel, name)
        else:
            for one in map(_unwrap, _as_list(model)):
                vars(one).pop(name, None)
                _models.discard(one)
    _guard_drain()


def gpt_forward_with_linear_ce_fusion(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What the patched `GPTModel.forward` does, as a function of the model, which need not be patched.

    Arguments that are None are left to their defaults, so that those of one Megatron may be given to another.
    """
    patched = (vars(model).get(versions.POSTPROCESS), getattr(type(model), versions.POSTPROCESS))
    settings = next((f.settings for f in patched if hasattr(f, "settings")), Settings())
    forward, postprocess = (_wrapper(_original(getattr(type(model), name)), name, settings) for name in _PATCHED)
    with _attribute(model, versions.POSTPROCESS, postprocess.__get__(model)):
        return forward(model, *args, **{name: value for name, value in kwargs.items() if value is not None})


def _fused_postprocess(original: Any, settings: Settings) -> Any:
    """`_postprocess`, with promised logits where there are labels and an output layer."""
    signature = inspect.signature(original)

    def postprocess(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments | kwargs
        if (
            given.get("labels") is None
            or not self.post_process
            or given.get(versions.OUTPUT_PROCESSOR) is not None  # the caller makes the outputs
            or _must_stay_stock(self)
        ):
            return original(self, *args, **kwargs)
        with _promising(self, settings):
            return original(self, *args, **kwargs)

    return postprocess


def _must_stay_stock(model: Any) -> bool:
    reason = versions.why_not_fused(model)
    if reason is not None:
        _say_once(f"{type(model).__name__} keeps Megatron's own loss, the fused head stays out: {reason}")
    return reason is not None


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@contextmanager
def _promising(model: Any, settings: Settings) -> Iterator[None]:
    """While it lasts, `model`'s output layer promises logits and its loss redeems the promise.

    What the head refuses is raised at the end: labels are sent from rank to rank between the losses of several tokens.
    """
    faults: list[ValueError] = []
    layer, stock_forward, stock_loss = model.output_layer, model.output_layer.forward, model.compute_language_model_loss

    def promise(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **others: Any):
        def compute() -> Tensor:
            return stock_forward(input_, weight=weight, runtime_gather_output=runtime_gather_output, **others)[0]

        logits = promise_logits(layer, input_, weight, runtime_gather_output, compute)
        return logits, layer.bias if layer.skip_bias_add else None

    def loss(labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, PromisedLogits):
            return stock_loss(labels, logits)
        if logits.made is not None:
            return stock_loss(labels, logits.made)
        try:
            return logits.loss(labels, settings.chunk(labels.shape[0]), settings.cache, IGNORE_INDEX)
        except ValueError as fault:
            faults.append(fault)
            return torch.zeros(labels.shape, device=labels.device)

    with _attribute(layer, versions.FORWARD, promise), _attribute(model, versions.LOSS, loss):
        yield
    if faults:
        raise HeadRefusal(*faults[0].args) from faults[0]


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; afterwards the instance has (or lacks) its own one as before."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _drain_if_deferred(config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs):
    """The fused head defers no weight gradient; Megatron's function fails where there is none to compute.

    Which function that is, is looked up at each call: `substitute_tensor_parallel()` may have put ours in its place.
    """
    if embedding_activation_buffer or grad_output_buffer:
        drain = getattr(megatron.core.utils, versions.DRAIN[1])
        drain(config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs)


def _wrapper(original: Any, name: str, settings: Settings) -> Any:
    """What stands in the place of Megatron's function: it remembers that, and what it was made for."""
    make = {
        versions.FORWARD: lambda: forward_with_log_probs(original),
        versions.POSTPROCESS: lambda: _fused_postprocess(original, settings),
        versions.DRAIN[1]: lambda: functools.partial(_drain_if_deferred),
    }
    wrapper: Any = functools.wraps(original)(make[name]())
    wrapper.original, wrapper.settings = original, settings
    return wrapper


def _original(function: Any) -> Any:
    return getattr(function, "original", function)


def _replace(owner: Any, name: str, settings: Settings) -> None:
    """Put a wrapper in the place of `owner.name`; one of ours made for the same settings stays."""
    current = vars(owner)[name]
    if getattr(current, "settings", None) != settings:
        setattr(owner, name, _wrapper(_original(current), name, settings))


def _restore(owner: Any, name: str) -> None:
    current = vars(owner)[name]
    if _original(current) is not current:
        setattr(owner, name, _original(current))


def _guard_drain() -> None:
    """Megatron's schedules get their guard with the first patch and lose it with the last."""
    if _models or hasattr(vars(GPTModel)[versions.POSTPROCESS], "original"):
        _replace(*versions.DRAIN, Settings())
    elif _original(getattr(*versions.DRAIN)) is not getattr(*versions.DRAIN):
        owner, name = versions.DRAIN
        setattr(owner, name, getattr(megatron.core.utils, name))


def _as_list(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _unwrap(model: Any) -> Any:
    """The GPTModel inside data parallelism, 16-bit and the like."""
    while not hasattr(model, versions.POSTPROCESS) and hasattr(model, "module"):
        model = model.module
    return model
