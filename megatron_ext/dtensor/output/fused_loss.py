"""Losses without logits where transformers computes them: in the forward of a model that is given labels.

So they reach whatever calls that forward: a loop, `transformers.Trainer`, accelerate, DDP, FSDP2, PEFT's adapters.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor.decoder import embedding, import_transformers, output_head_path
from megatron_ext.dtensor.input.token_ids import tells_of_token_ids, token_id_fault
from megatron_ext.dtensor.output.head_rule import OWN_FORWARD, HeadRule, stub_of
from megatron_ext.dtensor.output.hidden_states_or_logits import (
    Read,
    is_registered,
    read_hidden,
    rule_or_reason,
    say_that_logits_are_made,
)
from megatron_ext.head import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head.validation.option_checks import Bits
from megatron_ext.sequence.next_token import next_tokens

_FUSED = "_megatron_ext_fused_loss"
_OF_THE_LOSS = ("labels", "num_items_in_batch", "shift_labels", "ignore_index")  # what a forward hands on to its loss


class _Fused(NamedTuple):
    """The head's function for a model's losses, and whether it is for eval mode too."""

    read: Read
    in_eval: bool


def use_fused_loss(
    model: nn.Module,
    *,
    in_eval: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    skip_ignored: bool | int = False,
    cache: Any = "bounded",
    chunk_tokens: int | None = None,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Let `model(input_ids, labels=labels)` compute its loss without logits; in place, and returned.

    `loss` is what transformers computes: labels `[B, S]` unshifted, -100 where one is no target (or `shift_labels`),
    the mean over targets, or their sum over `num_items_in_batch`; a mixture adds its auxiliary loss. There are no
    `logits` in the output. Without labels, and in eval mode, the model answers as before.

    Args:
        model: a causal language model of transformers; one with PEFT's adapters, before or after it got them; one that
            DDP or FSDP2 will wrap; or what `parallelize` made, without context parallelism (there call
            `causal_lm_loss`).
        in_eval: leave logits out in eval mode as well, where metrics may want them.
        label_smoothing, z_loss, skip_ignored, cache, chunk_tokens, bits, logit_dtype: as for
            `megatron_ext.linear_cross_entropy`. `skip_ignored` saves the work for prompts that are masked.

    Communicates: what the model does; with tensor parallelism what `linear_cross_entropy` does.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `model` has no lm head; transformers is older than 5.0.

    Warns:
        Once a class of models, from forward: logits are made, and why. What the model does to them is not known here,
        its loss is another one, it or its head has hooks, the head has an adapter other than LoRA, or is alone sharded,
        not by FSDP2.
    """
    version = import_transformers().__version__
    if int(version.partition(".")[0]) < 5:
        raise ValueError(
            f"transformers is {version}: use_fused_loss computes the loss of transformers from 5.0 on, and "
            f"earlier ones have another for some models; update it, or call causal_lm_loss"
        )
    inside: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's wrapper calls the model inside
        inside = model.get_base_model()  # type: ignore[operator]
    output_head_path(inside)
    if _FUSED not in inside.__dict__:
        own = inside.__dict__.get("forward", type(inside).forward)  # accelerate may have put one there
        inside.__dict__[OWN_FORWARD] = getattr(own, "__func__", own)
        inside.__dict__["forward"] = MethodType(_fused_forward(inside.__dict__[OWN_FORWARD]), inside)
    losses = functools.partial(
        linear_cross_entropy,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        skip_ignored=skip_ignored,
        cache=cache,
        chunk_tokens=chunk_tokens,
    )
    read = Read(1.0, losses, vocab_parallel_cross_entropy, bits=bits, logit_dtype=logit_dtype)
    inside.__dict__[_FUSED] = _Fused(read, in_eval)
    return model


def _fused_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, a forward of transformers, with our loss where it can be; for any instance."""
    places = [name for name, p in inspect.signature(own).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        fused: _Fused = self.__dict__[_FUSED]
        given = kwargs | dict(zip(places, args, strict=False))
        wanted = any(given.get(name) is not None for name in ("labels", "shift_labels"))
        if not wanted or not (self.training or fused.in_eval) or len(args) > len(places):
            return own(self, *args, **kwargs)
        rule, reason = _rule_or_reason(self)
        if rule is None:
            say_that_logits_are_made(reason, fused.read)
            return own(self, *args, **kwargs)
        return _answer(self, own, rule, fused.read, given)

    return forward


def _rule_or_reason(model: Any) -> tuple[HeadRule | None, str]:
    """What `model` does to its logits; or None, and why its loss is left to it."""
    name = type(model).__name__.removeprefix("FSDP")
    loss = getattr(getattr(model, "loss_function", None), "__name__", "unknown")
    if loss != "ForCausalLMLoss":
        return None, f"the loss of {name} is {loss}, which is not known here"
    head = model.get_output_embeddings()
    by_itself = isinstance(getattr(head, "weight", None), DTensor) and not is_registered(model)
    if by_itself and not isinstance(head, FSDPModule):
        return None, f"the lm head of {name} is sharded by itself, and not by FSDP2"
    return rule_or_reason(model)


def _answer(model: Any, own: Callable[..., Any], rule: HeadRule, read: Read, given: dict[str, Any]) -> Any:
    """What `own` gives, with our loss and without logits."""
    ignore = given.get("ignore_index", -100)
    targets = given.get("shift_labels")
    if targets is None:
        targets = next_tokens(given["labels"], ignore_index=ignore)
    inputs = {name: x for name, x in given.items() if name not in _OF_THE_LOSS}
    asked = inputs.pop("return_dict", None)  # None, as PEFT passes it, is what the config says
    as_tuple = not (getattr(model.config, "return_dict", True) if asked is None else asked)
    text_alone = model.config.get_text_config() is model.config  # else ids may stand for images, and have no row
    rows, tokens = embedding(model), given.get("input_ids")
    looks = text_alone and rows.weight.dim() == 2 and not tells_of_token_ids(rows)
    if looks and isinstance(tokens, Tensor) and (unknown := token_id_fault(rows.weight.shape[0], tokens)) is not None:
        raise unknown
    head = _Catch()
    output = own(_with_head(model, output_head_path(model), head), **inputs, return_dict=True)
    targets = targets.to(head.hidden.device)
    assert read.hidden is not None
    read = read._replace(hidden=functools.partial(read.hidden, ignore_index=ignore))
    count = given.get("num_items_in_batch")
    if count is None:
        count = (targets != ignore).sum()

    def mean(hidden: Tensor) -> tuple[Tensor, ValueError | None]:
        (losses,), fault = read_hidden(model, rule, read, hidden, [targets])
        return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count), fault

    # FSDP2 may round what leaves the head, and its gradient: a mean's is 1.
    loss, fault = _called(model, mean)(head.hidden)
    if fault is not None:
        raise fault
    kept = {name: x for name, x in output.items() if name != "logits"}
    if kept.get("aux_loss") is not None:
        loss = loss + model.router_aux_loss_coef * kept["aux_loss"].to(loss.device)
    answer = type(output)(**kept | {"loss": loss})
    return answer.to_tuple() if as_tuple else answer


def _called(model: nn.Module, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`read`, as a call of the lm head where FSDP2 wraps that: its hooks gather the weight, and again in backward."""
    head = model.get_submodule(output_head_path(model))
    if not isinstance(head, FSDPModule):
        return read

    def call(hidden: Tensor) -> Any:
        own = vars(head).get("forward")
        head.__dict__["forward"] = read
        try:
            return head(hidden)
        finally:
            del head.__dict__["forward"]
            if own is not None:
                head.__dict__["forward"] = own

    return call


class _Catch(nn.Module):
    """In the place of an lm head: keeps the hidden states, and gives logits of one column."""

    hidden: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        return torch.zeros(*local.shape[:-1], 1, dtype=local.dtype, device=local.device)


def _with_head(model: nn.Module, path: str, head: nn.Module) -> Any:
    """`model` with another head at `path`; all else is shared, and `model` stays as it is."""
    stub = stub_of(model)
    first, _, rest = path.partition(".")
    stub._modules[first] = _with_head(model.get_submodule(first), rest, head) if rest else head
    return stub
