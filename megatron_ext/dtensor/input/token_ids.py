"""Token ids without a row in the embedding: the rank that is given one refuses it, and so do those that wait for it.

What is wrong travels as infinity, where the model communicates next: in the sum of a sharded embedding, and in the keys
and values that context-parallel ranks gather. There all of them raise.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import RowwiseParallel

from megatron_ext.numerics.tensors import fault_within, has_values

_REFUSAL = "_megatron_ext_refusal"
_TELLS = "_megatron_ext_tells_of_token_ids"
_TOLD = (
    "another rank of tp_group was given input_ids outside of the vocabulary (its own error says which): all ranks of "
    "tp_group must be given the same token ids; broadcast the batch over the group"
)


@dataclass
class Refusal:
    """Fault of a call's token ids, found by this rank or told by another; it is raised at a later exchange."""

    fault: ValueError | None = None


def token_id_fault(rows: int, tokens: Tensor) -> ValueError | None:
    """Return the fault of token ids that have none of the `rows` of an embedding; on CUDA the device stops then.

    torch's own sentence names neither the id nor the rule, and a sharded embedding makes zeros of such ids.
    """
    fix = ", a row of the model's embedding; use the tokenizer that belongs to the model, and a real token for padding"
    return fault_within("input_ids", tokens, rows, fix)


def tells_of_token_ids(embedding: nn.Module) -> bool:
    """Return whether `embedding` refuses token ids itself, on every rank that shares it."""
    return _TELLS in embedding.__dict__


def refuse_later(embedding: nn.Module, refusal: Refusal) -> None:
    """Let the next call of `embedding`, if it is sharded, bring `refusal` to all its ranks, and raise nothing."""
    if tells_of_token_ids(embedding):
        embedding.__dict__[_REFUSAL] = refusal


class EmbeddingRows(RowwiseParallel):
    """An embedding whose rows are sharded; token ids outside of it are a ValueError on every rank that shares it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank = device_mesh.get_local_rank()
        current: list[tuple[Refusal, bool, Any]] = []

        def look(module: Any, args: tuple) -> tuple | None:
            later = module.__dict__.pop(_REFUSAL, None)
            weight = module.weight
            refusal = Refusal(token_id_fault(weight.shape[0], args[0])) if later is None else later
            current[:] = [(refusal, later is not None, weight)]
            if refusal.fault is None:
                return None
            module._parameters["weight"] = nn.Parameter(torch.full_like(weight, torch.inf), requires_grad=False)
            first = min(rank * -(-weight.shape[0] // device_mesh.size()), weight.shape[0] - 1)  # a row of this rank
            return (torch.full_like(args[0], first), *args[1:])

        def hear(module: Any, args: tuple, output: Tensor) -> None:
            ((refusal, later, weight),) = current
            current.clear()
            module._parameters["weight"] = weight
            if refusal.fault is None and _is_infinite(output):
                refusal.fault = ValueError(_TOLD)
            if refusal.fault is not None and not later:
                raise refusal.fault

        module.register_forward_pre_hook(look)
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(hear)
        module.__dict__[_TELLS] = True
        return module


def _is_infinite(output: Tensor) -> bool:
    """Return whether some rank sent infinity for every number of every token; not looked at on CUDA, where none
    does."""
    if output.is_cuda or not has_values(output) or not output.numel():
        return False
    return bool((output.detach().flatten(0, -2)[0] == torch.inf).all())
