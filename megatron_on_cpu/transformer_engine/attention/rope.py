"""Rotary position embeddings, of one tensor or of queries, keys and values in one tensor, forward and backward.

`freqs` is `[positions, 1 or B, 1, rotary width]`, angles in fp32. With context parallelism over n ranks a sequence has
2 n chunks, and rank r has chunks r and 2 n - 1 - r.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.cuda_graphs import read_by_the_host
from megatron_on_cpu.transformer_engine.enums import NVTE_QKV_Format
from megatron_on_cpu.transformer_engine.parameters import taking

_OF_ROPE = "freqs start_positions qkv_format interleaved cu_seqlens cp_size cp_rank"


@taking(f"input {_OF_ROPE}")
def fused_rope_forward(given: Any) -> Tensor:
    """Rotate `input` `[S, B, H, D]`, `[B, S, H, D]` or packed `[T, H, D]`; dims beyond the rotary width stay."""
    return _turned(given.input, given, 1.0)


@taking(f"output_grads {_OF_ROPE}")
def fused_rope_backward(given: Any) -> Tensor:
    """Return the gradient of the input, the gradient of the output rotated back."""
    return _turned(given.output_grads, given, -1.0)


@taking("qkv_input q_freqs k_freqs start_positions qkv_split_arg_list qkv_format interleaved cp_size cp_rank")
def fused_qkv_rope_forward(given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Split `[.., .., groups, q + k + v]` into queries, keys and values `[.., .., heads, D]`; rotate the first two."""
    q, k, v = given.qkv_input.split(given.qkv_split_arg_list, dim=-1)
    width = given.qkv_split_arg_list[1]
    q, k, v = (t.reshape(*t.shape[:2], -1, width) for t in (q, k, v))
    rest = (given.start_positions, given.qkv_format, given.interleaved, None, given.cp_size, given.cp_rank)
    return fused_rope_forward(q, given.q_freqs, *rest), fused_rope_forward(k, given.k_freqs, *rest), v


@taking("q_grad_out k_grad_out v_grad_out q_freqs k_freqs qkv_split_arg_list qkv_format interleaved cp_size cp_rank")
def fused_qkv_rope_backward(given: Any) -> Tensor:
    """Return the gradient of the tensor that holds queries, keys and values."""
    rest = (None, given.qkv_format, given.interleaved, None, given.cp_size, given.cp_rank)
    dq = fused_rope_backward(given.q_grad_out, given.q_freqs, *rest)
    dk = fused_rope_backward(given.k_grad_out, given.k_freqs, *rest)
    parts = [t.reshape(*t.shape[:2], dk.shape[2], -1) for t in (dq, dk, given.v_grad_out)]
    return torch.cat(parts, dim=-1)


def _turned(x: Tensor, given: Any, sign: float) -> Tensor:
    angles, interleaved = _angles(x, given), given.interleaved
    width = angles.shape[-1]
    turning, rest = x[..., :width].float(), x[..., width:]
    sin = angles.sin()
    if sign > 0:
        turned = turning * angles.cos() + _quarter(turning, interleaved) * sin
    else:
        turned = turning * angles.cos() - _quarter(turning * sin, interleaved)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _quarter(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs by a quarter turn; the pairs are neighbours if `interleaved`, else half the width apart."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _angles(x: Tensor, given: Any) -> Tensor:
    """Return the angles of every position of `x`, in a shape that broadcasts with it."""
    freqs, context = given.freqs, (given.cp_size, given.cp_rank)
    table = freqs[:, :, 0] if freqs.dim() == 4 else freqs  # [positions, 1 or B, width]
    if given.qkv_format == NVTE_QKV_Format.NVTE_THD:
        if given.cu_seqlens is None:
            raise ValueError("cu_seqlens is None: packed sequences need it; pass their cumulated lengths")
        lengths = read_by_the_host(given.cu_seqlens.diff() // context[0], "the lengths in cu_seqlens")
        starts = [0] * len(lengths)
        if given.start_positions is not None:
            starts = read_by_the_host(given.start_positions, "start_positions")
        positions = [_positions(n, *context) + s for n, s in zip(lengths, starts, strict=True)]
        found = table[torch.cat(positions), 0]
        return torch.cat([found, found.new_zeros(x.shape[0] - len(found), found.shape[1])])[:, None]
    sequence_first = given.qkv_format == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0] if sequence_first else x.shape[1]
    positions_S = _positions(length, *context)
    if given.start_positions is None:
        found = table[positions_S]  # [S, 1 or B, width]
    else:
        found = table[positions_S[:, None] + given.start_positions, 0]
    return (found if sequence_first else found.transpose(0, 1))[:, :, None]


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions in the whole sequence of the `length` tokens that this rank has."""
    if cp_size == 1:
        return torch.arange(length)
    half = length // 2
    front = torch.arange(half) + cp_rank * half
    back = torch.arange(length - half) + cp_size * length - (cp_rank + 1) * half
    return torch.cat([front, back])
