"""`ResolvedHead`: a head in one call, with its group and shard found, which sums over rows are wanted, and what `bits`
selects: the arithmetic, and the leaves of the vocabulary, whose sums are added in one order whatever ranks hold them.

`bits="batch"`: what a rank holds is one leaf. `bits="tensor_parallel"`: eighths of the vocabulary, rounded up to whole
columns, so that 1, 2, 4 and 8 ranks hold some of the same ones. Sums of leaves are added as those of a binary tree of
neighbours: `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`, of which each rank has a branch. The tree is that of
"Deterministic Inference across Tensor Parallel Sizes" (TBIK, arXiv 2511.17826).

`FAST` is `matmul.py`, a library's products, whose order of additions follows from their shapes. `FIXED` is
`numerics/fixed_order.py`: every sum has one order, which no other token, chunk or kept column changes, and is one of a
leaf's columns alone.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard, or of a leaf or a block of it. G_TV: a
gradient matrix, or what stands for one.
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
    """The part of a head that every pass, exchange and gradient of one call takes; no tensors of the caller's.

    `LmHead.resolved` and `Logits.resolved` make it. On all ranks of `group` they are equal, `vocab` and `chosen` aside.

    Attributes:
        group: the ranks that share the vocabulary; None: not sharded.
        vocab: this rank's columns.
        softcap, temperature, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap) / temperature`;
            softcap None: no cap.
        chunk_tokens: tokens per chunk; None: chosen from the sizes.
        cache: fraction (0 to 1) of the columns whose exponentials are kept for backward; from 1024 on: bytes; "bounded"
            or "auto": see `chunk_sizes.cached_columns`.
        fuse_main_grad: the weight gradient is added into `weight.main_grad`.
        largest: what logits reach that a softcap bounds, over the temperature where that makes them smaller; None:
            no softcap.
        bits: "fast", "batch" or "tensor_parallel": which other numbers a token's bits may depend on, see `LmHead`.
        mean, expected, hits: which sums the pass over rows takes beside the softmax's own: of the logits, of the
            logits times their probabilities, and whether the label has the largest logit.
        rounds: logits are rounded to the hidden states' 16 bits before anything else is done with them.
        chosen: int64, rising: the columns of this rank whose logits are made; None: all.
        leaf: which of this rank's leaves `vocab` is; None: it is all of this rank's columns.
        in_slices: each rank has its slice of dim 0 of the hidden states.
        guessed: the caller gave no `vocab`, and equal shards are assumed.
        fused_epilogue: products take exponentials of their logits, which are not written.
        sm_margin: multiprocessors that they leave free.
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
        """Count the columns, from the first one on, of the logits that are made and count."""
        return self.vocab.counted if self.chosen is None else self.chosen.shape[0]

    def place(self, columns: Tensor) -> Tensor:
        """Return the places of `columns` of this rank's shard among the logits that are made."""
        return columns if self.chosen is None else torch.searchsorted(self.chosen, columns)

    def without_scale(self) -> "ResolvedHead":
        """This head, its scale in softcap and temperature: `c tanh(s z / c) = s (c / s) tanh(z / (c / s))`."""
        softcap = None if self.softcap is None else self.softcap / self.logit_scale
        temperature = self.temperature / self.logit_scale
        return replace(self, softcap=softcap, temperature=temperature, logit_scale=1.0)

    def without_bends(self) -> "ResolvedHead":
        """Return this head for logits that have passed scale and softcap already."""
        return replace(self, softcap=None, logit_scale=1.0)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()


LEAVES = 8


class Leaf(NamedTuple):
    """One part of this rank's vocabulary shard, whose products are as wide as the others'.

    Attributes:
        rows: of the rank's own weight.
        vocab: which columns they are.
        w_VD: the weight as products take it, in the hidden states' dtype, with rows of zeros where the vocabulary ends
            before the leaf does; as it is in a pass of the linear head, as are all that follow.
        bias_V: in the dtype of the passes.
        target_T: the column of each label in the leaf, -1 where it has none.
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
        """The column of each label in this leaf, -1 where it is none of its own. `target_T`: in the shard."""
        own_T = (target_T >= self.rows.start) & (target_T < self.rows.stop)
        return (target_T - self.rows.start).where(own_T, -1)

    def counted_columns(self, softcap: float | None, like: Tensor) -> Tensor:
        """1 for each column that counts, else 0, `[V]`: below the true vocabulary size, its bias not -inf."""
        counted_V = torch.arange(self.w_VD.shape[0], device=like.device) < self.vocab.counted
        if self.bias_V is not None and softcap is None:
            counted_V &= self.bias_V > -torch.inf
        return counted_V.to(like.dtype)


def leaf_width(size: int) -> int:
    """Columns of an eighth of a vocabulary of `size`."""
    return -(-size // LEAVES)


def leaves_of(call: ResolvedHead) -> list[Leaf]:
    """The leaves of this rank's shard, in order; of a small vocabulary the last ones may hold nothing."""
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


class Arithmetic(Protocol):
    """The products and sums of one call; those of gradients are in fp32 (fp64 for fp64).

    Attributes:
        CPU_ROWS: rows of dW that `transposed` makes at a time on a CPU.
    """

    CPU_ROWS: int

    def logits(self, x_TD: Tensor, w_VD: Any, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
        """`x @ W.T`, see `matmul.logits`; `w`: an `Operand`, with fixed bits in one."""

    def add_product(self, total_TD: Tensor | None, g_TV: Tensor, w_VD: Any) -> Tensor:
        """`total + G @ W`, in place; a new tensor without a total."""

    def transposed(self, g_TV: Tensor, x_TD: Tensor) -> Tensor:
        """`G.T @ x` on a CPU."""

    def write_transposed(self, out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
        """`out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""

    def add_transposed(self, total_VD: Tensor, g_TV: Tensor, x_TD: Tensor) -> None:
        """`total += G.T @ x`; the total is a sum over chunks of tokens."""

    def add_column_sums(self, total_V: Tensor, g_TV: Tensor) -> None:
        """`total += G.sum(0)`; the total is a sum over chunks of tokens."""

    def column_sums(self, g_TV: Tensor, factor_T: Tensor) -> Tensor:
        """`(factor * G).sum(0)` of a gradient matrix."""

    def weighed_sum(self, x_TD: Tensor, factor_T: Tensor) -> Tensor:
        """`(factor * x).sum(0)` of hidden states."""


FAST: Arithmetic = matmul
FIXED: Arithmetic = fixed_order
