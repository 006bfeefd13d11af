"""Layers for decoding: RMS norm and column-parallel linear in one, row-parallel linear and residual sum in one.

Drop-in for Megatron's module, without Transformer Engine. Between a row-parallel layer and the column-parallel layer
after it, sequence parallelism communicates twice: reduce-scatter, add the residual, norm, all-gather. Where Megatron's
inference has set up symmetric memory (`megatron_ext.distributed.symmetric_memory`) one multicast kernel does all four,
started by the row-parallel layer once it is told the next layer's norm; elsewhere the same happens by plain
collectives, each layer doing its part, with the same results.

Legend: S tokens (dim 0), R ranks, D inputs, N outputs. With sequence parallelism the norm and the residual sum run on
this rank's `[S/R, ...]`.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import cpu_products
from megatron_ext.distributed.groups import group_size
from megatron_ext.distributed.symmetric_memory import SymmetricTensor, symmetric_tensor
from megatron_ext.tensor_parallel._layers.column_parallel import ColumnParallelLinear
from megatron_ext.tensor_parallel._layers.inference_linear import InferenceLinear as InferenceLinear
from megatron_ext.tensor_parallel._layers.row_parallel import RowParallelLinear
from megatron_ext.tensor_parallel._mappings.inference_regions import (
    inference_all_gather_from_tensor_model_parallel_region as inference_all_gather_from_tensor_model_parallel_region,
)
from megatron_ext.tensor_parallel._mappings.inference_regions import (
    inference_reduce_scatter_to_sequence_parallel_region as inference_reduce_scatter_to_sequence_parallel_region,
)


def _te_rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim; PyTorch's, in spite of the name that Megatron gave it."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _InferenceColumn(ColumnParallelLinear):
    """What the two column-parallel layers share: all but the norm.

    Attributes:
        barrier_before_all_gather: this layer's gather follows another one in the same symmetric memory.
        skip_norm_and_all_gather: the layer before has left the normed and gathered input in symmetric memory, if any.
    """

    barrier_before_all_gather = False
    skip_norm_and_all_gather = False

    def set_barrier_before_all_gather(self, value: bool = True) -> None:
        """Say that another all-gather in the same symmetric memory may come right before this layer's."""
        self.barrier_before_all_gather = value

    def _memory(self, x: Tensor) -> SymmetricTensor | None:
        """Room for the gathered input, where there is something to gather."""
        if self.plan().input != "sequence" or self.gather_output:
            return None
        shape = [x.shape[0] * group_size(self.tp_group), *x.shape[1:]]
        return symmetric_tensor(shape, x.dtype, x.device, self.tp_group)

    def _normed(self, x: Tensor) -> Tensor:
        return x

    def forward(  # type: ignore[override]
        self, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`(output, bias)` of `x` `[..., D]`, as for `ColumnParallelLinear`; `[S/R, ..., D]` if sequence parallel."""
        if self.training:
            return super().forward(self._normed(x))
        with torch.no_grad():
            memory = self._memory(x)
            if memory is None:
                return super().forward(self._normed(x))
            gathered = memory.tensor
            if not self.skip_norm_and_all_gather:
                gathered = memory.all_gather(self._normed(x), self.barrier_before_all_gather)
            assert self.weight is not None
            output = cpu_products.linear(gathered, self.weight, None if self.skip_bias_add else self.bias)
            return output, self.bias if self.skip_bias_add else None


class InferenceColumnParallelLinear(_InferenceColumn):
    """A `ColumnParallelLinear` for decoding: arguments as there. In evaluation mode no gradients are kept.

    Communicates, evaluating: one all-gather with sequence parallelism at R > 1, in symmetric memory if there is any.
    """


class InferenceLayerNormColumnParallelLinear(_InferenceColumn):
    """`rms_norm(x) @ weight.T`: a `ColumnParallelLinear` with a norm before it, `layer_norm_weight` `[input_size]`.

    Arguments as for `ColumnParallelLinear`; `config` has `layernorm_epsilon` and `normalization="RMSNorm"` as well.
    In evaluation mode no gradients are kept; in training mode it is a layer like any other.

    Attributes:
        skip_norm_and_all_gather: set by Megatron's transformer block: where there is symmetric memory, the row-parallel
            layer before has left the normed and gathered input there.

    Communicates, evaluating: one all-gather with sequence parallelism at R > 1, or none with the attribute above.
    """

    def __init__(self, input_size: int, *sizes: int, config: Any, **options: Any):
        super().__init__(input_size, *sizes, config=config, **options)
        if config.normalization != "RMSNorm" or getattr(config, "layernorm_zero_centered_gamma", False):
            raise ValueError(
                f"config.normalization is {config.normalization!r}, zero-centered "
                f"{getattr(config, 'layernorm_zero_centered_gamma', False)}: the inference layers have an RMSNorm with "
                f"plain weights; use another layer spec for this model"
            )
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = self._new_parameter(config, input_size)
        torch.nn.init.ones_(self.layer_norm_weight)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _normed(self, x: Tensor) -> Tensor:
        return _te_rms_norm_kernel(x, self.layer_norm_weight, self.eps)


class InferenceRowParallelLinear(RowParallelLinear):
    """`x @ weight.T`, summed over the ranks, plus a residual where one is given: a `RowParallelLinear` for decoding.

    Arguments as for `RowParallelLinear`. In evaluation mode no gradients are kept; in training mode it is a layer like
    any other.

    Communicates, evaluating: one all-reduce at R > 1, or one reduce-scatter with sequence parallelism; where it does
    the next layer's norm and all-gather in symmetric memory, that kernel.
    """

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.next_layer_norm_weights: Tensor | None = None
        self.residual: Tensor | None = None

    def _set_next_layer_norm_weights(self, weights: Tensor) -> None:
        """From now on, evaluating, add the residual that `_set_residual` gives; norm and gather for the next layer.

        The output is the residual stream: who calls the layer must not add the residual again.

        Raises:
            ValueError: the layer has a bias, which would have to be added before the norm.
        """
        if self.bias is not None:
            raise ValueError(
                "weights cannot be set: the layer has a bias, and norms after it; build it with bias=False"
            )
        self.next_layer_norm_weights = weights

    def _set_residual(self, residual: Tensor) -> None:
        """The residual `[S/R, ..., N]` of the next call; it may be overwritten with the sum."""
        self.residual = residual

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`(output, bias)` of `x` `[..., D/R]`, as for `RowParallelLinear`; plus the residual, if there is one.

        Raises:
            ValueError: the next layer's norm was set and this call's residual was not.
        """
        if self.training:
            return self._plus(residual, *super().forward(x))
        if self.next_layer_norm_weights is not None and residual is None:
            residual, self.residual = self.residual, None
            if residual is None:
                raise ValueError(
                    "residual is None: after _set_next_layer_norm_weights() the layer adds the residual before the "
                    "norm; call _set_residual() before each forward"
                )
        with torch.no_grad():
            memory = self._memory(x, residual)
            if memory is None:
                return self._plus(residual, *super().forward(x))
            assert self.weight is not None
            cpu_products.mm(x.flatten(0, -2), self.weight.t(), memory.tensor.flatten(0, -2))
            if self.next_layer_norm_weights is not None:
                assert residual is not None
                eps = self.config.layernorm_epsilon
                return memory.reduce_scatter_add_norm_all_gather(residual, self.next_layer_norm_weights, eps), None
            return self._plus(residual, memory.reduce_scatter(), None)

    @staticmethod
    def _plus(residual: Tensor | None, output: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (output if residual is None else output + residual), bias

    def _memory(self, x: Tensor, residual: Tensor | None) -> SymmetricTensor | None:
        """Room for this rank's part of the sum, where it is to be reduced and scattered, and to get no bias."""
        if self.plan().output != "sequence" or self.bias is not None or x.shape[0] % group_size(self.tp_group):
            return None
        if residual is not None and residual.dtype != x.dtype:
            return None  # the next layer finds its input of another dtype, and gathers it by itself
        return symmetric_tensor([*x.shape[:-1], self.output_size], x.dtype, x.device, self.tp_group)


# Their arguments are shown and checked by those of the plain layers.
functools.update_wrapper(InferenceLayerNormColumnParallelLinear.__init__, ColumnParallelLinear.__init__)
functools.update_wrapper(InferenceRowParallelLinear.__init__, RowParallelLinear.__init__)


def is_inference_column_parallel_linear(module: Any) -> bool:
    """Whether `module` is one of the column-parallel layers for decoding: what has `set_barrier_before_all_gather`."""
    return isinstance(module, _InferenceColumn)
