"""Attention over whole, packed and context-parallel sequences, as calls of `F.scaled_dot_product_attention`.

Every case is split into runs of consecutive queries, until a run needs no mask, or only "causal", which flash kernels
have built in:

    packed sequence   -> documents            (no query sees a key of another document)
    context parallel  -> two chunks           (queries at r and 2W-1-r; keys and values of all ranks gathered)
    sliding window    -> blocks of queries    (each with the few keys that it can see, and a small mask)

Only a mask that the caller gives is dense, and it is split in the same way. Keys and values are gathered, as in Llama 3
(Llama Team, 2024, section 3.3.2), and not passed round a ring: grouped keys are small, and any mask works.

Suffixes: S queries of this rank, T keys of this rank, K keys of the whole sequence, B batch, H query heads, G key heads
(H a multiple of G), D channels of a head (values may have another number). The sequence is the first dim, as in
Megatron.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from megatron_ext.distributed.groups import Group, group_rank, group_size
from megatron_ext.sequence.host_values import HostMemo
from megatron_ext.sequence.zigzag import REFUSED, demand, gather_parts, merge_zigzag

P = ParamSpec("P")


@dataclass(frozen=True)
class Window:
    """Window of the keys that a query at position p sees: from p - left to p + right; None: no limit on that side."""

    left: int | None = None
    right: int | None = None

    def visible(self, first: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return, as bool `[queries, keys]`, which keys the queries at positions `first`, `first` + 1, ... see."""
        query = torch.arange(first, first + queries, device=device)[:, None]
        key = torch.arange(keys, device=device)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if self.left is not None:
            seen &= key >= query - self.left
        if self.right is not None:
            seen &= key <= query + self.right
        return seen


# The active torch function modes that replace SDPA by attention over all ranks.
replacing_sdpa: list[TorchFunctionMode] = []

EVERYTHING = Window()
CAUSAL = Window(right=0)

_as_tuple = HostMemo(lambda cu_seqlens: tuple(cu_seqlens.tolist()))


@dataclass(frozen=True)
class Packing:
    """Documents laid end to end along a sequence, over all context-parallel ranks.

    Attributes:
        lengths: the number of tokens of each document.
        places: the number of tokens and padding of each document; under context parallelism a multiple of 2W.
    """

    lengths: tuple[int, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.places) or any(
            not 0 <= n <= place for n, place in zip(self.lengths, self.places, strict=True)
        ):
            raise ValueError(
                f"documents of {list(self.lengths)} tokens take {list(self.places)} places: lengths must not be "
                f"negative, nor longer than their places; cu_seqlens must never fall, and cu_seqlens_padded must have "
                f"as many entries and at least the same lengths"
            )

    @classmethod
    def of(cls, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> "Packing":
        """Make a packing from cumulative lengths, integers `[documents + 1]` that begin with 0.

        The first reading of a tensor on a GPU is a host synchronisation.
        """
        lengths = _document_lengths(cu_seqlens, "cu_seqlens")
        if cu_seqlens_padded is None:
            return cls(lengths, lengths)
        return cls(lengths, _document_lengths(cu_seqlens_padded, "cu_seqlens_padded"))


def _told_to_modes(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate attention over all ranks, so that a mode that replaces SDPA leaves the function's own calls alone."""

    @functools.wraps(function)
    def told(*args: P.args, **options: P.kwargs) -> Tensor:
        given = (*args, *options.values())
        if replacing_sdpa and has_torch_function(given):
            return handle_torch_function(told, given, *args, **options)
        return function(*args, **options)

    return told


@_told_to_modes
def attend(
    q_SBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    window: Window = EVERYTHING,
    *,
    mask: Tensor | None = None,
    q_packing: Packing | None = None,
    kv_packing: Packing | None = None,
    cp_group: Group = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    fault: ValueError | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T) v over the keys that each query sees. Differentiable in q, k and v.

    If there are more keys than queries (decoding with a cache), the last query is at the position of the last key.

    Args:
        q_SBHD: `[S, B, H, D]` queries; under context parallelism this rank's, in the zigzag layout.
        k_TBGD, v_TBGD: `[T, B, G, D]` keys and values, in the same layout. H is a multiple of G.
        window: the keys that a query sees by its position.
        mask: bool, broadcastable to `[B, H, S, K]`, True where a query must *not* look; queries in this rank's order,
            keys in the order of the whole sequence. It hides keys beside those outside of `window`. None: no more.
        q_packing, kv_packing: documents of a packed sequence, B = 1; both or neither.
        cp_group: the ranks that share a sequence; None: this rank has whole sequences.
        scale: factor of the scores; None: 1 / sqrt(D).
        dropout: probability with which the softmax's entries are dropped, drawn from the current generator.
        softcap: scores become `softcap * tanh(scores / softcap)`. No kernel has it, so whole score matrices are made.
        sinks: `[H]`, for each head the score of one more key that all queries see, and whose value is 0 (attention
            sinks, OpenAI's GPT-OSS). Not together with `softcap`.
        fault: a fault that this rank alone has found; the other ranks of `cp_group` learn of it in the all-gather.

    Returns:
        `[S, B, H, D]` (D of the values). Zeros for padding, and for a query that sees no key.

    Communicates: with a `cp_group` of several ranks, one all-gather of keys and values together; backward one
    reduce-scatter.

    Raises:
        ValueError: shapes that do not fit each other; a mask that is not bool, does not fit or comes with packing;
            lengths that the zigzag layout cannot split; on every rank of `cp_group`, the `fault` of one (on CUDA, on
            that rank alone).
    """
    ranks, rank = (1, 0) if cp_group is None else (group_size(cp_group), group_rank(cp_group))
    _check_shapes(q_SBHD, k_TBGD, v_TBGD)
    q_places = _places_on_one_rank(q_packing, q_SBHD, ranks, "query")
    kv_places = _places_on_one_rank(kv_packing, k_TBGD, ranks, "key")
    if len(q_places) != len(kv_places):
        raise ValueError(
            f"queries are packed from {len(q_places)} documents and keys from {len(kv_places)}: document i of the "
            f"queries sees document i of the keys; pass q_packing and kv_packing with as many documents"
        )
    if mask is not None:
        if q_packing is not None:
            raise ValueError("mask is given with packed sequences, whose documents limit attention; pass mask=None")
        mask = check_mask(mask, q_SBHD, k_TBGD.shape[0] * ranks)
    if sinks is not None and (softcap is not None or sinks.shape != q_SBHD.shape[2:3]):
        raise ValueError(
            f"sinks are {list(sinks.shape)} for {q_SBHD.shape[2]} heads, with softcap={softcap}: they must be one "
            f"number a head, without softcap"
        )
    scores = _Scores(q_SBHD.shape[-1] ** -0.5 if scale is None else scale, dropout, softcap, sinks)

    # One split, whose backward joins the gradients of all documents once; slices would each add a whole tensor.
    q_documents = q_SBHD.split(q_places)
    if ranks == 1:
        kv_documents = list(zip(k_TBGD.split(kv_places), v_TBGD.split(kv_places), strict=True))
    else:
        parts_RTBGD = _gathered(torch.cat([k_TBGD, v_TBGD], -1), cp_group, fault)
        channels = [k_TBGD.shape[-1], v_TBGD.shape[-1]]
        kv_documents = [
            merge_zigzag(parts.flatten(0, 1), ranks).split(channels, -1) for parts in parts_RTBGD.split(kv_places, 1)
        ]
    if fault is not None:
        raise fault
    outputs = []
    for i, (q, (k, v)) in enumerate(zip(q_documents, kv_documents, strict=True)):
        q_length = q.shape[0] * ranks if q_packing is None else q_packing.lengths[i]
        kv_length = k.shape[0] if kv_packing is None else kv_packing.lengths[i]
        k, v = k[:kv_length], v[:kv_length]
        chunks = [0] if ranks == 1 else [rank, 2 * ranks - 1 - rank]
        size = q.shape[0] // len(chunks)
        for place, chunk in enumerate(chunks):
            start = chunk * size
            rows = slice(place * size, place * size + min(size, max(0, q_length - start)))
            hidden = None if mask is None else mask[..., rows, :]
            first = start + kv_length - q_length
            outputs += _attend_run(q[rows], k, v, first, window, hidden, scores)
            padding = size - (rows.stop - rows.start)
            if padding:
                outputs.append(_zeros(padding, q, k, v))
    outputs = outputs or [_zeros(0, q_SBHD, k_TBGD, v_TBGD)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gathered(kv_TBGD: Tensor, cp_group: Group, fault: ValueError | None) -> Tensor:
    """Gather `[W, T, B, G, D]` from all ranks; a rank with a `fault` sends infinity, and the other ranks raise."""
    sent = kv_TBGD if fault is None else torch.full_like(kv_TBGD, torch.inf)
    parts = gather_parts(sent[None], cp_group)
    if fault is None and not parts.is_cuda and parts.numel():  # on CUDA a fault has stopped its rank's device
        refused = (parts.detach()[:, 0, 0].flatten(1) == torch.inf).all(1)
        demand(~refused.any(), lambda _: REFUSED, refused)
    return parts


@dataclass(frozen=True)
class _Scores:
    """Options of the step from q k^T to the weights of the values."""

    scale: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None = None


def _attend_run(q, k, v, first: int, window: Window, hidden: Tensor | None, scores: _Scores) -> list[Tensor]:
    """Attend by queries at consecutive positions from `first`; in blocks if the window hides keys on the left."""
    queries, keys = q.shape[0], k.shape[0]
    block = max(1, queries)
    if window.left is not None and first + queries - 1 > window.left:
        block = min(max(window.left, 128), 1024)  # a block reads block + left keys, although a query sees left + 1
    outputs = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        lowest = 0 if window.left is None else max(0, first + start - window.left)
        highest = keys if window.right is None else min(keys, first + stop + window.right)
        q_block = q[start:stop]
        if lowest >= highest:
            outputs.append(_zeros(stop - start, q, k, v))
            continue
        seen = slice(lowest, highest)
        block_hidden = None if hidden is None else hidden[..., start:stop, seen]
        position = first + start - lowest
        outputs.append(_attend_block(q_block, k[seen], v[seen], position, window, block_hidden, scores))
    return outputs


def _attend_block(q, k, v, first: int, window: Window, hidden: Tensor | None, scores: _Scores) -> Tensor:
    """Attend, by one call of SDPA, by queries at consecutive positions from `first` of these keys."""
    queries, keys = q.shape[0], k.shape[0]
    left_hides = window.left is not None and first + queries - 1 > window.left
    right_hides = window.right is not None and first + window.right < keys - 1
    causal = hidden is None and right_hides and not left_hides and window.right == 0 and first >= 0
    bias = None if hidden is None else ~hidden
    if scores.softcap is not None or ((left_hides or right_hides) and not causal):
        seen = window.visible(first, queries, keys, q.device)
        bias = seen if bias is None else bias & seen
    if scores.softcap is not None:
        return _attend_with_softcap(q, k, v, bias, scores)
    channels, dense = v.shape[-1], bias is not None
    if scores.sinks is not None:
        q, k, v = _with_sink(q, k, v, scores)
        bias = None if bias is None else F.pad(bias, (1, 0), value=True)
    # The last query sees the last key. With as many queries as keys this is SDPA's own "causal".
    is_causal = causal and queries == k.shape[0]
    if causal and not is_causal:
        with _disable_current_modes():  # torch cannot make this bias under a dispatch mode
            bias = causal_lower_right(queries, k.shape[0])
    grouped = q.shape[2] != k.shape[2]
    no_flash = q.dtype in (torch.float32, torch.float64) or not torch.backends.cuda.flash_sdp_enabled()
    if grouped and q.device.type == "cuda" and (dense or no_flash):
        # Only the flash kernels share keys among queries; without them SDPA would fall back to whole score matrices.
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        grouped = False
    out_BHSD = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=bias,
        dropout_p=scores.dropout,
        is_causal=is_causal,
        scale=scores.scale,
        enable_gqa=grouped,
    )
    return out_BHSD.permute(2, 0, 1, 3)[..., :channels]


def _with_sink(q: Tensor, k: Tensor, v: Tensor, scores: _Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key before the others whose scores are the sinks, and whose value is 0.

    It uses a channel that is 0 in all other keys: this key has a 1 there, and each query its head's sink. Eight
    channels are added, and values get as many as keys, since flash kernels need a multiple of eight.
    """
    assert scores.sinks is not None
    width = max(k.shape[-1], v.shape[-1]) + 8
    column = (scores.sinks / scores.scale).to(q.dtype)[:, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, column], -1), (0, width - q.shape[-1] - 1))
    sink = k.new_zeros(1, *k.shape[1:3], width)
    sink[..., k.shape[-1]] = 1
    k = torch.cat([sink, F.pad(k, (0, width - k.shape[-1]))])
    return q, k, F.pad(v, (0, width - v.shape[-1], 0, 0, 0, 0, 1, 0))


def _attend_with_softcap(q, k, v, seen: Tensor | None, scores: _Scores) -> Tensor:
    """Attend step by step: softmax in fp32 at least, with tanh between the scores and their mask."""
    assert scores.softcap is not None
    assert seen is not None
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    z_BHSK = torch.einsum("sbhd,kbhd->bhsk", q, k).to(torch.promote_types(q.dtype, torch.float32)) * scores.scale
    z_BHSK = scores.softcap * torch.tanh(z_BHSK / scores.softcap)
    p_BHSK = torch.softmax(z_BHSK.masked_fill(~seen, torch.finfo(z_BHSK.dtype).min), -1)
    p_BHSK = F.dropout(p_BHSK.masked_fill(~seen.any(-1, keepdim=True), 0.0), scores.dropout)
    return torch.einsum("bhsk,kbhd->sbhd", p_BHSK.to(v.dtype), v)


def _zeros(queries: int, q, k, v) -> Tensor:
    """Return zeros, the output of queries that see no key.

    The zeros depend on q, k and v in autograd, with zero gradients, so that a rank with nothing but padding takes part
    in the backward exchange for which the other ranks wait.
    """
    return q.new_zeros(queries, *q.shape[1:3], v.shape[-1]) + (q[:0].sum() + k[:0].sum() + v[:0].sum())


def check_mask(mask: Tensor, q_SBHD: Tensor, keys: int) -> Tensor:
    """Check that `mask` is bool and fits the queries and `keys`; return it as `[B or 1, H or 1, S, K]`."""
    queries, batch, heads = q_SBHD.shape[:3]
    shape = mask.shape if isinstance(mask, Tensor) else ()
    fits = len(shape) == 4 and all(n in (1, want) for n, want in zip(shape, (batch, heads, queries, keys), strict=True))
    if not fits or mask.dtype != torch.bool:
        found = f"{mask.dtype} {list(shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"attention mask is {found}: it must be bool and broadcastable to [batch, heads, queries, keys] = "
            f"{[batch, heads, queries, keys]}, True where a query must not look; under context parallelism the queries "
            f"are this rank's and the keys those of all ranks"
        )
    return mask.expand(-1, -1, queries, keys)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[1] == k.shape[1] == v.shape[1]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and k.shape[2] > 0
        and q.shape[2] % k.shape[2] == 0
    ):
        raise ValueError(
            f"query {list(q.shape)}, key {list(k.shape)} and value {list(v.shape)} do not fit: they must be "
            f"[queries, batch, heads, channels], [keys, batch, groups, channels] and [keys, batch, groups, any], with "
            f"heads a multiple of groups"
        )


def _places_on_one_rank(packing: Packing | None, x: Tensor, ranks: int, argument: str) -> Sequence[int]:
    """Return the number of rows that each document has in `x`, on this rank."""
    chunks = 1 if ranks == 1 else 2 * ranks
    places = (x.shape[0] * ranks,) if packing is None else packing.places
    if sum(places) != x.shape[0] * ranks:
        raise ValueError(
            f"{argument} has {x.shape[0]} rows on each of {ranks} context-parallel ranks, but its documents take "
            f"{sum(places)} places: these must be {x.shape[0] * ranks}; the last entry of cu_seqlens (padded, if there "
            f"is padding) counts the tokens of all ranks"
        )
    if packing is not None and x.shape[1] != 1:
        raise ValueError(f"{argument} is packed and has batch size {x.shape[1]}: it must be 1")
    for n in places:
        if n % chunks:
            raise ValueError(
                f"a sequence of the {argument} takes {n} places: over {ranks} context-parallel ranks they must be a "
                f"multiple of {chunks}; pad to {-(-n // chunks) * chunks} and pass cu_seqlens_padded"
            )
    return places if ranks == 1 else [n // ranks for n in places]


def _document_lengths(cu_seqlens: Tensor, argument: str) -> tuple[int, ...]:
    ends = _as_tuple(cu_seqlens) if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else ()
    if not ends or ends[0] != 0 or not all(isinstance(end, int) for end in ends):
        raise ValueError(
            f"{argument} is {cu_seqlens}: it must be a tensor of integers [documents + 1] that begins with 0; "
            f"pass the cumulative document lengths"
        )
    return tuple(b - a for a, b in itertools.pairwise(ends))
