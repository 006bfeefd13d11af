"""The proof that a model's loss, or what is read of its logits, may be fused: its own forward on a few tokens, with its
head or with ours.

Both run the model's whole forward. What goes into the head is the same on both sides, and the head is a copy in fp32,
so that no rounding hides a difference.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from megatron_ext.dtensor.decoder import embedding
from megatron_ext.dtensor.output.promised_logits import HeadCall
from megatron_ext.dtensor.output.stand_ins import (
    HOOKS,
    SampleHead,
    class_of,
    is_registered,
    is_sharded,
    promising,
    whole_copy,
    with_decoder,
    with_head,
)
from megatron_ext.head.layer_facts import unwrapped
from megatron_ext.proof import (
    SAMPLE_TOKENS,
    Proof,
    ProofBasis,
    code_values,
    compare,
    config_values,
    module_parts,
    module_values,
)
from megatron_ext.proof.comparison import state_put_back

_OF_TOKENS = ("input_ids", "labels", "shift_labels")
_LEAST = 8  # tokens of a sample
_OWN_HOOKS = ("torch.distributed.", "transformers.integrations.", "megatron_ext.")
_OWN_OF_ALL = ("torch.", *_OWN_HOOKS)  # as those of torch's counter of operations


class _NoLoss(Exception):
    """A forward with labels that gives no loss."""


def not_fusable(model: Any, path: str, head: Any) -> str | None:
    """Return why the head at `path` cannot be computed from hidden states, if that is known without a comparison."""
    try:
        layer, _ = unwrapped(head)
    except ValueError as fault:
        return str(fault)
    parametrizations = getattr(layer, "parametrizations", None)
    if isinstance(parametrizations, nn.Module) and next(parametrizations.buffers(), None) is not None:
        return "its lm head has a parametrization with buffers, which may change at each read, as of a spectral norm"
    if not isinstance(getattr(layer, "weight", None), Tensor) or layer.weight.dim() != 2:
        return f"its lm head is a {type(layer).__name__} without a weight [V, D]"
    for module in head.modules():
        if "_hf_hook" in vars(module):
            return "accelerate has hooks on its lm head, as for a device_map, which move its input or its weight"
    if is_hooked(model, path, head=is_registered(model) or is_sharded(head)):
        return "it or its head has hooks, which may read its logits"
    if not layer.weight.is_floating_point():
        return f"its lm head holds {layer.weight.dtype}"
    if isinstance(layer.weight, DTensor) and not is_registered(model) and not isinstance(head, FSDPModule):
        return "its lm head is sharded by itself, and not by FSDP2"
    return None


def is_hooked(model: nn.Module, path: str, head: bool = True) -> bool:
    """Return whether hooks wait for a call of the model or of any module, for gradients of its head, or with `head` for
    a call of that or a layer inside of an adapter there; those of torch's and transformers' parallelism, and ours, do
    not count. `path`: of the head."""
    around, layers = [model, model.get_submodule(path.rpartition(".")[0])], list(model.get_submodule(path).modules())
    hooks: list[Any] = []
    of_all: list[Any] = []
    for kind in HOOKS:
        for module in around + (layers if head or kind in HOOKS[2:] else []):
            hooks += vars(module)[kind].values()
        of_all += getattr(torch_module, f"_global{kind}").values()
    for homes, some in ((_OWN_HOOKS, hooks), (_OWN_OF_ALL, of_all)):
        for hook in some:
            if not _module_of(hook).startswith(homes):
                return True
    return False


def _module_of(hook: Any) -> str:
    """Return the module that a hook's function is from, of a method or a partial too."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", ""))


def basis(model: nn.Module, own: Any, head: nn.Module, *others: Any) -> ProofBasis:
    """Return the basis of a proof of what `own`, the forward of `model`, or what leads to it, computes; and of what
    `others` say."""
    replica = getattr(model, "_is_replica", False)  # of nn.DataParallel, whose modules are new at each call
    modules: list[Any] = []
    for module in head.modules():
        modules.append(module_parts(module))
        if not replica:
            modules += (module_values(module), code_values(module.forward))
    return ProofBasis(
        own,
        class_of(model),
        getattr(model, "loss_function", None),
        (F.cross_entropy, F.linear),
        None if replica else head,
        modules,
        config_values(model.config),
        others,
    )


def own_loss(run: Callable[..., Any], sample: dict[str, Any]) -> Tensor | None:
    """The loss of a forward that is given labels."""
    output = run(**sample)
    return output[0] if isinstance(output, tuple) else getattr(output, "loss", None)


def losses_of_logits(run: Callable[..., Any], sample: dict[str, Any]) -> Tensor:
    """The cross entropy of each token of the logits of a forward: if two are equal, log-probabilities are."""
    labels = sample["labels"].flatten()
    logits = run(**{name: x for name, x in sample.items() if name != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, -2), labels, reduction="none")


@torch.inference_mode(False)
def prove(
    model: nn.Module,
    own: Callable[..., Any],
    path: str,
    given: dict[str, Any],
    call_of: Callable[[nn.Module, Tensor], HeadCall],
    loss_of: Callable[[Callable[..., Any], dict[str, Any]], Tensor | None],
    cp_ranks: int = 1,
) -> Proof:
    """Compare the loss that `own`, the forward of `model`, makes of a sample of what was `given`, with the fused one.

    `call_of(head, hidden)`: a call of a copy of the head at `path`, whose loss has no options of ours.
    `loss_of(run, sample)`: the loss of a run of the forward. Where ranks share the layers, or by `cp_ranks` the tokens,
    the decoder is not run on a sample, and hidden states are drawn: ranks may prove alone, and nothing is sent.
    """
    head = whole_copy(model.get_submodule(path))
    device = next(iter(head.parameters())).device
    sample = sample_of(model, given, next(iter(head.parameters())).shape[0])
    made_for_inference = {name: x.clone() for name, x in sample.items() if isinstance(x, Tensor) and x.is_inference()}
    sample |= made_for_inference
    if cp_ranks > 1 or _communicates(model):
        sample = {name: x for name, x in sample.items() if name in _OF_TOKENS or _is_plain(x)}
        shape = (1, sample["labels"].shape[-1], next(iter(head.parameters())).shape[1])
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
            with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                loss(first)
        except _NoLoss:
            return Proof.not_comparable("its forward gives no loss with labels")
        except Exception as error:  # a model's own code may raise anything
            said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            return Proof.not_comparable(f"on a sample it raised {said}")
        if first.seen is None:
            return Proof.not_comparable("its forward with labels does not call its lm head")
        calls: list[HeadCall] = []

        def fused(hidden: Tensor) -> Tensor:
            return loss(promising(head, lambda _: call_of(head, hidden), calls.append))

        hidden = first.seen.to(next(iter(head.parameters())).dtype)
        parameters = _by_rows(head)
        proof = compare(lambda hidden: loss(SampleHead(head, hidden)), fused, hidden, parameters)
    if proof.verdict == "not comparable":
        return proof
    if readers := [call.read_by for call in calls if call.read_by]:
        return Proof.refused(f"its forward reads its logits by {readers[0]}", proof.tokens)
    if not any(call.redeemed for call in calls):
        return Proof.refused("it is no cross entropy of the logits of its lm head", proof.tokens)
    return proof


def _communicates(model: nn.Module) -> bool:
    """Return whether layers of `model` send something when they run."""
    if is_registered(model) or any(isinstance(x, DTensor) for x in model.parameters()):
        return True
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def _by_rows(head: nn.Module) -> dict[str, Tensor]:
    """The parameters of a head, those with a row for each column of the logits first."""
    found = dict(head.named_parameters())
    return dict(sorted(found.items(), key=lambda item: (not item[0].endswith("weight"), item[0])))


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, (bool, int, float, str)) or (isinstance(x, Tensor) and x.dim() == 0)


def sample_of(model: nn.Module, given: dict[str, Any], columns: int) -> dict[str, Any]:
    """The arguments of a call on one row of at most 64 tokens: the first of a batch, with targets that count."""
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
        if not isinstance(x, Tensor) or x.dim() == 0:
            sample[name] = x
        elif x.shape[:2] == (rows, length) and x.dim() <= 3 and not short:
            sample[name] = x[:1, :count]
        elif x.dim() == 1 and x.shape[0] == rows and rows > 1:
            sample[name] = x[:1]
    if isinstance(ids, Tensor):
        several = ids.flatten().repeat(-(-count // ids.numel()))[: max(count, 1)].view(1, -1)
        known = embedding(model).weight.shape[0]
        sample["input_ids"] = (
            several.clamp(0, known - 1) if short or ids.dim() == 1 else ids[:1, :count].clamp(0, known - 1)
        )
        targets = sample["input_ids"].clamp(max=columns - 1).clone()
    else:
        targets = labels.flatten()[:count].view(1, -1).clamp(0, columns - 1).clone()
    targets[:, 1] = given.get("ignore_index", -100) if isinstance(given.get("ignore_index", -100), int) else -100
    for name in ("labels", "shift_labels"):
        if given.get(name) is not None:
            sample[name] = targets.to(given[name].dtype)
    return sample
