"""Checks of the head's arguments. What every rank can see wrong is a ValueError before anything is communicated.

Faults that only one rank may see (its weight shard, its slice of the sequence) come back as an exception object: with
several ranks the caller announces them in the exchange that the call makes anyway, and every rank raises after it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.call.matmul import is_quantised
from megatron_ext.numerics.matrices import accumulation_dtype
from megatron_ext.numerics.readable_values import OutsideVocabulary, check_plain, check_within

_PLAIN = (Tensor, torch.nn.Parameter)  # of which nothing else has to be asked, after `hidden`
_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NO_SIZE = 1 << 40  # no vocabulary has it


def check_floating(argument: str, x: Tensor, dims: int | None = None) -> None:
    check_plain(argument, x)
    if not isinstance(x, Tensor) or x.dtype not in _FLOATING:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        packed = getattr(x, "quant_state", None) or getattr(x, "CB", None)  # bitsandbytes' weights
        fix = "cast it" if packed is None else "dequantise it, by bitsandbytes.functional, and pass that"
        if not isinstance(x, Tensor):
            fix = "pass its .weight, and its .bias as bias" if isinstance(x, torch.nn.Module) else "make one of it"
        raise ValueError(f"{argument} is {kind}: it must be a tensor of float32, bfloat16, float16 or float64; {fix}")
    if x.dim() == 0 or (dims is not None and x.dim() != dims):
        wanted = "at least 1" if dims is None else str(dims)
        raise ValueError(f"{argument} has shape {tuple(x.shape)}: it must have {wanted} dims; reshape it")


def check_integers(argument: str, ids: Any) -> None:
    check_plain(argument, ids)
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{argument} is {kind}: it must be a tensor of integer token ids; cast it with .long()")


def check_counts(counts: Any, leading: torch.Size) -> None:
    if not isinstance(counts, Tensor) or counts.dtype != torch.bool or counts.shape != leading:
        found = f"{counts.dtype} {tuple(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(
            f"counts is {found}: it must be a bool tensor {tuple(leading)}, which tokens count; compare labels with "
            f"ignore_index"
        )


class SizeFault(ValueError):
    """A number that does not fit the size of the vocabulary."""


def check_labels(labels: Tensor, ignore_index: int, size: int) -> bool:
    """Raises ValueError unless `labels` are integers in `[0, size)` or `ignore_index`; see `check_within`.

    Returns whether all were seen to count.
    """
    check_integers("labels", labels)
    fix = f" or ignore_index ({ignore_index}); mark tokens that do not count with ignore_index"
    return check_within("labels", labels, size, fix, spared=ignore_index) and not 0 <= ignore_index < size


def size_fault(vocab: VocabShard | None, check: Callable[..., object], *arguments: Any, group: Group) -> Any:
    """The fault that `check(*arguments)` finds and this rank alone may see; the rest is raised.

    Those are ids outside of the vocabulary, which the others may not have been given, and a `SizeFault` where the
    caller gave no `vocab`: then the size is a guess from this rank's columns, and at unequal shards another rank's
    guess is larger. Where a group may have been forgotten, it says so.
    """
    try:
        check(*arguments)
    except OutsideVocabulary as fault:
        return ValueError(f"{fault}{forgotten_group(group, vocab)}")
    except SizeFault as fault:
        found = ValueError(f"{fault}{forgotten_group(group, vocab)}")
        if vocab is not None:
            raise found from None
        return found
    return None


def forgotten_group(group: Group, vocab: VocabShard | None) -> str:
    """The end of a sentence about a size, where a group or the widths of shards may have been forgotten."""
    if group is not None:
        if vocab is not None or group_size(group) == 1:
            return ""
        return (
            f". vocab is None, so that the vocabulary was taken for {group_size(group)} shards as wide as this rank's: "
            f"if their widths differ, pass vocab=VocabShard(start, stop, size) on each rank"
        )
    if not dist.is_available():
        return ""
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if started == 1:
        return ""
    first = "" if dist.is_initialized() else "call torch.distributed.init_process_group first, and "
    return (
        f". tp_group is None, and {started} ranks run: if what was passed is one rank's shard of the vocabulary, "
        f"{first}pass the group that shares it"
    )


def or_refuse(
    compute: Callable[[], Any], shape: tuple[int, ...], like: Tensor, refusal: type[ValueError] = ValueError
) -> tuple[Any, ValueError | None]:
    """Return what `compute` does, and None; or zeros of its `shape` and dtype, made of `like`'s, and what it refused.

    The head tells the ranks of the tensor-parallel group what one of them refuses. Those of the context-parallel group
    are told in the exchange of the results, which takes both: `SequenceParts.gather_or_refuse`.
    """
    try:
        return compute(), None
    except refusal as fault:
        return torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device), fault


def check_same_shape(argument: str, x: Tensor, labels: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{argument} is {type(x).__name__}: it must be a tensor of the labels' shape, {tuple(labels.shape)}; make "
            f"it by torch.tensor"
        )
    if x.shape != labels.shape:
        raise ValueError(
            f"{argument} has shape {tuple(x.shape)}, labels {tuple(labels.shape)}: they must be equal; pass one "
            "number per token"
        )
    if x.device != labels.device:
        raise ValueError(f"{argument} is on {x.device}, labels on {labels.device}: move them to one device")


def check_vocab(vocab: Any) -> None:
    """Raises ValueError unless it is a `VocabShard`."""
    if not isinstance(vocab, VocabShard):
        raise ValueError(
            f"vocab is {vocab!r}: it must be a VocabShard(start, stop, size) or None; "
            f"VocabShard.equal(columns, group, size) makes the one of a padded vocabulary of `size` ids"
        )


def check_marks(weight: Any, alone: bool) -> None:
    """Raises ValueError for a weight that says that it is cut otherwise than the head takes it.

    Generalized tensor parallelism cuts a shard once more. `alone`: no group was given; where several ranks run, a
    weight that is marked as a shard of rows, as Megatron-Core's layers and ours mark theirs, is not the whole.
    """
    if getattr(weight, "is_distributed_weight", False):
        raise ValueError(
            f"weight is a piece {tuple(weight.shape)} of this rank's shard, cut over {weight.gtp_remat_size} ranks by "
            "generalized tensor parallelism: it must be the shard [V/R, D]; set the size of generalized tensor "
            "parallelism to 1, or use the layer's logits"
        )
    if not alone or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if getattr(weight, "tensor_model_parallel", False) and getattr(weight, "partition_dim", -1) == 0:
        raise ValueError(
            f"tp_group is None, {dist.get_world_size()} ranks run, and weight is marked as one rank's shard of the "
            "vocabulary (tensor_model_parallel, partition_dim 0): pass the group that shares it, such as "
            "layer.tp_group, or use LmHead.of(layer); if the weight is whole, pass a group of this rank alone"
        )


def shard_fault(vocab: VocabShard, columns: int, argument: str, ranks: int) -> ValueError | None:
    """Compare the shard's width with the tensor's, and a shard of one rank with the whole vocabulary."""
    if ranks == 1 and vocab.counted != vocab.size:
        return ValueError(
            f"vocab is {vocab}, a part of the vocabulary, on one rank: it must be the whole; pass the tp_group whose "
            f"ranks hold the rest"
        )
    if vocab.columns == columns:
        return None
    return ValueError(
        f"vocab is {vocab} with {vocab.columns} columns, {argument} has {columns}: they must be equal; "
        f"pass the VocabShard of this rank's own columns, or this rank's shard of {argument}"
    )


def computed_dtype(hidden: Tensor, weight: Any) -> torch.dtype:
    """The dtype to compute in: autocast's where it is on, else fp32 with a weight of fp32, else the hidden states'."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return hidden.dtype if hidden.dtype == torch.float64 else torch.get_autocast_dtype(kind)
    wide = hidden.itemsize == 2 and isinstance(weight, Tensor) and weight.dtype == torch.float32
    return torch.float32 if wide and not is_quantised(weight) else hidden.dtype


def linear_fault(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocab: VocabShard | None,
    ranks: int,
    whose: str = "",
) -> ValueError | None:
    """Return the fault of this rank's weight or bias, seen from hidden states; `whose` begins their names."""
    its_hidden, its_weight, its_bias = whose + "hidden", whose + "weight", whose + "bias"
    casts = torch.is_autocast_enabled(hidden.device.type)
    plain = type(weight) in _PLAIN and weight.dtype in _FLOATING and weight.dim() == 2
    quantised = not plain and is_quantised(weight)
    if quantised and (weight.dim() != 2 or weight.requires_grad):
        return ValueError(
            f"{its_weight} is a quantised {type(weight).__name__} of shape {tuple(weight.shape)}, requires_grad "
            f"{weight.requires_grad}: it must be [V/R, D] and frozen; call weight.requires_grad_(False), or pass "
            f"weight.dequantize()"
        )
    try:
        if not plain and not quantised:
            check_floating(its_weight, weight, 2)
        if bias is not None:
            check_floating(its_bias, bias, 1)
    except ValueError as fault:
        return fault
    if weight.shape[1] != hidden.shape[-1]:
        return ValueError(
            f"{its_weight} has shape {tuple(weight.shape)}, {its_hidden} {tuple(hidden.shape)}: their last dims must "
            f"be equal; {its_weight} is this rank's [V/R, D]"
        )
    for name, x in ((its_weight, weight), (its_bias, bias)):
        if x is not None and x.device != hidden.device:
            return ValueError(f"{name} is on {x.device}, {its_hidden} on {hidden.device}: move them to one device")
        made = casts or (x is weight and quantised)  # of the dtype to compute in, when it is needed
        if x is None or made or x.dtype == hidden.dtype == weight.dtype:
            continue
        if x.dtype != computed_dtype(hidden, weight):
            return ValueError(
                f"{name} is {x.dtype}, {its_hidden} {hidden.dtype}: they must be equal, or weight and bias "
                f"float32 beside hidden states of 16 bits; cast one, or autocast"
            )
    if bias is not None and bias.shape[0] != weight.shape[0]:
        return ValueError(
            f"{its_bias} has shape {tuple(bias.shape)}, {its_weight} {tuple(weight.shape)}: bias must have one entry "
            f"per row of weight; pass this rank's shard of it"
        )
    return None if vocab is None else shard_fault(vocab, weight.shape[0], its_weight, ranks)


def main_grad_fault(weight: Tensor) -> ValueError | None:
    if not weight.requires_grad or hasattr(weight, "get_main_grad"):
        return None
    try:
        main_grad.buffer_of(weight)
    except ValueError as fault:
        return fault
    return None


def check_tokens_of(argument: str, x: Tensor, name: str, logits: Tensor) -> None:
    if x.shape != logits.shape[:-1] or x.device != logits.device:
        raise ValueError(
            f"{argument} has leading dims {tuple(x.shape)} on {x.device}, {name} {tuple(logits.shape[:-1])} on "
            f"{logits.device}: they must be equal, a row of logits for each token, on the same device; reshape one of "
            f"them"
        )


def layout_fault(hidden: Tensor, labels: Tensor, in_slices: bool, ranks: int, argument: str) -> ValueError | None:
    """Compare `hidden` with `labels`: as a whole, or as this rank's equal slice of dim 0.

    Only a slice can be wrong on one rank alone; what all ranks see is raised.
    """
    if hidden.device != labels.device:
        raise ValueError(f"{argument} is on {labels.device}, hidden on {hidden.device}: move them to one device")
    if not in_slices:
        if hidden.shape[:-1] != labels.shape:
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}, {argument} {tuple(labels.shape)}, and hidden_layout is "
                f'"replicated": hidden must have that shape and D; {_fix_of_layout(hidden, labels, ranks, argument)}'
            )
        return None
    if labels.dim() == 0 or labels.shape[0] % ranks:
        raise ValueError(
            f'{argument} has shape {tuple(labels.shape)}: with hidden_layout="sequence" its dim 0, the full sequence, '
            f"must divide by the {ranks} ranks of tp_group; pad the sequence"
        )
    wanted = (labels.shape[0] // ranks, *labels.shape[1:])
    if tuple(hidden.shape[:-1]) == wanted:
        return None
    return ValueError(
        f"hidden has shape {tuple(hidden.shape)}, {argument} {tuple(labels.shape)} over {ranks} ranks: with "
        f'hidden_layout="sequence" hidden must be [{", ".join(map(str, wanted))}, D], this rank\'s slice of dim 0, and '
        f'{argument} the full sequence; use hidden_layout="replicated" if hidden is full'
    )


def _fix_of_layout(hidden: Tensor, labels: Tensor, ranks: int, argument: str) -> str:
    """The likely reason why whole hidden states do not fit the labels, as what to do."""
    leading, wanted = tuple(hidden.shape[:-1]), tuple(labels.shape)
    if ranks == 1 and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        group = "tp_group= and "
    else:
        group = ""
    if ranks > 1 and leading[1:] == wanted[1:] and leading and leading[0] * ranks == wanted[0]:
        return (
            f"it is a slice of dim 0, one of {ranks}, as under sequence parallelism: pass "
            f'{group}hidden_layout="sequence", or gather hidden'
        )
    if len(wanted) > 1 and leading == (wanted[1], wanted[0], *wanted[2:]):
        return "the sequence and batch dims are swapped: transpose one of them"
    return f"pass the hidden states and {argument} of the same tokens"
