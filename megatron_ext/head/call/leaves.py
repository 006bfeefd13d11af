"""The parts of a vocabulary whose sums are added in one order whatever ranks hold them, and that order.

`bits="batch"`: what a rank holds is one part. `bits="tensor_parallel"`: eighths of the vocabulary, rounded up to whole
columns, so that 1, 2, 4 and 8 ranks hold some of the same ones. Sums of parts are added as the leaves of a binary tree
of neighbours: `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`, of which each rank has a branch. The tree is that of
"Deterministic Inference across Tensor Parallel Sizes" (TBIK, arXiv 2511.17826).

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import group_rank
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics.fixed_order import aligned, functions_fault
from megatron_ext.numerics.readable_values import has_values
from megatron_ext.numerics.tree_sums import in_tree

LEAVES = 8


class Leaf(NamedTuple):
    """One part: its rows of this rank's weight, which columns it is, and how wide its products are: as the others'."""

    rows: slice
    vocab: VocabShard
    width: int

    def cut(self, x_VD: Tensor) -> Tensor:
        """Return the leaf's rows of `x`, with rows of zeros if the vocabulary ends before the leaf."""
        x_VD = x_VD[self.rows]
        missing = self.width - x_VD.shape[0]
        return aligned(F.pad(x_VD, (*(0, 0) * (x_VD.dim() - 1), 0, missing)) if missing else x_VD)

    def columns(self, target_T: Tensor) -> Tensor:
        """The column of each label in this leaf, -1 where it is none of its own. `target_T`: in the shard."""
        own_T = (target_T >= self.rows.start) & (target_T < self.rows.stop)
        return (target_T - self.rows.start).where(own_T, -1)


def leaf_width(size: int) -> int:
    """Columns of an eighth of a vocabulary of `size`."""
    return -(-size // LEAVES)


def leaves_of(call: ResolvedHead) -> list[Leaf]:
    """The leaves of this rank's shard, in order; of a small vocabulary the last ones may hold nothing."""
    vocab = call.vocab
    if call.bits != "tensor_parallel":
        return [Leaf(slice(0, vocab.columns), vocab, vocab.columns)]
    width, found = leaf_width(vocab.size), []
    for at in range(leaf_count(call)):
        start = vocab.start + at * width
        rows = slice(min(start, vocab.stop) - vocab.start, min(start + width, vocab.stop) - vocab.start)
        found.append(Leaf(rows, VocabShard(start, start + width, vocab.size), width))
    return found


def leaf_count(call: ResolvedHead) -> int:
    """Count the leaves of a rank, whatever its shard is."""
    return LEAVES // call.ranks if call.bits == "tensor_parallel" else 1


def leaves_fault(vocab: VocabShard, ranks: int, rank: int) -> ValueError | None:
    """Return the fault of this rank's shard where leaves are eighths."""
    width = leaf_width(vocab.size)
    per_rank = width * LEAVES // ranks
    ends = vocab.stop == vocab.start + per_rank or (ranks == 1 and vocab.stop >= vocab.size)
    if vocab.start == rank * per_rank and ends:
        return None
    return ValueError(
        f'vocab is {vocab} on rank {rank} of {ranks}: with bits="tensor_parallel" each must hold {LEAVES // ranks} of '
        f"{LEAVES} parts of {width} columns, in rank order; pad the vocabulary of {vocab.size} to {LEAVES * width} "
        f"(Megatron's make_vocab_size_divisible_by={LEAVES // ranks}) and pass vocab=VocabShard(start, stop, "
        f"{vocab.size})"
    )


def added(x_RT: Tensor, call: ResolvedHead) -> Tensor:
    """The sum of all shards' numbers, in the tree's order where bits are fixed."""
    return in_tree(x_RT.unbind(0), torch.add) if call.fixed else x_RT.sum(0)


def of_shard(total: Tensor, weight: Tensor, fused: Tensor | None = None) -> Tensor:
    """The rows of `weight` in a gradient's sum over all leaves' columns, in the weight's dtype, or added to `fused`.

    The columns may be more than the weight has (the vocabulary ends in the last leaf) or fewer (padding, whose rows are
    0).
    """
    held = min(len(total), len(weight))
    if fused is not None:
        fused[:held] += total[:held]
        return fused
    if held == len(weight):
        return total[:held].to(weight.dtype)
    return F.pad(total, (*(0, 0) * (total.dim() - 1), 0, len(weight) - held)).to(weight.dtype)


def bits_fault(head: ResolvedHead, ranks: int, hidden: Tensor, readouts: Sequence[Any]) -> ValueError | None:
    """Return the fault of this rank's shard, or its processor, given bits that are not "fast"; what every rank sees
    is raised."""
    bits = head.bits
    if hidden.is_cuda and importlib.util.find_spec("triton") is None:
        raise ValueError(
            f'bits is "{bits}" and hidden is on {hidden.device}: on CUDA its products are Triton\'s, which is not '
            f'installed; install triton, or pass bits="fast"'
        )
    if not hidden.is_cuda and hidden.device.type not in ("cpu", "meta"):
        raise ValueError(f'bits is "{bits}" and hidden is on {hidden.device}: only CPUs and CUDA have it; pass "fast"')
    for readout in readouts:
        if readout.by_leaf is None and (readout.needs_logits or readout.rows):
            raise ValueError(
                f'bits is "{bits}" and {type(readout).__name__} is read, which does not say that its sums have one '
                f"order: set its attribute by_leaf, as ReadOut describes it; or pass "
                f'bits="fast", or turn off batch_invariant_mode or VLLM_BATCH_INVARIANT, where they ask for others'
            )
    fault = None
    if has_values(hidden) and not hidden.is_cuda:
        fault = functions_fault(torch.get_num_threads())
    if bits != "tensor_parallel":
        return fault
    if LEAVES % ranks:
        raise ValueError(f'bits is "tensor_parallel" over {ranks} ranks: it must be 1, 2, 4 or 8; use bits="batch"')
    return leaves_fault(head.vocab, ranks, group_rank(head.group)) or fault
