"""Sequences in the form that attention takes, made from the layouts of queries, keys and values and written back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.cuda_graphs import read_by_the_host
from megatron_on_cpu.transformer_engine.enums import DType, NVTE_QKV_Layout

# (cumulated lengths, start of each sequence (None: the end of the sequence before it), largest length).
Lengths = tuple[Tensor, Tensor | None, int]


@dataclass
class Pack:
    """Sequences of one length, `[B, H, S, D]` in fp32: a whole batch, or one packed sequence.

    `q_lengths` and `kv_lengths`, `[B]`, count the positions that are no padding. Heads of keys and values are repeated
    to the number of query heads; `groups` is their number before.
    """

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: Tensor
    kv_lengths: Tensor
    groups: int
    packed: bool
    q_order: str
    kv_order: str
    q_rows: Any = None
    kv_rows: Any = None

    def heads_first(self, x: Tensor) -> Tensor:
        """Return the part of `x` that belongs to this pack, `[B, H, S, D]`; `x` has the layout of the queries."""
        return _heads_first(x[self.q_rows][None] if self.packed else x, self.q_order)

    def statistics(self, x: Tensor) -> Tensor:
        """Return this pack's part of a statistic of rows that forward has returned, `[B, H, S, 1]`."""
        return x[self.q_rows].view(-1, x.shape[1], 1).transpose(0, 1)[None] if self.packed else x

    def ungrouped(self, gradient: Tensor) -> Tensor:
        """Sum a gradient of keys or values over the query heads that share a head."""
        batch, heads, length, width = gradient.shape
        return gradient.view(batch, self.groups, heads // self.groups, length, width).sum(2)


def is_served(dtype: Any, layout: Any) -> bool:
    """Tell whether this dtype is not FP8 and this layout not of a paged cache."""
    fp8 = dtype in (DType.kFloat8E4M3, DType.kFloat8E5M2)
    return not fp8 and layout < NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD


def pack_of(layout: Any, Q: Tensor, K: Tensor, V: Tensor, of_q: Lengths, of_kv: Lengths) -> list[Pack]:
    """Return a `Pack` for each packed sequence, or one for the whole batch.

    Raises:
        NotImplementedError: the layout is of a paged cache, or of packed queries with keys that are not packed.
    """
    q_order, kv_order = _orders(layout)
    if q_order != "thd":
        q, (k, v) = _heads_first(Q, q_order), (_repeated(_heads_first(t, kv_order), Q) for t in (K, V))
        return [Pack(0, q, k, v, of_q[0].diff(), of_kv[0].diff(), K.shape[-2], False, q_order, kv_order)]
    packs = []
    ends = [read_by_the_host(cu, "cu_seqlens") for cu, _, _ in (of_q, of_kv)]
    starts = [
        cu if padded is None else read_by_the_host(padded, "cu_seqlens_padded")
        for cu, (_, padded, _) in zip(ends, (of_q, of_kv), strict=True)
    ]
    for i in range(of_q[0].numel() - 1):
        rows = [slice(start[i], start[i] + cu[i + 1] - cu[i]) for start, cu in zip(starts, ends, strict=True)]
        q = _heads_first(Q[rows[0]][None], "bshd")
        k, v = (_repeated(_heads_first(t[rows[1]][None], "bshd"), Q) for t in (K, V))
        q_length, kv_length = torch.tensor([q.shape[2]]), torch.tensor([k.shape[2]])
        packs.append(Pack(i, q, k, v, q_length, kv_length, K.shape[-2], True, "bshd", "bshd", *rows))
    return packs


def written(packs: list[Pack], parts: Any, full: Tensor, of_queries: bool) -> Tensor:
    """Write `parts`, `[B, H, S, D]` each, into `full`, which has the layout of queries or of keys; return `full`."""
    for pack, part in zip(packs, parts, strict=True):
        if pack.packed:
            full[pack.q_rows if of_queries else pack.kv_rows] = part[0].transpose(0, 1).to(full.dtype)
        else:
            full.copy_(_heads_back(part, pack.q_order if of_queries else pack.kv_order))
    return full


def _orders(layout: Any) -> tuple[str, str]:
    name = NVTE_QKV_Layout(layout).name.removeprefix("NVTE_")
    parts = [part.lower().replace("3", "").replace("2", "") for part in name.split("_")]
    orders = parts[0], parts[-1]
    if "paged" in orders or ("thd" in orders and orders[0] != orders[1]):
        raise NotImplementedError(
            f"qkv_layout is {name}: fused attention of the CPU emulation of Transformer Engine has neither paged "
            "caches nor packed queries with keys that are not; use the unfused backend (NVTE_FUSED_ATTN=0)"
        )
    return orders


def _heads_first(x: Tensor, order: str) -> Tensor:
    x = x.detach().float()
    return x.permute(1, 2, 0, 3) if order == "sbhd" else x.permute(0, 2, 1, 3)


def _heads_back(x: Tensor, order: str) -> Tensor:
    return x.permute(2, 0, 1, 3) if order == "sbhd" else x.permute(0, 2, 1, 3)


def _repeated(x: Tensor, Q: Tensor) -> Tensor:
    """Repeat the heads of keys or values so that each head of queries has its own."""
    return x.repeat_interleave(Q.shape[-2] // x.shape[1], dim=1)
