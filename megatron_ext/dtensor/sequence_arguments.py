"""Arguments about the sequences in a model's call, checked and made into one `SequenceLayout` and positions.

A token id without a row in the embedding is an error on the rank that is given it, and on the ranks that wait for this
rank. The fault travels as infinity in the model's next collective: in the sum over a sharded embedding, and in the keys
and values that context-parallel ranks gather. After the collective every rank raises.

Suffixes: B batch, S tokens of this rank, K tokens of the whole sequence (W * S).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import RowwiseParallel

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.numerics.tensors import fault_within, has_values
from megatron_ext.sequence.attention import Packing
from megatron_ext.sequence.context_parallel_parts import SequenceParts

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


def token_id_fault(embedding: nn.Module, tokens: Tensor) -> ValueError | None:
    """Return the fault of token ids without a row in an embedding (on CUDA they stop the device), or None. Embeddings
    that are not a plain table are not checked.

    torch's own error names neither the id nor the rule, and a sharded embedding gives zeros for such ids.
    """
    fix = ", a row of the model's embedding; use the tokenizer that belongs to the model, and a real token for padding"
    table = getattr(embedding, "weight", None)
    return None if table is None or table.dim() != 2 else fault_within("input_ids", tokens, table.shape[0], fix)


def tells_of_token_ids(embedding: nn.Module) -> bool:
    """Return whether `embedding` refuses token ids itself, on every rank that shares it."""
    return _TELLS in embedding.__dict__


def refuse_later(embedding: nn.Module, refusal: Refusal) -> None:
    """Let the next call of `embedding`, if it is sharded, send `refusal` to all its ranks without raising it."""
    if tells_of_token_ids(embedding):
        embedding.__dict__[_REFUSAL] = refusal


class EmbeddingRows(RowwiseParallel):
    """Style of an embedding with sharded rows; token ids without a row raise ValueError on every rank of the mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank = device_mesh.get_local_rank()
        current: list[tuple[Refusal, bool, Any]] = []

        def look(module: Any, args: tuple) -> tuple | None:
            later = module.__dict__.pop(_REFUSAL, None)
            weight = module.weight
            refusal = Refusal(token_id_fault(module, args[0])) if later is None else later
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
    """Return whether a rank sent infinity for every number of the first token, as for all others; never on CUDA, where
    no rank does."""
    if output.is_cuda or not has_values(output) or not output.numel():
        return False
    return bool((output.detach().flatten(0, -2)[0] == torch.inf).all())


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of a call's sequences, for the attention function.

    Attributes:
        cp_group: the ranks that share each sequence, in the zigzag layout.
        packing: documents that do not see each other; the rows of the batch then count as one sequence, end to end.
        hidden_BK: bool `[B, K]`, keys that no query sees; None: only causality, windows and `packing` hide keys.
        refusal: the fault of this rank's token ids, which the first exchange over `cp_group` reports.
    """

    cp_group: Group = None
    packing: Packing | None = None
    hidden_BK: Tensor | None = None
    refusal: Refusal = field(default_factory=Refusal)


_REFUSED = {
    "past_key_values": "keys and values of tokens that were seen before; generate with an inference engine",
    "pixel_values": "images: the text tower alone runs here",
}
_UNLESS_WHOLE = {
    "labels": "labels: logits are split over ranks; call megatron_ext.dtensor.causal_lm_loss",
    "logits_to_keep": "logits_to_keep, counted along a sequence that is split over ranks; pick from the result",
}


@dataclass(frozen=True)
class SequenceArguments:
    """The hook before a model's forward: arguments about sequences in, a `SequenceLayout` and `position_ids` out.

    Attributes:
        cp_group: the ranks that share each sequence.
        slices: the ranks over which sequence parallelism shards the tokens of one rank of `cp_group`.
        logits_in_shards: whether tensor parallelism shards the vocabulary.
    """

    cp_group: Group
    slices: int
    logits_in_shards: bool

    def __call__(self, args: tuple, kwargs: Mapping[str, Any], refusal: Refusal) -> tuple[tuple, dict]:
        if len(args) > 1:
            raise ValueError(f"{len(args)} positional arguments: only input_ids may be one; pass the others by name")
        kwargs = dict(kwargs)
        self._refuse(kwargs)
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
            if tokens is not None and self.slices > 1:
                raise ValueError("inputs_embeds with sequence parallelism: these would be slices; pass input_ids")
        if tokens is None:
            raise ValueError("input_ids is None: pass token ids [batch, tokens], or inputs_embeds")
        batch, length = tokens.shape[:2]
        if length % self.slices:
            raise ValueError(
                f"input_ids have {length} tokens: sequence parallelism needs a multiple of its {self.slices} "
                f"ranks; pad to {-(-length // self.slices) * self.slices}"
            )
        mask = kwargs.pop("attention_mask", None)
        hidden_BK = None if mask is None else self._hidden_keys(mask, batch, length)
        cu_seqlens = kwargs.pop("cu_seqlens", None)
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        positions = kwargs.get("position_ids")
        packing = None
        if cu_seqlens is not None:
            if hidden_BK is not None or batch != 1:
                raise ValueError(
                    f"cu_seqlens with a batch of {batch} and attention_mask={type(mask).__name__}: packed documents "
                    f"lie in one row, and padding is a document of its own; pass input_ids [1, tokens] alone"
                )
            packing = Packing.of(cu_seqlens.detach())  # a new tensor object, as a collective may refill the given one
        expected = self._positions(length, cu_seqlens, tokens.device)
        if positions is None:
            positions = expected
        elif cu_seqlens is None and mask is None:
            packing = self._packing_of(positions, expected, batch)
        layout = SequenceLayout(self.cp_group, packing, hidden_BK, refusal)
        kwargs.update(position_ids=positions, use_cache=False, sequence_layout=layout)
        return args, kwargs

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        refused = dict(_REFUSED)
        if self.logits_in_shards or group_size(self.cp_group) > 1:
            refused.update(_UNLESS_WHOLE)
        for name, reason in refused.items():
            value = kwargs.get(name)
            if value is not None and not (isinstance(value, int) and value == 0):
                raise ValueError(f"{name} is given, but this model does not take {reason}")
        if kwargs.get("use_cache"):
            raise ValueError("use_cache is True, but this model keeps no keys and values; leave it out")
        types_BS = kwargs.pop("token_type_ids", None)
        if types_BS is not None and types_BS.any():
            raise ValueError("token_type_ids mark images, which attend in both directions; the text tower runs alone")

    def _hidden_keys(self, mask: Tensor, batch: int, length: int) -> Tensor | None:
        keys = length * group_size(self.cp_group)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, keys):
            found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask is {found}: it must be [batch, tokens of the whole sequence] = {[batch, keys]}, 0 "
                f"where a token is padding; for documents pass cu_seqlens"
            )
        kept = mask.bool()
        # Causality hides padding at the end of rows from all tokens already.
        return None if bool((kept[:, 1:] <= kept[:, :-1]).all()) else ~kept

    def _positions(self, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
        """Return `[1, S]`, the positions of this rank's tokens in their documents."""
        whole = torch.arange(length * group_size(self.cp_group), device=device)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(device)
            whole = whole - cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), whole, right=True)]
        return SequenceParts(self.cp_group, cu_seqlens).split(whole[None], 1)

    def _packing_of(self, positions: Tensor, expected: Tensor, batch: int) -> Packing | None:
        """Return the documents by `positions`, a new one wherever they do not go up by one; None: each row is one."""
        if group_size(self.cp_group) == 1:
            lengths = _document_lengths(positions)
            if len(lengths) == positions.shape[0]:
                return None
            return Packing(lengths * (batch // positions.shape[0]), lengths * (batch // positions.shape[0]))
        if positions.shape[-1] != expected.shape[-1] or not (positions == expected).all():
            raise ValueError(
                "position_ids are not those of this rank's part of whole sequences in the zigzag layout; for packed "
                "documents pass cu_seqlens, else leave position_ids out"
            )
        return None


def _document_lengths(positions: Tensor) -> tuple[int, ...]:
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff() != 1
    starts = begins.flatten().nonzero().flatten().tolist()
    return tuple(b - a for a, b in zip(starts, [*starts[1:], positions.numel()], strict=True))
