"""`ResolvedHead`: a head in one call, with its group, its shard, the sums over rows that are wanted, and what `bits`
selects: the arithmetic, and the leaves of the vocabulary, whose sums are added in one order on any number of ranks.

`bits="batch"`: a rank's shard is one leaf. `bits="tensor_parallel"`: leaves are eighths of the vocabulary, rounded up
to whole columns, so that each of 1, 2, 4 or 8 ranks holds some of them. Sums of leaves are added in a binary tree of
neighbours: `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`, of which each rank has a branch. The tree is that of
"Deterministic Inference across Tensor Parallel Sizes" (TBIK, arXiv 2511.17826).

`FAST` is `matmul.py`, a library's products, whose order of additions follows from their shapes. `FIXED` is
`numerics/fixed_order.py`: every sum is of a leaf's columns alone, in one order, which no other token, chunk or kept
column changes.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard, or of a leaf or a block of it. G_TV: the
gradient matrix, or the exponentials in its place.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard, group_rank
from megatron_ext.head.call import matmul
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.fixed_order import aligned, functions_fault
from megatron_ext.numerics.tensors import has_values

Bits = Literal["fast", "batch", "tensor_parallel"]
Cache = float | Literal["bounded", "auto"]


@dataclass(frozen=True)
class ResolvedHead:
    """The part of a head that every pass, exchange and gradient of one call takes; it has none of the caller's tensors.

    `LmHead.resolved` and `Logits.resolved` make it. It is equal on all ranks of `group`, but for `vocab` and `chosen`.

    Attributes:
        group: the ranks that share the vocabulary; None: not sharded.
        vocab: this rank's columns.
        softcap, temperature, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap) / temperature`;
            softcap None: logits are not capped.
        chunk_tokens: tokens per chunk; None: chosen from the sizes.
        cache: fraction (0 to 1) of the columns whose exponentials are kept for backward; from 1024 on: bytes; "bounded"
            or "auto": see `chunk_sizes.cached_columns`.
        fuse_main_grad: the weight gradient is added into `weight.main_grad`.
        largest: near this number logits are saturated by the softcap, `softcap / max(temperature, 1)`; None: no
            softcap.
        bits: "fast", "batch" or "tensor_parallel": which other numbers a token's bits may depend on, see `LmHead`.
        mean, expected, hits: what the pass over rows computes beside the softmax's own sums: the sum of logits, the sum
            of logits times exponentials, and whether the label has the largest logit.
        rounds: logits are rounded to the hidden states' 16-bit dtype before all else.
        chosen: int64, rising: the columns of this rank whose logits are made; None: all.
        leaf: index among this rank's leaves of the leaf that `vocab` is; None: `vocab` is all of this rank's columns.
        in_slices: each rank has its slice of dim 0 of the hidden states.
        guessed: the caller gave no `vocab`, and equal shards are assumed.
        fused_epilogue: the products' kernels take exponentials of logits, and logits are not written.
        sm_margin: number of multiprocessors that these kernels leave free.
    """

    group: Group
    vocab: VocabShard
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None
    cache: Cache = "bounded"
    fuse_main_grad: bool = False
    mean: bool = False
    expected: bool = False
    hits: bool = False
    logit_scale: float = 1.0
    largest: float | None = None
    bits: Bits = "fast"
    rounds: bool = False
    chosen: Tensor | None = None
    leaf: int | None = None
    in_slices: bool = False
    guessed: bool = False
    fused_epilogue: bool = False
    sm_margin: int = 0

    @property
    def fixed(self) -> bool:
        """Return whether every sum has one order, which other tokens do not change."""
        return self.bits != "fast"

    @property
    def counted(self) -> int:
        """Count the leading columns that count, among the logits that are made."""
        return self.vocab.counted if self.chosen is None else self.chosen.shape[0]

    def place(self, columns: Tensor) -> Tensor:
        """Return the indices of `columns` of this rank's shard among the logits that are made."""
        return columns if self.chosen is None else torch.searchsorted(self.chosen, columns)

    def without_scale(self) -> "ResolvedHead":
        """Move the scale into softcap and temperature: `c tanh(s z / c) = s (c / s) tanh(z / (c / s))`."""
        softcap = None if self.softcap is None else self.softcap / self.logit_scale
        temperature = self.temperature / self.logit_scale
        return replace(self, softcap=softcap, temperature=temperature, logit_scale=1.0)

    def without_bends(self) -> "ResolvedHead":
        """Return this head for logits that have passed scale and softcap already."""
        return replace(self, softcap=None, logit_scale=1.0)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()


LEAVES = 8


class Leaf(NamedTuple):
    """One part of this rank's vocabulary shard; the products of all leaves have the same width.

    Attributes:
        rows: the leaf's rows of the rank's own weight.
        vocab: the leaf's columns.
        w_VD: the leaf's weight in the hidden states' dtype, with rows of zeros if the vocabulary ends before the leaf.
            This attribute and those below are set in a pass of the linear head only.
        bias_V: the leaf's bias, in the dtype of the passes.
        target_T: the column of each label in the leaf, -1 if another leaf has the label.
    """

    rows: slice
    vocab: VocabShard
    w_VD: Any = None
    bias_V: Tensor | None = None
    target_T: Any = None

    def cut(self, x_VD: Tensor) -> Tensor:
        """Return the leaf's rows of `x`, with rows of zeros if the vocabulary ends before the leaf."""
        x_VD = x_VD[self.rows]
        missing = self.vocab.columns - x_VD.shape[0]
        return aligned(F.pad(x_VD, (*(0, 0) * (x_VD.dim() - 1), 0, missing)) if missing else x_VD)

    def columns(self, target_T: Tensor) -> Tensor:
        """Return the column of each label in this leaf, -1 if another leaf has it. `target_T`: columns of the shard."""
        own_T = (target_T >= self.rows.start) & (target_T < self.rows.stop)
        return (target_T - self.rows.start).where(own_T, -1)

    def counted_columns(self, softcap: float | None, like: Tensor) -> Tensor:
        """Return 1 for each column that counts, else 0: `[V]`, in the dtype of `like`. A column counts below the true
        vocabulary size, unless its bias is -inf without a softcap."""
        counted_V = torch.arange(self.w_VD.shape[0], device=like.device) < self.vocab.counted
        if self.bias_V is not None and softcap is None:
            counted_V &= self.bias_V > -torch.inf
        return counted_V.to(like.dtype)


def leaf_width(size: int) -> int:
    """Return the columns of an eighth of a vocabulary of `size` ids."""
    return -(-size // LEAVES)


def leaves_of(call: ResolvedHead) -> list[Leaf]:
    """Return the leaves of this rank's shard, in order; with a small vocabulary the last may be empty."""
    vocab = call.vocab
    if call.bits != "tensor_parallel":
        return [Leaf(slice(0, vocab.columns), vocab)]
    width, found = leaf_width(vocab.size), []
    for at in range(leaf_count(call)):
        start = vocab.start + at * width
        rows = slice(min(start, vocab.stop) - vocab.start, min(start + width, vocab.stop) - vocab.start)
        found.append(Leaf(rows, VocabShard(start, start + width, vocab.size)))
    return found


def leaf_count(call: ResolvedHead) -> int:
    """Return the number of leaves of each rank."""
    return LEAVES // call.ranks if call.bits == "tensor_parallel" else 1


def leaves_fault(vocab: VocabShard, ranks: int, rank: int) -> ValueError | None:
    """Return the fault of a shard that is not a rank's part of the eighths."""
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


def of_shard(total: Tensor, weight: Tensor, fused: Tensor | None = None) -> Tensor:
    """Return the rows of `total`, the gradient of all leaves' columns, that `weight` has, in the weight's dtype; or add
    them to `fused`.

    `total` may have more rows than the weight (the vocabulary ends before the last leaf) or fewer (padding, with 0).
    """
    held = min(len(total), len(weight))
    if fused is not None:
        fused[:held] += total[:held]
        return fused
    if held == len(weight):
        return total[:held].to(weight.dtype)
    return F.pad(total, (*(0, 0) * (total.dim() - 1), 0, len(weight) - held)).to(weight.dtype)


def bits_fault(head: ResolvedHead, ranks: int, hidden: Tensor, readouts: Sequence[Any]) -> ValueError | None:
    """Return the fault of this rank's shard or processor with bits other than "fast"; raise a fault that every rank
    sees."""
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


class Arithmetic(Protocol):
    """The products and sums of one call; those of gradients are in fp32 (fp64 for fp64).

    Attributes:
        CPU_ROWS: rows of dW that `transposed` makes at a time on a CPU.
    """

    CPU_ROWS: int

    def logits(self, x_TD: Tensor, w_VD: Any, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
        """Return `x @ W.T`, see `matmul.logits`; `w`: an `Operand`, with fixed bits a single tensor."""

    def add_product(self, total_TD: Tensor | None, g_TV: Tensor, w_VD: Any) -> Tensor:
        """Return `total + G @ W`, in place, or in a new tensor without a total."""

    def transposed(self, g_TV: Tensor, x_TD: Tensor) -> Tensor:
        """Return `G.T @ x` on a CPU."""

    def write_transposed(self, out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
        """Write `out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""

    def add_transposed(self, total_VD: Tensor, g_TV: Tensor, x_TD: Tensor) -> None:
        """Add `G.T @ x` to `total`, a sum over chunks of tokens."""

    def add_column_sums(self, total_V: Tensor, g_TV: Tensor) -> None:
        """Add `G.sum(0)` to `total`, a sum over chunks of tokens."""

    def column_sums(self, g_TV: Tensor, factor_T: Tensor) -> Tensor:
        """Return `(factor * G).sum(0)` of a gradient matrix."""

    def weighed_sum(self, x_TD: Tensor, factor_T: Tensor) -> Tensor:
        """Return `(factor * x).sum(0)` of hidden states."""


FAST: Arithmetic = matmul
FIXED: Arithmetic = fixed_order
