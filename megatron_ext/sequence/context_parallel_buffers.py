"""A context manager in which whole tensors are sharded over context-parallel ranks, and attention sees all shards."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_ext.distributed.groups import Group, group_rank, group_size
from megatron_ext.sequence.attention import CAUSAL, EVERYTHING, attend, replacing_sdpa
from megatron_ext.sequence.zigzag import check_length, demand, split_zigzag


def sharded(
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    kept: Collection[Tensor],
    group: Group,
    mask_BS: Tensor | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Return the context of `cp_utils.create_context_parallel_ctx`; arguments are checked here, before it is entered.

    `mask_BS` hides nothing but padding at the end of rows, so that causal attention need not know it; attention that is
    not causal is refused if there is padding.
    """
    if len(buffers) != len(dims):
        raise ValueError(f"{len(buffers)} buffers came with {len(dims)} sequence dims: pass one for each")
    if any(all(x is not buffer for buffer in buffers) for x in kept):
        raise ValueError("cp_no_restore_buffers has a tensor that cp_buffers lacks: it must be a subset of cp_buffers")
    for buffer in buffers:
        if buffer.requires_grad:
            raise ValueError(
                f"a buffer of shape {list(buffer.shape)} requires grad, and must not be changed in place: pass "
                "buffers without grad, and split trained tensors with megatron_ext.sequence.zigzag.split_zigzag"
            )
    lengths = sorted({buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)})
    if len(lengths) > 1:
        raise ValueError(f"the buffers have sequences of {lengths} tokens: these must be equal; cut or pad them alike")
    if lengths and group_size(group) > 1:
        check_length(lengths[0], group_size(group))
    # A tensor that is given twice, as input and labels, is cut once.
    dim_of = {id(buffer): (buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)}
    return _sharded(list(dim_of.values()), {id(x) for x in kept}, _AttendToAllRanks(group, mask_BS))


@contextlib.contextmanager
def _sharded(buffers: list[tuple[Tensor, int]], kept: set[int], mode: "_AttendToAllRanks") -> Iterator[None]:
    # The tensor object gets other memory (`.data`); memory that it shared with other tensors stays as it is.
    whole = [(buffer, buffer.data) for buffer, _ in buffers if id(buffer) not in kept]
    for buffer, dim in buffers:
        buffer.data = split_zigzag(buffer.data, group_size(mode.group), group_rank(mode.group), dim)
    replacing_sdpa.append(mode)
    try:
        with mode:
            yield
    finally:
        replacing_sdpa.remove(mode)
        for buffer, data in whole:
            buffer.data = data


class _AttendToAllRanks(TorchFunctionMode):
    """Mode in which `F.scaled_dot_product_attention` of zigzag parts of sequences sees the whole sequences."""

    def __init__(self, group: Group, mask_BS: Tensor | None):
        super().__init__()
        self.group, self._mask_BS = group, mask_BS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch disables the mode while this method runs, so that the SDPA calls of `attend` are not replaced again.
        run = self._attend if func is F.scaled_dot_product_attention else func
        if run is func and "attention" in (name := getattr(func, "__name__", "")):
            raise ValueError(
                f"{name} computes attention over context-parallel ranks: it would see this rank's keys alone; call "
                f"F.scaled_dot_product_attention, or megatron_ext.sequence.attention.attend, in its place"
            )
        return run(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,  # [B, H, S, D]
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or query.dim() != 4 or query.shape[2] != key.shape[2]:
            mask = "no mask" if attn_mask is None else "a mask"
            raise ValueError(
                f"attention of query {list(query.shape)} and key {list(key.shape)} with {mask}: over context-parallel "
                f"ranks both must be [batch, heads, tokens, channels], with as many tokens, and without a mask (whose "
                f"columns would be this rank's keys alone); for windows, documents and padding call "
                f"megatron_ext.sequence.attention.attend, or megatron_ext.dtensor.use_attention(model)"
            )
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True")
        if self._mask_BS is not None and not is_causal:
            demand(
                (self._mask_BS[:, -1:] >= self._mask_BS[:, :1]).all(),
                lambda _: (
                    "attention is not causal and would see padding, and the batch's attention_mask hides padding: over "
                    "context-parallel ranks pass is_causal=True, or call megatron_ext.sequence.attention.attend with a "
                    "mask"
                ),
                self._mask_BS,
            )
        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        window = CAUSAL if is_causal else EVERYTHING
        out = attend(q, k, v, window, cp_group=self.group, scale=scale, dropout=dropout_p)
        return out.permute(1, 2, 0, 3)
