"""Mamba-2 in plain PyTorch, for MambaMixer without `mamba_ssm` and `causal_conv1d`.

The formulas are from "Transformers are SSMs" (Dao and Gu, arXiv 2405.21060, section 6). A head has a state `[P, N]`:

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

Within a chunk of positions y is a masked product of matrices, `(C B^T * decay) x`; the state passes between chunks.

The arguments are those of the functions that Megatron's mixer calls. Shapes: B batch, S positions, H heads, P head
dimension, G groups of heads that share `B` and `C`, N state dimension. Sums are in fp32 (fp64 for fp64 inputs), results
in the dtype of the input. Autograd differentiates all functions. Nothing communicates.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm over groups of the last dim, with the gate `silu(z)` applied after the norm or before it.

    Args:
        group_size: numbers that are normalised together; None: all of the last dim.
        norm_before_gate: True: `norm(x) * silu(z)`; False: `norm(x * silu(z))`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise `x` `[..., hidden]`; `z` has the same shape, or is None: no gate."""
        wide = _wide(x)
        if z is not None and not self.norm_before_gate:
            wide = wide * F.silu(z.to(wide.dtype))
        groups = wide.unflatten(-1, (-1, self.group_size))
        wide = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight.to(wide.dtype)
        if z is not None and self.norm_before_gate:
            wide = wide * F.silu(z.to(wide.dtype))
        return wide.to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Return the scan `[B, S, H, P]` of `x`, and with `return_final_states` the last state `[B, H, P, N]`.

    Args:
        x: `[B, S, H, P]`.
        dt: `[B, S, H]`, the step sizes, to which `dt_bias` `[H]` is added; with `dt_softplus` the softplus of the sum.
        A: `[H]`, negative.
        B, C: `[B, S, G, N]`.
        D: `[H]` or `[H, P]`.
        z: `[B, S, H, P]`, a gate: the result is multiplied by `silu(z)`.

    Raises:
        ValueError: sequences are packed, which is not supported.
    """
    if seq_idx is not None or cu_seqlens is not None or return_varlen_states:
        raise ValueError(
            "seq_idx or cu_seqlens is given: Mamba layers on the CPU take no packed sequences; train with one "
            "sequence per row"
        )
    steps, wide = _wide(dt), _wide(x)
    steps = steps if dt_bias is None else steps + dt_bias
    steps = F.softplus(steps) if dt_softplus else steps
    y, state = _scan(wide, steps, A, _wide(B), _wide(C), chunk_size, initial_states)
    if D is not None:
        y = y + wide * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        y = y * F.silu(_wide(z))
    return (y.to(x.dtype), state) if return_final_states else y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Turn the input projection into the output projection's input, `[B, S, H P]`, gated by `silu(z)`.

    Args:
        zxbcdt: `[B, S, 2 H P + 2 G N + H]`: gate, x, B, C and step sizes.
        conv1d_weight, conv1d_bias: `[H P + 2 G N, W]` and `[H P + 2 G N]`, of the convolution of x, B and C.
        headdim: P; None: P is the last dim of `D`, which is then `[H, P]`.
        norm_before_gate: not used, since no norm is applied.

    Raises:
        ValueError: sequences are packed; `activation` is not SiLU.
    """
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation is {activation!r}: Mamba layers on the CPU have silu; pass that")
    heads = A.shape[0]
    inner = heads * (headdim if headdim is not None else D.shape[1])  # type: ignore[union-attr]
    shared = (conv1d_weight.shape[0] - inner) // 2
    z, conv, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    x, B, C = causal_conv1d(conv, conv1d_weight, conv1d_bias).split([inner, shared, shared], dim=-1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, -1)),
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=initial_states,
        seq_idx=seq_idx,
    )
    return y.flatten(-2)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of each channel's convolution with its own `weight` `[channels, W]` over the last W positions.

    `x` and the result are `[B, S, channels]`.
    """
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).transpose(1, 2)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y `[B, S, H, P]` without `D x`, and the last state `[B, H, P, N]`."""
    heads = x.shape[2]
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    if state is None:
        state = x.new_zeros(x.shape[0], heads, x.shape[3], B.shape[3])
    state = state.to(x.dtype)
    found = []
    for inputs, log_decay, to_state, from_state in zip(
        *(t.split(chunk_size, dim=1) for t in (x * dt[..., None], dt * A, B, C)), strict=True
    ):
        log = log_decay.cumsum(1)  # [B, L, H], log of the decay from before the chunk to each position in it
        length = log.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[None, :, :, None]
        decay = (log[:, :, None] - log[:, None]).masked_fill(later, float("-inf")).exp()  # [B, to, from, H]
        scores = torch.einsum("bihn,bjhn->bijh", from_state, to_state) * decay
        before = torch.einsum("bihn,bhpn->bihp", from_state, state) * log.exp()[..., None]
        found.append(torch.einsum("bijh,bjhp->bihp", scores, inputs) + before)
        kept = (log[:, -1:] - log).exp()[..., None]
        state = state * log[:, -1].exp()[..., None, None] + torch.einsum("bjhp,bjhn->bhpn", inputs * kept, to_state)
    return torch.cat(found, dim=1), state


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or an fp64 `x` as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
