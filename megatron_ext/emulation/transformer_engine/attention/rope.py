"""Rotary position embeddings, of one tensor or of queries and keys in one, forward and backward.

`freqs` is `[positions, 1 or B, 1, rotary width]`, angles in fp32. With context parallelism a rank has two of twice as
many chunks of a sequence as there are ranks, its own from the front and its own from the back.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.enums import NVTE_QKV_Format


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """`input`, `[S, B, H, D]`, `[B, S, H, D]` or packed `[T, H, D]`, turned; what is beyond the rotary width stays."""
    angles = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, (cp_size, cp_rank))
    return _turned(input, angles, interleaved, 1.0)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The gradient, turned back."""
    angles = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, (cp_size, cp_rank))
    return _turned(output_grads, angles, interleaved, -1.0)


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: list[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, and values, out of `[.., groups, q + k + v]`."""
    q, k, v = qkv_input.split(qkv_split_arg_list, dim=-1)
    width = qkv_split_arg_list[1]
    q, k, v = (t.reshape(*t.shape[:2], -1, width) for t in (q, k, v))
    rest = (start_positions, qkv_format, interleaved, None, cp_size, cp_rank)
    return fused_rope_forward(q, q_freqs, *rest), fused_rope_forward(k, k_freqs, *rest), v


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The gradient of the tensor that held all three."""
    rest = (None, qkv_format, interleaved, None, cp_size, cp_rank)
    turned = fused_rope_backward(q_grad_out, q_freqs, *rest), fused_rope_backward(k_grad_out, k_freqs, *rest)
    groups = k_grad_out.shape[2]
    parts = [t.reshape(*t.shape[:2], groups, -1) for t in (*turned, v_grad_out)]
    return torch.cat(parts, dim=-1)


def _turned(x: Tensor, angles: Tensor, interleaved: bool, sign: float) -> Tensor:
    width = angles.shape[-1]
    turning, rest = x[..., :width].float(), x[..., width:]
    sin = angles.sin()
    if sign > 0:
        turned = turning * angles.cos() + _quarter(turning, interleaved) * sin
    else:
        turned = turning * angles.cos() - _quarter(turning * sin, interleaved)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _quarter(x: Tensor, interleaved: bool) -> Tensor:
    """A quarter of a turn, of pairs that are neighbours or half the width apart."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _angles(
    x: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    cu_seqlens: Tensor | None,
    context: tuple[int, int],
) -> Tensor:
    """Those of every position of `x`, ready to be multiplied."""
    table = freqs[:, :, 0] if freqs.dim() == 4 else freqs  # [positions, 1 or B, width]
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is None: packed sequences need it; pass their cumulated lengths")
        lengths = (cu_seqlens.diff() // context[0]).tolist()
        starts = [0] * len(lengths) if start_positions is None else start_positions.tolist()
        positions = [_positions(n, *context) + s for n, s in zip(lengths, starts, strict=True)]
        found = table[torch.cat(positions), 0]
        return torch.cat([found, found.new_zeros(x.shape[0] - len(found), found.shape[1])])[:, None]
    sequence_first = qkv_format == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0] if sequence_first else x.shape[1]
    positions_S = _positions(length, *context)
    if start_positions is None:
        found = table[positions_S]  # [S, 1 or B, width]
    else:
        found = torch.stack([table[positions_S + int(start), 0] for start in start_positions], dim=1)
    return (found if sequence_first else found.transpose(0, 1))[:, :, None]


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """In the whole sequence, of the `length` positions that this rank has."""
    if cp_size == 1:
        return torch.arange(length)
    half = length // 2
    front = torch.arange(half) + cp_rank * half
    back = torch.arange(length - half) + cp_size * length - (cp_rank + 1) * half
    return torch.cat([front, back])
