"""The decision whether a call reads hidden states, its basis, and how ranks that share a vocabulary take it together.

These ranks agree by one exchange at the first call. Later calls send nothing for it: a rank that sees a changed model
puts a word among the head's options, which the head compares over the ranks in the exchange that it makes anyway. If
all ranks see a change, they prove anew; if only some do, every rank raises. Data- and context-parallel ranks decide by
themselves: a proof sends nothing, and the head sends the same with and without logits.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.dtensor.attention import sequence_hook
from megatron_ext.dtensor.output.reads import Read, read_hidden
from megatron_ext.dtensor.output.stand_ins import class_of, is_registered, is_sharded
from megatron_ext.head.call import statistics
from megatron_ext.head.call.statistics import OptionsDiffer
from megatron_ext.head.layer_facts import unwrapped
from megatron_ext.proof import (
    Proof,
    ProofBasis,
    ProofMode,
    Proofs,
    code_values,
    config_values,
    module_parts,
    module_values,
    words_of_change,
)
from megatron_ext.proof.values import HOOKS

_CHANGED = (
    "the lm head, the loss, a value that their code reads, or an argument of this {} has changed since its "
    "tensor-parallel ranks decided to fuse it, and they cannot decide anew: {}. Change it on every rank alike (also "
    "counters that the loss function keeps), and give every rank the same arguments"
)
_OWN_HOOKS = ("torch.distributed.", "transformers.integrations.", "megatron_ext.")
_OWN_OF_ALL = ("torch.", *_OWN_HOOKS)  # for global hooks, such as those of torch's counter of operations


class ToldFault(ValueError):
    """Fault that ends, on every rank, a call of the head by which ranks tell each other of a change."""


Decision = tuple[Proof, Callable[[], Proof] | None]
"""The proof that holds for a call; and, if this rank sees a change, a function that makes a new proof, to be called
when all ranks have told that they see one."""


def decide(
    proofs: Proofs,
    owner: Any,
    basis: ProofBasis,
    prove: Callable[[], Proof],
    mode: ProofMode,
    group: Group,
    others: Iterable[Any] = (),
) -> Decision:
    """Decide about a call by `proofs`. `owner` owns the proof of this kind of calls; `others` own those of other kinds.

    Communicates: over several ranks of `group`, which share the head's vocabulary, an all-gather of a small object at
    the first call.
    """

    def made() -> Proof:
        return proofs.of(owner, basis, prove, mode, group)

    if group_size(group) > 1:
        known = [proof for each in (owner, *others) if (proof := proofs.made(each)) is not None]
        if known and (proofs.made(owner) is None or proofs.has_changed(owner, basis)):
            return known[0], made
    return made(), None


def tell_of_change(model: Any, head: Any, read: Read, hidden: Tensor, given: Sequence[Tensor]) -> None:
    """Have the head tell the other ranks that this rank sees a changed model; raises `ToldFault` unless all ranks do.

    `given`: the labels, and the other inputs of `read` for each position.
    """
    with telling_of_change():
        _tell(model, head, read, hidden.detach(), given)


def tell_of_unread_head(model: Any, head: Any, read: Read, given: Sequence[Tensor]) -> None:
    """Tell ranks that have called the head, and wait for this rank in it, that this rank's forward did not call it.

    Raises `ToldFault`, unless no rank has called the head.
    """
    hook, weight = sequence_hook(model), unwrapped(head)[0].weight
    rows, positions = given[0].shape[:2]
    slices = 1 if hook is None else hook.slices
    hidden = torch.zeros(rows, positions // slices, weight.shape[1], dtype=weight.dtype, device=given[0].device)
    with statistics.agreeing_on("the lm head was not called"):
        _tell(model, head, read, hidden, given)


@torch.no_grad()
def _tell(model: Any, head: Any, read: Read, hidden: Tensor, given: Sequence[Tensor]) -> None:
    fault = read_hidden(head, {}, read, hidden, given)[1]
    if fault is not None:
        raise ToldFault(*told(model, fault).args) from fault


def telling_of_change() -> AbstractContextManager[None]:
    """Return a context in which a call of the head tells the other ranks that this rank sees a changed model."""
    return statistics.agreeing_on(words_of_change(dist.get_rank()))


def told(model: Any, fault: ValueError) -> ValueError:
    """Return the error for a fault of a call that tells of a change; it explains a change that only some ranks see."""
    if not isinstance(fault, OptionsDiffer):
        return fault
    return ValueError(_CHANGED.format(type(model).__name__.removeprefix("FSDP"), fault))


def not_fusable(model: Any, path: str, head: Any, gathered_later: bool = False) -> str | None:
    """Return why the head at `path` cannot be computed from hidden states; None if a comparison must tell.

    `gathered_later`: the model's forward does not run now, and FSDP2 may gather a sharded head when it does.
    """
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
    if is_hooked(model, path, head=is_registered(model) or (is_sharded(head) and not gathered_later)):
        return "it or its head has hooks, which may read its logits"
    if not layer.weight.is_floating_point():
        return f"its lm head holds {layer.weight.dtype}"
    gathered = gathered_later or is_registered(model) or isinstance(head, FSDPModule)
    if isinstance(layer.weight, DTensor) and not gathered:
        return "its lm head is sharded by itself, and not by FSDP2"
    return None


def is_hooked(model: nn.Module, path: str, head: bool = True) -> bool:
    """Return whether hooks would run at a call of the model, of the module around its head, or of any module, or for
    gradients of the head; with `head` also at a call of the head or of layers inside of its adapter. Hooks of torch's
    and transformers' parallelism, and ours, do not count. `path`: the name of the head."""
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
    """Return the name of the module that defines a hook's function, also inside of methods and partials."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", ""))


def basis(model: nn.Module, own: Any, head: nn.Module, *others: Any) -> ProofBasis:
    """Return the objects and values on which a proof rests: `own` (the forward of `model`, or the model's parts), loss,
    head, config, and `others`."""
    replica = getattr(model, "_is_replica", False)  # a replica of nn.DataParallel, with new modules at each call
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
