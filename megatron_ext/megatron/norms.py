"""Norms for Megatron's layer specs that need neither Apex nor Transformer Engine.

Without these packages Megatron's own norm refuses sequence parallelism, zero-centred gammas and persistent kernels. Our
norms are PyTorch's fused norms, whose parameters carry the mark `sequence_parallel`: under sequence parallelism each
rank has a part of the tokens, and Megatron's `finalize_model_grads` sums the gradients of marked parameters over the
tensor-parallel ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import tensor_parallel_group
from megatron_ext.tensor_parallel._layers.sharded_checkpoints import LayerPlacement
from megatron_ext.tensor_parallel._random.transformer_engine import have_transformer_engine


class _MarkedNorm(torch.nn.Module):
    """Base of both norms: parameters, their marks, and zero-centred gammas (stored as offsets from 1).

    Attributes:
        stores_extra_state: whether sharded checkpoints hold an empty extra state of this norm, which Transformer
            Engine's norms store and require. The contents of a loaded one are ignored.
    """

    has_bias: bool
    stores_extra_state = False

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        make_weight = torch.zeros if self.zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(make_weight(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if self.has_bias else None
        self.sequence_parallel = bool(config.sequence_parallel)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, `[..., H]`. If `x` has a wider dtype than the weight (fp32 residuals), the result
        has the weight's dtype, under autocast the wider one."""
        gamma, beta = self.weight + 1 if self.zero_centered_gamma else self.weight, self.bias
        wide = torch.promote_types(x.dtype, gamma.dtype)
        if wide == gamma.dtype:
            return self._normalize(x, gamma, beta)
        y = self._normalize(x, gamma.to(wide), None if beta is None else beta.to(wide))
        return y if torch.is_autocast_enabled(x.device.type) else y.to(gamma.dtype)

    def _normalize(self, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters for Megatron's dist_checkpointing, whole on every tensor-parallel rank.

        Raises:
            ValueError: Megatron's dist_checkpointing is not imported.
        """
        place = LayerPlacement(sharded_offsets, metadata, tensor_parallel_group())
        state = place.layer(self.state_dict(keep_vars=True), {}, prefix)
        if self.stores_extra_state:
            key = f"{prefix}_extra_state"
            state[key] = place.object(None, key)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_MarkedNorm):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dim."""

    has_bias = True

    def _normalize(self, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.hidden_size,), gamma, beta, self.eps)


class RMSNorm(_MarkedNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim."""

    has_bias = False

    def _normalize(self, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        return F.rms_norm(x, (self.hidden_size,), gamma, self.eps)


class Norm:
    """The norm that a Megatron config names, for the norm slots of a layer spec.

    `Norm(config, hidden_size, eps)` returns a `LayerNorm` or `RMSNorm`. Further arguments of Megatron's norms are
    accepted and ignored, as the config says the same.

    Raises:
        ValueError: `config.normalization` is neither "LayerNorm" nor "RMSNorm".
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, *args, **kwargs):
        kinds: dict[str, type[_MarkedNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"config.normalization is {config.normalization!r}: it must be one of {sorted(kinds)}; "
                f"for another norm put its class into the layer spec"
            )
        return kinds[config.normalization](config, hidden_size, eps)


class StandaloneNorm(Norm):
    """A `Norm` for places where Transformer Engine's layers have a norm by itself, not fused with a linear layer.

    If Megatron uses Transformer Engine, sharded checkpoints hold an extra state of this norm, as of Transformer
    Engine's, so that either loads the other's checkpoints.
    """

    def __new__(cls, *args, **kwargs):
        norm = super().__new__(cls, *args, **kwargs)
        norm.stores_extra_state = have_transformer_engine()
        return norm
