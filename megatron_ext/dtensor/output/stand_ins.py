"""A model with another lm head, as an object of its own: the head gives a promise, or the logits of a sample.

The model's own forward runs on it, and nothing of the model is changed, so that threads do not meet.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor.output.promised_logits import DeferredLogits, HeadCall
from megatron_ext.proof import why_fusion_is_off

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


REGISTERED = "_megatron_ext_head"  # where a model that `parallelize` made has its reading from hidden states
VOCABULARY = "_megatron_ext_vocabulary_group"  # and the ranks that share its head's vocabulary, if any do
KEEPS_LOGITS = "_megatron_ext_keeps_logits"  # where a model says why its logits are made, if a user wants them


class FusedForward:
    """A class of models whose forward `use_fused_loss` has replaced: see `fused_classes.py`."""


def class_of(module: nn.Module) -> type:
    """The class of `module` without those that FSDP2 and `use_fused_loss` put on top of it."""
    # A class that FSDP2 made cannot be copied, nor does a stand-in want its methods.
    for kind in type(module).__mro__:
        if not issubclass(kind, (FSDPModule, FusedForward)):
            return kind
    raise AssertionError("every class derives from object")


def stub_of(module: nn.Module) -> Any:
    """`module` as an object of its own, with a dict of its modules of its own; all else is shared."""
    stub: Any = object.__new__(class_of(module))
    stub.__dict__.update(module.__dict__, _modules=dict(module._modules))
    return stub


def with_head(model: nn.Module, path: str, head: nn.Module) -> Any:
    """`model` with another head at `path`; all else is shared, and `model` stays as it is."""
    stub = stub_of(model)
    first, _, rest = path.partition(".")
    stub._modules[first] = with_head(model.get_submodule(first), rest, head) if rest else head
    return stub


@contextmanager
def standing_in(model: nn.Module, path: str, head: nn.Module) -> Iterator[Any]:
    """`model` with another head for one run of its forward, which leaves the attributes that it sets on the model."""
    stub = with_head(model, path, head)
    around, before = path, []
    while around:  # the modules that the one at `path` is inside of
        around = around.rpartition(".")[0]
        copy = stub.get_submodule(around)
        before.append((model.get_submodule(around), copy, dict(vars(copy))))
    try:
        yield stub
    finally:
        for own, copy, old in before:
            for name, x in vars(copy).items():
                if old.get(name, own) is not x:
                    vars(own)[name] = x
            for name in old:
                if name not in vars(copy):
                    vars(own).pop(name, None)


def is_registered(model: nn.Module) -> bool:
    """Return whether `parallelize` made `model`: its head is sharded by vocabulary, or whole in its forward."""
    return REGISTERED in model.__dict__


def why_logits_are_made(model: nn.Module) -> str | None:
    """The reason that is known without a call, by a user's choice or the environment; None if there is none."""
    return why_fusion_is_off() or model.__dict__.get(KEEPS_LOGITS)


def is_sharded(head: nn.Module) -> bool:
    """Return whether FSDP2 gathers the head by itself, or ranks share its vocabulary: its hooks are those of
    parallelism."""
    return isinstance(head, FSDPModule) or any(isinstance(x, DTensor) for x in head.parameters())


def promising(head: Any, call_of: Callable[[Tensor], HeadCall], keep: Callable[[HeadCall], None]) -> nn.Module:
    """`head`, with its hooks, which gives promises instead of logits; `keep` is told of each call."""

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> DeferredLogits:
        call = call_of(hidden)
        keep(call)
        return call.promise()

    stub: Any = _HeadLike(head) if is_sharded(head) else stub_of(head)
    stub.__dict__["forward"] = forward
    return stub


class _HeadLike(nn.Module):
    """A module in the place of `head`, which has its attributes."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("head"), name)


class SampleHead(_HeadLike):
    """In the place of an lm head: makes logits of given hidden states by another head, whatever it is called with.

    Without any given it makes those of what it is called with, and keeps that.
    """

    def __init__(self, head: nn.Module, hidden: Tensor | None = None):
        super().__init__(head)
        self.given, self.seen = hidden, hidden

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.given is None:
            self.seen = hidden.detach()
            weight = next(self.head.parameters())
            hidden = hidden.to(weight.dtype)
        else:
            hidden = self.given
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden)


class SampleDecoder(nn.Module):
    """In the place of a decoder whose ranks share its layers: gives hidden states `[B, S, D]` and nothing else.

    It has the decoder's attributes; so does each module inside of it.
    """

    def __init__(self, decoder: nn.Module, hidden: Tensor):
        super().__init__()
        self.__dict__["decoder_itself"], self.hidden = decoder, hidden  # no module of this one: nothing goes there

    def forward(self, *args: Any, **kwargs: Any) -> "_DecoderOutput":
        return _DecoderOutput(self.hidden, self._router_logits())

    def _router_logits(self) -> tuple[Tensor, ...] | None:
        """Router logits of one layer, where the decoder is a mixture: of them a forward may make an auxiliary loss."""
        config = getattr(self, "config", None)
        counts = (getattr(config and config.get_text_config(), name, None) for name in _EXPERTS)
        experts = next((count for count in counts if isinstance(count, int)), None)
        return None if experts is None else (self.hidden.new_zeros(self.hidden[..., 0].numel(), experts),)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["decoder_itself"], name)
        return SampleDecoder(found, self.hidden) if isinstance(found, nn.Module) else found


class _DecoderOutput:
    """Hidden states under the name and the place where forwards look for them; everything else is None."""

    def __init__(self, hidden: Tensor, router_logits: tuple[Tensor, ...] | None):
        self.last_hidden_state, self.router_logits = hidden, router_logits

    def __getitem__(self, i: int) -> Tensor:
        return (self.last_hidden_state,)[i]

    def __getattr__(self, name: str) -> None:
        return None


def with_decoder(model: nn.Module, head_path: str, hidden: Tensor) -> Any:
    """`model` with a decoder that gives `hidden`: the one beside the lm head at `head_path`, or beside what is around.

    Raises ValueError if there is none.
    """
    around = head_path
    while around:
        around = around.rpartition(".")[0]
        inside: Any = model.get_submodule(around)
        for name in (getattr(inside, "base_model_prefix", ""), "model", "transformer", "backbone", "decoder"):
            path = f"{around}.{name}".removeprefix(".")
            if name in inside._modules and not f"{head_path}.".startswith(f"{path}."):
                return with_head(model, path, SampleDecoder(model.get_submodule(path), hidden))
    raise ValueError("no decoder is found beside its lm head")


def whole_copy(head: Any) -> Any:
    """`head` with parameters of its own, whole and in fp32 at least, on which nothing hooks that shards them.

    What ranks share is not gathered, but drawn, on all of them alike: what a head computes is proved on any weights.
    """
    copy = stub_of(head)
    if is_sharded(head):
        copy.__dict__.pop("forward", None)
        copy.__dict__.update({name: type(vars(head)[name])() for name in HOOKS})
    own = head._parameters | {name: x for name, x in vars(head).items() if isinstance(x, Tensor)}  # of replicas
    for name in own:
        copy.__dict__.pop(name, None)
    copy.__dict__["_parameters"] = {name: _wide(x) for name, x in own.items()}
    copy.__dict__["_modules"] = {name: x if x is None else whole_copy(x) for name, x in head._modules.items()}
    return copy


def _wide(parameter: Tensor | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    whole = _drawn(parameter) if isinstance(parameter, DTensor) else parameter
    if whole.is_floating_point():
        whole = whole.detach().to(torch.promote_types(whole.dtype, torch.float32))
        # What is wide already is shared: nothing writes to it, and its gradient goes to no `.grad`.
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    return nn.Parameter(whole, requires_grad=False)


def _drawn(parameter: DTensor) -> Tensor:
    """A tensor of the whole shape of `parameter`, with logits of about 1."""
    device = parameter.device_mesh.device_type  # FSDP2 may keep it on the host
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(parameter.shape, generator=generator, device=device).mul_(scale)
