"""The fused head inside GPTModel: with labels, the loss comes from hidden states and no logits are made.

GPTModel's `_postprocess` asks its output layer for logits and hands them, with the labels, to
`compute_language_model_loss`; it does so once for the main loss and once for each multi-token-prediction layer. Those
two calls are the seams. While a patched `_postprocess` runs with labels, the output layer returns a promise instead of
logits, and the loss redeems it with `linear_cross_entropy`. All the rest of GPTModel is Megatron's own code.

The patch sits on the class or on single models; `unpatch_...` puts the original objects back.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext.distributed.groups import tensor_parallel_group
from megatron_ext.head import linear_cross_entropy
from megatron_ext.head.options import Cache

_SEAM = "_postprocess"


@dataclass(frozen=True)
class _PromisedLogits:
    """What the output layer would have multiplied: hidden states `[S, B, H]` (`[S/R, B, H]` if sequence parallel)."""

    layer: Any
    hidden: Tensor
    weight: Tensor

    def loss(self, labels: Tensor, chunk_tokens: int | None, cache: Cache) -> Tensor:
        """Per-token loss, fp32, of labels `[B, S]`; same shape."""
        layer = self.layer
        loss_SB = linear_cross_entropy(
            self.hidden,
            self.weight,
            labels.transpose(0, 1),
            tp_group=tensor_parallel_group(getattr(layer, "tp_group", None)),
            hidden_layout="sequence" if layer.sequence_parallel else "replicated",
            bias=None if layer.skip_bias_add else layer.bias,
            chunk_tokens=chunk_tokens,
            cache=cache,
        )
        return loss_SB.transpose(0, 1).contiguous()


@contextmanager
def _promising(model: Any, chunk_size: int | None, cache: Cache) -> Iterator[None]:
    """While it lasts, `model`'s output layer promises logits and its loss redeems the promise."""
    layer, stock_loss = model.output_layer, model.compute_language_model_loss

    def promise(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        return _PromisedLogits(layer, input_, layer.weight if weight is None else weight), None

    def loss(labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, _PromisedLogits):
            return stock_loss(labels, logits)
        # Chunks are counted in sequence positions here, as the models do; the head counts tokens.
        return logits.loss(labels, None if chunk_size is None else chunk_size * labels.shape[0], cache)

    with _attribute(layer, "forward", promise), _attribute(model, "compute_language_model_loss", loss):
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; afterwards the instance has (or lacks) its own one as before."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _patched(original: Any, chunk_size: int | None, cache: Cache) -> Any:
    """`_postprocess`, with promised logits where there are labels and an output layer."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def postprocess(self, *args, **kwargs):
        labels = signature.bind(self, *args, **kwargs).arguments.get("labels")
        if labels is None or not self.post_process:
            return original(self, *args, **kwargs)
        with _promising(self, chunk_size, cache):
            return original(self, *args, **kwargs)

    postprocess.original = original  # type: ignore[attr-defined]
    return postprocess


def _check(chunk_size: int | None, target: Any) -> None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(
            f"chunk_size is {chunk_size!r}: it must be a positive number of sequence positions, or None for a size "
            f"chosen by the head"
        )
    if not hasattr(target, _SEAM):
        raise ValueError(
            f"{getattr(target, '__name__', type(target).__name__)} has no method {_SEAM}, where the fused head goes "
            f"in: pass a GPTModel of Megatron-Core 0.14 or newer"
        )


def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: int | None = None, cache: Cache = "auto", model: Any = None
) -> None:
    """GPTModel with labels computes its per-token losses `[B, S]` by the fused head; without labels nothing changes.

    Args:
        chunk_size: sequence positions per chunk; None lets the head choose. It changes memory, not results.
        cache: how much of forward's work is kept for backward, as in `linear_cross_entropy`: 1 is fastest, 0 takes
            least memory, "auto" looks at what is free.
        model: one model, whatever wraps it already unwrapped; None: every GPTModel, those already built included.

    Patching again replaces both.

    Communicates, per loss: tensor parallel 1 collective forward and 1 backward, with sequence parallelism 2 and 2.

    Raises:
        ValueError: `chunk_size` is not positive, or the model lacks the seam.
    """
    target = GPTModel if model is None else model
    _check(chunk_size, target)
    unpatch_gpt_model_forward_for_linear_ce_fusion(model=model)
    if model is None:
        setattr(GPTModel, _SEAM, _patched(vars(GPTModel)[_SEAM], chunk_size, cache))
    else:
        original = getattr(type(model), _SEAM)
        patched = _patched(getattr(original, "original", original), chunk_size, cache)
        setattr(model, _SEAM, functools.partial(patched, model))


def unpatch_gpt_model_forward_for_linear_ce_fusion(*, model: Any = None) -> None:
    """Undo the patch of the class (`model=None`) or of one model: the original objects are back. Harmless if unpatched."""
    if model is not None:
        vars(model).pop(_SEAM, None)
    elif hasattr(vars(GPTModel)[_SEAM], "original"):
        setattr(GPTModel, _SEAM, vars(GPTModel)[_SEAM].original)
