"""Packed sequences (THD): their halves under context parallelism, and their conversion to a padded batch and back.

A rank has two chunks of each sequence, which are the halves. `cu_seqlens` has the lengths on this rank, except in
`thd_get_partitioned_indices`.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron_on_cpu.cuda_graphs import read_by_the_host


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the indices of this rank's tokens, `[total_tokens / world_size]` int32.

    `cu_seqlens` has the whole lengths, which must be multiples of 2 `world_size`.
    """
    if cu_seqlens.dtype != torch.int32:
        raise RuntimeError(f"cu_seqlens is {cu_seqlens.dtype}: it must be torch.int32; convert it")
    return _chunks(cu_seqlens, 2 * world_size, (rank, 2 * world_size - rank - 1)).to(torch.int32)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return the first or second half of every sequence, of `[T, H, D]` or of two stacked tensors `[2, T, H, D]`."""
    dim = 0 if tensor.dim() == 3 else 1
    return tensor.index_select(dim, _half(cu_seqlens, half_idx))


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add a step's log-sum-exp of the second halves to `lse`, in place, as logarithms of sums."""
    for where, step in _second_halves(lse, lse_per_step, cu_seqlens, lse_packed):
        where.copy_(torch.logaddexp(where, step.to(where.dtype)))


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """Return the log-sum-exp of second halves, `[H, L]` if `lse_packed`, else `[B, H, L]`; L: the last argument."""
    shape = (lse.shape[0], second_half_lse_seqlen) if lse_packed else (*lse.shape[:2], second_half_lse_seqlen)
    found = lse.new_zeros(shape)
    for where, step in _second_halves(lse, found, cu_seqlens, lse_packed):
        step.copy_(where)
    return found


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add the output of a step, `[T, H, D]`, to `out`, in place, weighted by `exp(lse_per_step - lse)`."""
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(_ends(cu_seqlens)[-1])
    whole = _by_token(lse, cu_seqlens, lse_packed)[rows]
    lengths = cu_seqlens // 2 if only_second_half else cu_seqlens
    weight = (_by_token(lse_per_step, lengths, lse_packed) - whole).exp()
    out[rows] += (out_per_step[: len(rows)].float() * weight[..., None]).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Put the gradient of a step into `grad`, in place: each half is added ("add"), copied ("copy") or left ("none").

    If one half is left, `grad_per_step` has the other half alone.
    """
    dim = 0 if grad.dim() == 3 else 1
    taken = [i for i, what in enumerate((first_half, second_half)) if what != "none"]
    for i in taken:
        rows = _half(cu_seqlens, i)
        step = grad_per_step.index_select(dim, rows) if len(taken) == 2 else grad_per_step.narrow(dim, 0, len(rows))
        if (first_half, second_half)[i] == "add":
            step = grad.index_select(dim, rows) + step
        grad.index_copy_(dim, rows, step.to(grad.dtype))


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Turn packed sequences into a batch `[b, max_seq_len, H, D]`, padded with zeros."""
    batch = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for row, (start, end) in zip(batch, _sequences(cu_seqlens), strict=False):
        row[: end - start] = tensor[start:end]
    return batch


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Turn a padded batch into packed sequences `[t, H, D]`."""
    packed = tensor.new_zeros(t, *tensor.shape[2:])
    for row, (start, end) in zip(tensor, _sequences(cu_seqlens), strict=False):
        packed[start:end] = row[: end - start]
    return packed


def _ends(cu_seqlens: Tensor) -> list[int]:
    return read_by_the_host(cu_seqlens, "cu_seqlens")


def _sequences(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    """Return (first token, end) of each sequence."""
    return pairwise(_ends(cu_seqlens))


def _half(cu_seqlens: Tensor, which: int) -> Tensor:
    """Return the indices of the tokens in the first (0) or second (1) halves."""
    return _chunks(cu_seqlens, 2, (which,))


def _chunks(cu_seqlens: Tensor, count: int, places: tuple[int, ...]) -> Tensor:
    """Return the indices of the tokens in the chunks `places` of each sequence, which has `count` chunks."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for start, end in _sequences(cu_seqlens):
        size = (end - start) // count
        parts += [torch.arange(start + place * size, start + (place + 1) * size) for place in places]
    return torch.cat(parts)


def _second_halves(lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool) -> list[tuple[Tensor, Tensor]]:
    """Return views of each second half: in a whole log-sum-exp, and in a log-sum-exp of second halves alone."""
    found = []
    for i, (start, end) in enumerate(_sequences(cu_seqlens)):
        half = (end - start) // 2
        if packed:
            found.append((lse[:, start + half : end], step[:, start // 2 : start // 2 + half]))
        else:
            found.append((lse[i, :, half : end - start], step[i, :, :half]))
    return found


def _by_token(lse: Tensor, cu_seqlens: Tensor, packed: bool) -> Tensor:
    """Return a log-sum-exp as `[T, H]` in fp32."""
    if packed:
        return lse[:, : _ends(cu_seqlens)[-1]].t().float()
    sequences = _sequences(cu_seqlens)
    rows = [row[:, : end - start].t() for row, (start, end) in zip(lse, sequences, strict=False)]
    return torch.cat(rows).float()
