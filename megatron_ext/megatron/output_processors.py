"""Read-outs of a model's last hidden states inside its forward, without logits, for RL and distillation.

Megatron's `forward(..., output_processor=, output_processor_context=)` (GPTModel of 0.18 and newer) hands hidden states
and output layer to a function of the caller's, in place of making logits. `NextTokenLogProbs` and `ReadOuts` are such
functions. A patched model takes the two arguments in every version, HybridModel and MambaModel too. If Megatron's own
`forward` lacks them, the processor gets the same keywords, with the operands of the model's promised logits.

Shapes: B batch, S positions of this rank (all of them without context parallelism), R tensor-parallel ranks, H hidden
size, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_ext.head import ReadOut
from megatron_ext.head.checks import Bits, Cache, or_refuse
from megatron_ext.head.cross_entropy import log_prob_readouts
from megatron_ext.megatron.fused_loss import fusion_decision, log_probs
from megatron_ext.megatron.fused_loss.fused_region import Region
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.module_calls import is_torchs, split_hooks, stands_in_this_call
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits, Terms, promise_logits
from megatron_ext.megatron.fusion_report import counters_of

OPTIONS = ("output_processor", "output_processor_context")  # of a patched forward


@dataclass(frozen=True, kw_only=True)
class _Processor:
    """Base of the output processors.

    Attributes:
        temperature: logits are divided by it, those of a teacher too.
        chunk_tokens: tokens per chunk; None lets the head choose.
        cache: what the head keeps for backward; see `LmHead`.
        bits: which bits are reproducible, as in `LmHead`; None: as Megatron's `batch_invariant_mode` says.
        logit_dtype: the dtype to which logits are rounded, as in `HeadSettings`.
    """

    temperature: float = 1.0
    chunk_tokens: int | None = None
    cache: Cache = "bounded"
    bits: Bits | None = None
    logit_dtype: torch.dtype | None = None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None = None,
        scale_logits: Callable[[Tensor], Tensor] | None = None,
        **given: Any,
    ) -> Any:
        """Return the result of `read`; the model calls this. `given`: the other arguments that Megatron passes to an
        output processor, and, from a patched model, the model itself as `model`."""
        hooks, others = split_hooks(output_layer)
        promising = stands_in_this_call(output_layer)
        reason = None
        if not promising:
            reason = fusion_decision.why_not_promised(output_layer) or fusion_decision.why_not_known(output_layer)
        if reason is None and not all(is_torchs(hook) for kind in others for hook in kind.values()):
            reason = "its output layer has forward hooks, which would not run"
        if reason is not None:
            raise ValueError(
                f"{type(self).__name__} reads hidden states, not logits: {reason}; leave output_processor out and use "
                "the logits"
            )

        def refuse(*_: Any) -> NoReturn:
            raise ValueError(
                f"scale_logits is {scale_logits!r} and does more than multiply logits with a positive number: "
                "read-outs of hidden states allow nothing else; leave output_processor out and use the logits"
            )

        logits: Any = promise_logits(output_layer, hidden_states, output_weight, False, refuse, hooks)
        scaled = logits if scale_logits is None else scale_logits(logits)
        if not isinstance(scaled, PromisedLogits):
            refuse()
        return self.read(scaled.terms, given)

    def read(self, terms: Terms, given: dict[str, Any]) -> Any:
        """Return the model's result, from the hidden states of `terms`; `given`: as in `__call__`."""
        raise NotImplementedError

    def _read_head(self, terms: Terms, *readouts: ReadOut, **options: Any) -> Any:
        """Read the model's head, in a call of its output layer, whose hooks gather the weight; `[S, B, ...]` each."""
        settings = HeadSettings(**{field.name: getattr(self, field.name) for field in fields(_Processor)})

        def compute(hidden: Tensor, weight: Tensor) -> Any:
            head = settings.lm_head(terms, weight, getattr(terms.layer, "config", None))
            return head.read(hidden, *readouts, **options)

        return terms.read(compute)


@dataclass(frozen=True, kw_only=True)
class NextTokenLogProbs(_Processor):
    """Log-probabilities `[B, S - 1]` of each next token, fp32, 0 where a packed document ends.

    The tokens are `labels` (token ids, not shifted), or `input_ids` if there are no labels. Under context parallelism
    every rank gets the result of the whole sequence, and the gradients of all ranks add up. With `return_entropy` the
    result is a tuple of log-probabilities and entropies, of the same shape.

    Communicates what `linear_log_probs` does; under context parallelism also an all-gather of the tokens, unless the
    caller passes those of the whole sequence, and one of each result.
    """

    return_entropy: bool = False

    def read(self, terms: Terms, given: dict[str, Any]) -> Any:
        parts, _, labels_BS = log_probs.next_labels(given.get("model"), given)
        labels_SB = labels_BS.transpose(0, 1)
        counts = labels_SB != log_probs.IGNORE_INDEX if self.return_entropy else None
        readouts = log_prob_readouts(labels_SB, log_probs.IGNORE_INDEX, counts, False)
        found, fault = or_refuse(lambda: self._read_head(terms, *readouts), labels_SB.shape, terms.hidden)
        first, *more = found if isinstance(found, tuple) else (found,)
        result = parts.gather_or_refuse(first.transpose(0, 1).contiguous(), 1, fault)[:, :-1]
        return (result, *(parts.gather(x.transpose(0, 1).contiguous(), 1)[:, :-1] for x in more)) if more else result


@dataclass(frozen=True, kw_only=True)
class ReadOuts(_Processor):
    """Any read-outs of `megatron_ext.head` at each of this rank's positions, in one pass: the result of a single
    read-out, or the tuple of the results of several.

    The tensors in `readouts` are `[S, B, ...]`, the layout of the model's hidden states; results are `[B, S, ...]`. A
    teacher's hidden states are sharded as the model's own (under sequence parallelism `[S/R, B, ...]`), its weight
    `[V/R, ...]` as the model's output weight; the factor by which the model multiplies its logits (muP) is not applied
    to the teacher's. Tokens where `counts` (`[S, B]`, bool) is False are left out, and at most `at_most` count, as in
    `LmHead.read`. Communicates and raises what `LmHead.read` does.
    """

    readouts: Sequence[ReadOut]
    counts: Tensor | None = None
    at_most: int | None = None

    def read(self, terms: Terms, given: dict[str, Any]) -> Any:
        found = self._read_head(terms, *self.readouts, counts=self.counts, at_most=self.at_most)
        return tree_map(lambda x: x.transpose(0, 1).contiguous(), found)


def forward_with_output_processor(original: Any, fused: Any, settings: HeadSettings) -> Any:
    """Return `fused`, the patched `forward`, with the arguments `output_processor` and `output_processor_context`."""
    signature = inspect.signature(original)
    native = OPTIONS[0] in signature.parameters

    def forward(self, *args, output_processor=None, output_processor_context=None, **kwargs):
        if output_processor is None:
            return fused(self, *args, **kwargs)
        has_layer = fusion_decision.output_layer(self) is not None
        if isinstance(output_processor, _Processor):  # Megatron's call passes no model, whose groups are needed
            counters_of(self).read_outs += has_layer
            output_processor = functools.partial(output_processor, model=self)
        if native:
            more = dict(zip(OPTIONS, (output_processor, output_processor_context), strict=True))
            return fused(self, *args, **{k: v for k, v in more.items() if v is not None}, **kwargs)
        if not has_layer:
            return original(self, *args, **kwargs)
        return _processed(self, original, settings, output_processor, output_processor_context, args, kwargs)

    for name in () if native else OPTIONS:
        signature = log_probs.with_argument(signature, name, None)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _processed(model, original, settings, processor, context, args, kwargs) -> Any:
    """Call the processor for a model whose own `forward` takes none, and return its result."""
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments | kwargs
    if given.get("labels") is not None:
        raise ValueError(
            f"labels are given together with output_processor, and {type(model).__name__} of this Megatron-Core takes "
            "no processors: pass labels=None, and the processor's input in output_processor_context"
        )
    if (reason := fusion_decision.decision_of(model, settings, loss=False).left) is not None:
        raise ValueError(
            f"output_processor cannot get hidden states of {type(model).__name__}: {reason}; leave it out and use the "
            "logits"
        )
    region = Region(model, settings, fusion_decision.output_layer(model))
    logits = region.run(functools.partial(original, model, *args, **kwargs))
    if not isinstance(logits, PromisedLogits):
        raise ValueError(
            f"output_processor is given, and {type(model).__name__} returned no logits of its output layer but "
            f"{type(logits).__name__}: there is nothing for it to process; leave it out"
        )
    terms = logits.terms
    names = ("loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input", "inference_context")
    return processor(
        hidden_states=terms.hidden,
        output_layer=terms.layer,
        output_weight=terms.weight,
        labels=None,
        packed_seq_params=given.get("packed_seq_params"),
        runtime_gather_output=given.get("runtime_gather_output"),
        context=context,
        compute_language_model_loss=getattr(model, fusion_decision.LOSS),
        scale_logits=lambda z: z if terms.scale == 1.0 else z * terms.scale,
        config=model.config,
        **{name: given.get(name) for name in names},
    )
