"""The proof that a model's loss, or a read-out of its logits, may be fused: its own forward on a few tokens, with its
head and with ours.

Both sides run the model's whole forward. Both heads get the same hidden states, and the model's head is a copy in fp32,
so that rounding hides no difference.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor.decoder import embedding
from megatron_ext.dtensor.output.reads import PLAIN, HeadCall
from megatron_ext.dtensor.output.stand_ins import HeadLike, is_registered, is_sharded, promising, stub_of, with_head
from megatron_ext.dtensor.sequence_arguments import SequenceLayout
from megatron_ext.proof import SAMPLE_TOKENS, Proof, compare, error_words
from megatron_ext.proof.comparison import rng_put_back, state_put_back
from megatron_ext.proof.values import HOOKS

_OF_TOKENS = ("input_ids", "labels", "shift_labels")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LEAST = 8  # the least number of tokens of a sample


class _NoLoss(Exception):
    """Fault of a forward with labels that returns no loss."""


def own_loss(run: Callable[..., Any], sample: dict[str, Any]) -> Tensor | None:
    """Return the loss of a forward with labels; None if it returns none."""
    output = run(**sample)
    return output[0] if isinstance(output, tuple) else getattr(output, "loss", None)


def losses_of_logits(run: Callable[..., Any], sample: dict[str, Any]) -> Tensor:
    """Compute each token's cross entropy from the logits of a forward: if it agrees, so do log-probabilities."""
    labels = sample["labels"].flatten()
    logits = run(**{name: x for name, x in sample.items() if name != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, -2), labels, reduction="none")


@torch.inference_mode(False)
def prove(
    model: nn.Module,
    own: Callable[..., Any],
    path: str,
    given: dict[str, Any],
    loss_of: Callable[[Callable[..., Any], dict[str, Any]], Tensor | None],
    cp_ranks: int = 1,
) -> Proof:
    """Compare the loss of `own`, the forward of `model`, with the fused one, on a sample of the arguments `given`.

    `path`: the name of the head. `loss_of(run, sample)`: returns the loss of a run of the forward. If ranks share the
    layers, or (`cp_ranks` > 1) the tokens, hidden states are drawn, and the decoder does not run: so nothing is sent,
    and a rank may prove alone.
    """
    head = whole_copy(model.get_submodule(path))
    weight = next(head.parameters(), None)
    if weight is None:
        return Proof.not_comparable("its lm head has no parameter of its own")
    device, sample = weight.device, sample_of(model, given, weight.shape[0])
    sample |= {name: x.clone() for name, x in sample.items() if isinstance(x, Tensor) and x.is_inference()}
    if cp_ranks > 1 or _communicates(model):
        sample = {name: x for name, x in sample.items() if name in _OF_TOKENS or _is_plain(x)}
        shape = (1, sample["labels"].shape[-1], weight.shape[1])
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        try:
            model = with_decoder(model, path, drawn)
        except ValueError as fault:
            return Proof.not_comparable(str(fault))
    ambient = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def loss(at_head: nn.Module) -> Tensor:
        with torch.autocast(device.type, ambient[1], enabled=ambient[0]):
            found = loss_of(lambda **sample: own(with_head(model, path, at_head), **sample), sample)
        if not isinstance(found, Tensor):
            raise _NoLoss
        return found

    with torch.autocast(device.type, enabled=False), state_put_back(model):
        first = SampleHead(head)
        try:
            with torch.no_grad(), rng_put_back(device):
                loss(first)
        except _NoLoss:
            return Proof.not_comparable("its forward gives no loss with labels")
        except Exception as error:  # a model's own code may raise anything
            return Proof.not_comparable(f"on a sample it raised {error_words(error)}")
        if first.seen is None:
            return Proof.not_comparable("its forward with labels does not call its lm head")
        calls: list[HeadCall] = []

        def fused(hidden: Tensor) -> Tensor:
            return loss(promising(head, lambda _: HeadCall(head, PLAIN, hidden, {}, is_copy=True), calls.append))

        hidden = first.seen.to(weight.dtype)
        # Weights, which have a row for each column of the logits, come first.
        parameters = dict(sorted(head.named_parameters(), key=lambda item: (not item[0].endswith("weight"), item[0])))
        try:
            proof = compare(lambda hidden: loss(SampleHead(head, hidden)), fused, hidden, parameters)
        except Exception as error:  # the forward cannot take promises, as inside of torch.compile or a checkpoint
            return Proof.refused(f"without its logits it raised {error_words(error)}")
    if proof.verdict == "not comparable":
        return proof
    if readers := [call.read_by for call in calls if call.read_by]:
        return Proof.refused(f"its forward reads its logits by {readers[0]}", proof.tokens)
    if not any(call.redeemed for call in calls):
        return Proof.refused("it is no cross entropy of the logits of its lm head", proof.tokens)
    return proof


def _communicates(model: nn.Module) -> bool:
    """Return whether layers of `model` communicate when they run."""
    if is_registered(model) or any(isinstance(x, DTensor) for x in model.parameters()):
        return True
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, (bool, int, float, str)) or (isinstance(x, Tensor) and x.dim() == 0)


def sample_of(model: nn.Module, given: dict[str, Any], columns: int) -> dict[str, Any]:
    """Return arguments for one row of at most 64 tokens, the first of the batch, with targets that count."""
    ids = given.get("input_ids")
    labels = next(given[name] for name in ("labels", "shift_labels") if given.get(name) is not None)
    like = next((x for x in (ids, given.get("inputs_embeds")) if isinstance(x, Tensor)), labels)
    rows, length = (like.shape[0], like.shape[1]) if like.dim() > 1 else (1, like.shape[0])
    count = min(length, SAMPLE_TOKENS)
    short = count < _LEAST and isinstance(ids, Tensor)
    if short:
        count = 2 * _LEAST
    sample: dict[str, Any] = {}
    for name, x in given.items():
        if isinstance(x, SequenceLayout):
            continue  # the layout of the whole batch; the decoder's hook makes one for the sample
        if not isinstance(x, Tensor) or x.dim() == 0:
            sample[name] = x
        elif x.shape[:2] == (rows, length) and x.dim() <= 3 and not short:
            sample[name] = x[:1, :count]
        elif x.dim() == 1 and x.shape[0] == rows and rows > 1:
            sample[name] = x[:1]
    if isinstance(ids, Tensor):
        tokens = ids.reshape(-1, *ids.shape[2:])
        several = torch.cat([tokens] * -(-count // len(tokens)))[: max(count, 1)].unsqueeze(0)
        table = getattr(embedding(model), "weight", None)
        sample["input_ids"] = several.clamp(0, None if table is None else table.shape[0] - 1)
        targets = sample["input_ids"].clamp(max=columns - 1).clone()
    else:
        targets = labels.flatten()[:count].view(1, -1).clamp(0, columns - 1).clone()
    targets[:, 1:2] = given.get("ignore_index", -100) if isinstance(given.get("ignore_index", -100), int) else -100
    for name in ("labels", "shift_labels"):
        if given.get(name) is not None:
            sample[name] = targets.to(given[name].dtype)
    return sample


class SampleHead(HeadLike):
    """Stand-in for an lm head that returns the logits of `hidden`, whatever hidden states it is called with.

    If `hidden` is None, it returns the logits of the hidden states of the call, and keeps these as `seen`.
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
            return self.head(hidden, *args, **kwargs)


class SampleDecoder(nn.Module):
    """Stand-in for a decoder whose layers are shared by ranks: it returns given hidden states `[B, S, D]` alone.

    The stand-in has the decoder's attributes; modules read from it are stand-ins too.
    """

    def __init__(self, decoder: nn.Module, hidden: Tensor):
        super().__init__()
        self.__dict__["decoder_itself"], self.hidden = decoder, hidden  # not registered as a child module

    def forward(self, *args: Any, **kwargs: Any) -> "_DecoderOutput":
        return _DecoderOutput(self.hidden, self._router_logits())

    def _router_logits(self) -> tuple[Tensor, ...] | None:
        """Return router logits of one layer if the decoder is a mixture: a forward may compute a loss from them."""
        config = getattr(self, "config", None)
        counts = (getattr(config and config.get_text_config(), name, None) for name in _EXPERTS)
        experts = next((count for count in counts if isinstance(count, int)), None)
        return None if experts is None else (self.hidden.new_zeros(self.hidden[..., 0].numel(), experts),)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["decoder_itself"], name)
        return SampleDecoder(found, self.hidden) if isinstance(found, nn.Module) else found


class _DecoderOutput:
    """Output with hidden states under the name and index by which forwards read them; all other fields are None."""

    def __init__(self, hidden: Tensor, router_logits: tuple[Tensor, ...] | None):
        self.last_hidden_state, self.router_logits = hidden, router_logits

    def __getitem__(self, i: int) -> Tensor:
        return (self.last_hidden_state,)[i]

    def __getattr__(self, name: str) -> None:
        return None


def with_decoder(model: nn.Module, head_path: str, hidden: Tensor) -> Any:
    """Return `model` with a decoder that returns `hidden`, in place of the decoder beside the lm head at `head_path`,
    or beside a module around the head. Raises ValueError if there is no decoder."""
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
    """Return `head` with whole parameters of its own, in fp32 at least, and without the hooks that shard them.

    Parameters that ranks share are not gathered but drawn, the same on all ranks: any weights serve the proof.
    """
    copy = stub_of(head)
    if is_sharded(head):
        copy.__dict__.pop("forward", None)
        copy.__dict__.update({name: type(vars(head)[name])() for name in HOOKS})
    # Replicas of nn.DataParallel hold their parameters as plain attributes.
    own = head._parameters | {name: x for name, x in vars(head).items() if isinstance(x, Tensor)}
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
        # A parameter that is wide already is shared: nothing writes to it, and no gradient goes to its `.grad`.
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    return nn.Parameter(whole, requires_grad=False)


def _drawn(parameter: DTensor) -> Tensor:
    """Draw a tensor of the whole shape of `parameter`, so that logits are of about 1."""
    device = parameter.device_mesh.device_type  # FSDP2 may keep it on the host
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(parameter.shape, generator=generator, device=device).mul_(scale)
