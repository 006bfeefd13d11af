"""Losses without logits in the forward of transformers' models that are given labels.

So every caller of that forward gets them: a loop, `transformers.Trainer`, accelerate, DDP, FSDP2, PEFT's adapters. The
model's own forward runs to its end, with promised logits from its lm head.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext.call_stack import caller_outside
from megatron_ext.distributed.groups import group_size
from megatron_ext.dtensor.attention import sequence_hook
from megatron_ext.dtensor.decoder import embedding, import_transformers, output_head_path
from megatron_ext.dtensor.output.decisions import (
    Decision,
    basis,
    decide,
    not_fusable,
    tell_of_change,
    tell_of_unread_head,
)
from megatron_ext.dtensor.output.loss_proof import own_loss, prove
from megatron_ext.dtensor.output.promised_logits import DeferredLogits
from megatron_ext.dtensor.output.reads import (
    CrossEntropyArguments,
    HeadCall,
    Read,
    say_that_logits_are_made,
    with_arguments,
)
from megatron_ext.dtensor.output.stand_ins import (
    FUSED,
    KEEPS_LOGITS,
    VOCABULARY,
    is_registered,
    promising,
    standing_in,
    use_fused_class,
)
from megatron_ext.dtensor.sequence_arguments import tells_of_token_ids, token_id_fault
from megatron_ext.head import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head.checks import Bits, Cache, rounds
from megatron_ext.proof import Proof, ProofMode, Proofs, cannot_prove_now, proof_mode, why_fusion_is_off
from megatron_ext.sequence.next_token import next_tokens

_PROOFS = Proofs()
_WRAPPERS = ("torch", "accelerate", "peft")  # packages between the line that calls the model and its forward


class FusedLoss:
    """The settings of a model's fused loss, and the owner of its proofs: a copy of it is proved anew.

    Attributes:
        calls_without_labels: how many calls in training made logits because they had no labels.
        compiled: whether a call with labels ran in a graph of torch.compile.
        arguments: the arguments of the last cross entropy that was read, on which the exchange between ranks depends.
        owners: the owners of proofs by kinds of calls, in the order of first calls.
    """

    arguments = CrossEntropyArguments()
    calls_without_labels = 0
    compiled = False

    def __init__(self, read: Read, in_eval: bool, proof: ProofMode | None):
        self.read, self.in_eval, self.proof = read, in_eval, proof
        self.owners: dict[Any, _Owner] = {}

    def owner(self, given: dict[str, Any], training: bool) -> "_Owner":
        """Return the owner of the proofs for calls with these kinds of arguments: other calls may have another loss."""
        plain = [(name, x if isinstance(x, (bool, str)) else type(x)) for name, x in given.items() if x is not None]
        return self.owners.setdefault((training, torch.is_grad_enabled(), *plain), _Owner())

    def __getstate__(self) -> dict[str, Any]:
        return {"read": self.read, "in_eval": self.in_eval, "proof": self.proof, "owners": {}}


class _Owner:
    """Key of the proofs for one kind of calls of one model."""


def use_fused_loss(
    model: nn.Module,
    *,
    in_eval: bool = False,
    proof: ProofMode | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    skip_ignored: bool | int = False,
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Let `model(input_ids, labels=labels)` compute its loss without logits; change `model` in place and return it.

    `loss` is the loss of the model's own forward, with everything that the forward does between lm head and cross
    entropy (a scale, a cap, other labels) and adds to it (a mixture's auxiliary loss). The first call compares both
    losses on at most 64 tokens, with gradients; if they differ, the model keeps its own loss. The output has no
    `logits`. Without labels, and in eval mode, the model's output is as before.

    Args:
        model: a causal language model of transformers; PEFT's adapters may be added before or after; DDP or FSDP2 may
            wrap it later. Or a model from `parallelize` without context parallelism (there call `causal_lm_loss`).
        in_eval: leave logits out in eval mode as well, where metrics may need them.
        proof: "first": the first call compares, and so does a call after a change of a function, hook or config value
            on which the loss rests; "always": each call compares; "off": none does, and the fused loss is trusted.
            None: MEGATRON_EXT_PROOF says, or "first". With MEGATRON_EXT_FUSION=off nothing is fused.
        label_smoothing, z_loss, skip_ignored, cache, chunk_tokens, bits, logit_dtype: as for
            `megatron_ext.linear_cross_entropy`. `skip_ignored` saves the work for masked prompts.

    Communicates: what the model does; with tensor parallelism what `linear_cross_entropy` does, and at the first call
    a small exchange; with `skip_ignored=True` under sequence parallelism one more small all-gather a call.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `model` has no lm head, or is compiled; an option that `linear_cross_entropy` refuses. From forward:
            `label_smoothing`, `z_loss`, `bits` or `logit_dtype` are given, but the model keeps its own loss.

    Warns:
        UserWarning: from forward, once a class of models: the model keeps its own loss, and why; once for each line
            that calls the model in training without labels.
    """
    import_transformers()
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model is compiled by torch.compile, whose graph would make the logits: call "
            "use_fused_loss(model) on the model itself, and compile its decoder: model.model.compile()"
        )
    inside = model_inside(model)
    output_head_path(inside)
    losses = functools.partial(
        linear_cross_entropy,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        skip_ignored=skip_ignored,
        cache=cache,
        chunk_tokens=chunk_tokens,
    )
    if proof is not None:
        proof_mode(proof)
    _check_options(losses, bits, logit_dtype)
    changed = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    options = ", ".join(f"{name}={value}" for name, value in changed.items() if value)
    read = Read(1.0, losses, vocab_parallel_cross_entropy, (), bits, logit_dtype, skip_ignored is True, options)
    inside.__dict__.pop(KEEPS_LOGITS, None)
    use_fused_class(inside, _forward)
    inside.__dict__[FUSED] = FusedLoss(read, in_eval, proof)
    return model


def model_inside(model: Any) -> Any:
    """Return the model inside of a wrapper by PEFT or torch.compile; `model` itself if it is not wrapped."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def proofs_of(model: nn.Module) -> tuple[Proof, ...]:
    """Return the proofs of `model`'s loss, one for each kind of call that was proved, in order."""
    fused: FusedLoss | None = vars(model_inside(model)).get(FUSED)
    owners = [] if fused is None else [*fused.owners.values()]  # a copy, as another thread may add owners
    found = [_PROOFS.made(owner) for owner in owners]
    return tuple(proof for proof in found if proof is not None)


def _check_options(losses: Callable[..., Tensor], bits: Bits | None, logit_dtype: torch.dtype | None) -> None:
    """Raise the head's errors about its options before training, by a call on a tiny input."""
    dtype = logit_dtype if rounds(logit_dtype) else torch.float32
    x = torch.zeros(1, 8, device="cpu", dtype=dtype)
    losses(x, x.expand(8, 8), torch.zeros(1, dtype=torch.int64, device="cpu"), bits=bits, logit_dtype=logit_dtype)


def _forward(self: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `own`, the forward of a model, with our loss if that is proved."""
    fused: FusedLoss | None = self.__dict__.get(FUSED)  # None after `restore_own_loss`
    given, off = _named(type(self).forward, args, kwargs), why_fusion_is_off()
    if fused is None:
        return own(self, *args, **kwargs)
    if given is None:
        _say_that_logits_are_made(self, "its forward does not name its positional arguments", fused.read)
        return own(self, *args, **kwargs)
    wanted = any(isinstance(given.get(name), Tensor) for name in ("labels", "shift_labels"))
    if not wanted or not (self.training or fused.in_eval):
        may_learn = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not wanted and may_learn and off is None:
            fused.calls_without_labels += 1
            frame, level = caller_outside(*[sys.modules[name] for name in _WRAPPERS if name in sys.modules])
            name = type(self).__name__.removeprefix("FSDP")
            _say_that_labels_are_missing(name, frame.f_code.co_filename, frame.f_lineno, level + 1)
        return own(self, *args, **kwargs)
    if torch.compiler.is_compiling():
        fused.compiled = True
        _say_that_it_is_compiled(type(self).__name__, self.base_model_prefix or "model", fused.read)
        return own(self, *args, **kwargs)
    if off is not None:
        _say_that_logits_are_made(self, off, fused.read)
        return own(self, *args, **kwargs)
    if torch._C._are_functorch_transforms_active():
        _say_that_logits_are_made(self, "a transform of torch.func runs it, where nothing can be compared", fused.read)
        return own(self, *args, **kwargs)
    # Another forward may have other labels, and token ids that stand for images.
    known = str(getattr(own, "__module__", "")).startswith("transformers.")
    if known:
        _check_labels(self, given)
    if given.get("labels") is None:  # forwards compute a loss only if `labels` are given
        given["labels"] = given["shift_labels"] = given["shift_labels"].contiguous()
    proof, anew = _decision(self, own, fused, given)
    if not proof.fused:
        _refuse_own_loss(self, proof)
        _say_that_logits_are_made(self, proof.reason, fused.read)
        return _explaining(own, given)(self, *args, **kwargs)
    if known:
        _check_token_ids(self, given)
    return _answer(self, own, fused, given, anew)


def _refuse_own_loss(model: Any, proof: Proof) -> None:
    """Raise, on all ranks, if logits are sharded by vocabulary: a model's own loss cannot take sharded logits."""
    hook = sequence_hook(model)
    if hook is not None and hook.logits_in_shards:
        raise ValueError(
            f"labels are given, but its logits are sharded by vocabulary, of which {type(model).__name__} cannot "
            f"compute its own loss ({proof.reason}); call megatron_ext.dtensor.causal_lm_loss, or mend that on every "
            f"rank and call use_fused_loss(model) again"
        )


def _named(forward: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return all arguments by name; None if `forward` does not name all positional ones."""
    places = _places(forward)
    return None if len(args) > len(places) else kwargs | dict(zip(places, args, strict=False))


@functools.cache
def _places(forward: Any) -> list[str]:
    parameters = forward.__signature__.parameters if hasattr(forward, "__signature__") else {}
    return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


@functools.cache
def _say_that_labels_are_missing(name: str, file: str, line: int, stacklevel: int) -> None:
    """Warn, once for each line of a trainer or user that calls a model without labels."""
    warnings.warn(
        f"{name} was called in training without labels, so its logits were made: use_fused_loss computes the loss "
        "only of calls with labels; with label_smoothing_factor or compute_loss_func a trainer removes the labels, "
        "and computes its loss from logits (use_fused_loss(model, label_smoothing=...) replaces the first)",
        stacklevel=stacklevel,
    )


@torch.compiler.assume_constant_result  # so it is called while torch.compile traces, also with `fullgraph`
def _say_that_it_is_compiled(name: str, decoder: str, read: Read) -> None:
    say_that_logits_are_made(
        f"{name} keeps its own loss in a graph of torch.compile, where nothing can be proved: compile the decoder "
        f"alone, by model.{decoder}.compile(), and call the model itself",
        read,
    )


def _say_that_logits_are_made(model: Any, why: str, read: Read) -> None:
    name = type(model).__name__.removeprefix("FSDP")
    say_that_logits_are_made(f"{name} keeps its own loss ({why})", read)


def _decision(model: Any, own: Callable[..., Any], fused: FusedLoss, given: dict[str, Any]) -> Decision:
    path = output_head_path(model)
    head, group = model.get_submodule(path), vars(model).get(VOCABULARY)
    mode = proof_mode(fused.proof)
    reason = not_fusable(model, path, head)
    if reason is not None and group is None:
        return Proof.not_comparable(reason), None

    def proved() -> Proof:
        return Proof.not_comparable(reason) if reason else prove(model, own, path, given, own_loss)

    owner, rests_on = fused.owner(given, model.training), basis(model, own, head, mode, reason)
    return decide(_PROOFS, owner, rests_on, proved, mode, group, fused.owners.values())


def _check_labels(model: Any, given: dict[str, Any]) -> None:
    """Raise if a text model is given another number of labels than tokens: torch's error would name batch sizes."""
    labels, tokens, chosen = given.get("labels"), given.get("input_ids"), given.get("logits_to_keep")
    all_tokens = not isinstance(chosen, Tensor) and not chosen and not is_registered(model)
    if not (all_tokens and _is_text_alone(model) and isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return
    if labels.numel() != tokens.numel():
        raise ValueError(
            f"labels has shape {list(labels.shape)}: it must be that of input_ids, {list(tokens.shape)}; pass the "
            f"tokens themselves, unshifted, with -100 where one is no target"
        )


def _explaining(own: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """Return `own`, a forward, with a clearer error if `logits_to_keep` chooses positions and labels are given for all:
    torch's error names batch sizes."""
    labels, tokens, chosen = given.get("labels"), given.get("input_ids"), given.get("logits_to_keep")
    positions = chosen.numel() if isinstance(chosen, Tensor) else chosen
    if not (positions and isinstance(labels, Tensor) and isinstance(tokens, Tensor) and labels.shape == tokens.shape):
        return own

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except ValueError as error:
            if "batch_size" not in str(error):
                raise
            raise ValueError(
                f"labels has shape {list(labels.shape)}, and with logits_to_keep the model makes logits of {positions} "
                f"positions of a row alone: leave logits_to_keep out, or pass the labels of these positions alone"
            ) from error

    return forward


def _is_text_alone(model: Any) -> bool:
    """Return whether the model takes a single sequence of text tokens; other models' ids may stand for images."""
    return model.config.get_text_config() is model.config and not getattr(model.config, "is_encoder_decoder", False)


def _check_token_ids(model: Any, given: dict[str, Any]) -> None:
    rows, tokens = embedding(model), given.get("input_ids")
    looks = _is_text_alone(model) and not tells_of_token_ids(rows)
    if looks and isinstance(tokens, Tensor) and (unknown := token_id_fault(rows, tokens)) is not None:
        raise unknown


def _answer(
    model: Any, own: Callable[..., Any], fused: FusedLoss, given: dict[str, Any], anew: Callable[[], Proof] | None
) -> Any:
    """Return the output of `own` with our loss and without logits. `anew`: see `Decision`."""
    path, read = output_head_path(model), fused.read
    as_before = with_arguments(read, fused.arguments)
    head = model.get_submodule(path)
    calls: list[HeadCall] = []

    def call_of(hidden: Tensor) -> HeadCall:
        if anew is not None and not calls:
            _decide_anew(model, head, as_before, hidden, given, anew)
        return HeadCall(head, read, hidden, given)

    with standing_in(model, path, promising(head, call_of, calls.append)) as stub:
        output = _explaining(own, given)(stub, **given)
    told_or_read = bool(calls) if anew is not None else any(call.redeemed for call in calls)
    if not told_or_read and group_size(vars(model).get(VOCABULARY)) > 1:
        tell_of_unread_head(model, head, as_before, [_targets(given)])
    fused.arguments = next((call.redeemed for call in calls if call.redeemed), fused.arguments)
    readers = [call.read_by for call in calls if call.read_by]
    if readers:
        _say_that_logits_are_made(model, f"its forward reads its logits by {readers[0]}", read)
    elif not any(call.redeemed for call in calls):
        _say_that_logits_are_made(model, "it is no cross entropy of the logits of its lm head", read)
    return _without_promises(output)


def _decide_anew(
    model: Any, head: Any, read: Read, hidden: Tensor, given: dict[str, Any], anew: Callable[[], Proof]
) -> None:
    """Prove a changed model anew if all ranks see a change; raise on all ranks if its loss cannot be fused any more."""
    tell_of_change(model, head, read, hidden, [_targets(given)])
    if cannot_prove_now() is not None:
        return  # replaying the graph that is being captured ends with an error on every rank
    proof = anew()
    if not proof.fused:
        _refuse_own_loss(model, proof)


def _targets(given: dict[str, Any]) -> Tensor:
    """Return the target of each position, from `shift_labels` or `labels`."""
    shifted = given.get("shift_labels")
    return next_tokens(given["labels"]) if shifted is None else shifted


def _without_promises(output: Any) -> Any:
    """Return the output with real logits for promises that were made real, and without the other promises."""

    def real(x: Any) -> Any:
        return x.made if isinstance(x, DeferredLogits) else x

    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return tuple(real(x) for x in output if real(x) is not None or x is None)
    if isinstance(output, dict):
        kept = {name: real(x) for name, x in output.items()}
        found = type(output)(**{name: x for name, x in kept.items() if x is not None})
        for name, x in getattr(output, "__dict__", {}).items():  # what a forward has added
            vars(found).setdefault(name, real(x))
        return found
    return output
