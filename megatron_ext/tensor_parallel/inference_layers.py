"""Layers for decoding: RMS norm and column-parallel linear in one, row-parallel linear and residual sum in one, and a
linear layer with the whole weight on every rank.

Drop-in for Megatron's module, without Transformer Engine. Megatron's own communicate through symmetric memory on GPUs
behind an NVSwitch, where its inference has set some up; these are the plain layers with plain collectives, on any
machine, and give the same results.

Legend: S tokens (dim 0), R ranks, D inputs, N outputs. With sequence parallelism the norm and the residual sum run on
this rank's `[S/R, ...]`.
"""

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import Group, require_tensor_parallel_group
from megatron_ext.tensor_parallel._layers.column_parallel import ColumnParallelLinear
from megatron_ext.tensor_parallel._layers.initialization import InitMethod
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan
from megatron_ext.tensor_parallel._layers.row_parallel import RowParallelLinear
from megatron_ext.tensor_parallel._layers.sharded_layer import ParallelLayer
from megatron_ext.tensor_parallel._random.process_tracker import get_cuda_rng_tracker
from megatron_ext.tensor_parallel._random.rng_tracker import get_data_parallel_rng_tracker_name
from megatron_ext.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def inference_all_gather_from_tensor_model_parallel_region(
    x: Tensor, tp_group: Group, config: Any, barrier_before: bool = False
) -> Tensor:
    """Call `gather_from_tensor_model_parallel_region`; the last two arguments, for symmetric memory, are not read."""
    return gather_from_tensor_model_parallel_region(x, tp_group)


def inference_reduce_scatter_to_sequence_parallel_region(x: Tensor, tp_group: Group, config: Any) -> Tensor:
    """Call `reduce_scatter_to_sequence_parallel_region`; the last argument, for symmetric memory, is not read."""
    return reduce_scatter_to_sequence_parallel_region(x, tp_group)


def _te_rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim; PyTorch's, in spite of the name that Megatron gave it."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _recording(layer: ParallelLayer) -> torch.set_grad_enabled:
    """Return the context of a call of a layer for decoding: in evaluation mode autograd records nothing."""
    return torch.set_grad_enabled(layer.training and torch.is_grad_enabled())


class InferenceColumnParallelLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` for decoding, with the same arguments. In evaluation mode autograd records nothing.

    Communicates in evaluation mode: one all-gather with sequence parallelism at R > 1.

    Attributes:
        barrier_before_all_gather, skip_norm_and_all_gather: set by Megatron, for layers with symmetric memory.
    """

    barrier_before_all_gather = False
    skip_norm_and_all_gather = False

    def set_barrier_before_all_gather(self, value: bool = True) -> None:
        """Record that another all-gather may come right before this layer's, which waits for it in any case."""
        self.barrier_before_all_gather = value

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """`(output, bias)` of `x` `[..., D]`, as for `ColumnParallelLinear`; `[S/R, ..., D]` if sequence parallel."""
        with _recording(self):
            return super().forward(x)


class InferenceLayerNormColumnParallelLinear(InferenceColumnParallelLinear):
    """`rms_norm(x) @ weight.T`: the layer above with a norm before it, `layer_norm_weight` `[input_size]`.

    Its `config` has `layernorm_epsilon` and `normalization="RMSNorm"` as well.
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
        self.layer_norm_weight = self._new_parameter(input_size)
        torch.nn.init.ones_(self.layer_norm_weight)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        with _recording(self):
            return super().forward(_te_rms_norm_kernel(x, self.layer_norm_weight, self.eps))


class InferenceRowParallelLinear(RowParallelLinear):
    """`x @ weight.T`, summed over the ranks, plus a residual where one is given: a `RowParallelLinear` for decoding,
    with the same arguments. In evaluation mode autograd records nothing.

    Communicates in evaluation mode: one all-reduce at R > 1, or one reduce-scatter with sequence parallelism.
    """

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.next_layer_norm_weights: Tensor | None = None
        self.residual: Tensor | None = None

    def _set_next_layer_norm_weights(self, weights: Tensor) -> None:
        """Let the layer, in evaluation, add the residual of `_set_residual`; the next layer norms by itself.

        The output is the residual stream: the caller of the layer must not add the residual again.

        Raises:
            ValueError: the layer has a bias, which would have to be added before the norm.
        """
        if self.bias is not None:
            raise ValueError(
                "weights cannot be set: the layer has a bias, and norms after it; build it with bias=False"
            )
        self.next_layer_norm_weights = weights

    def _set_residual(self, residual: Tensor) -> None:
        """Set the residual `[S/R, ..., N]` of the next call."""
        self.residual = residual

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`(output, bias)` of `x` `[..., D/R]`, as for `RowParallelLinear`; plus the residual, if there is one.

        Raises:
            ValueError: the next layer's norm was set and this call's residual was not.
        """
        if self.next_layer_norm_weights is not None and residual is None and not self.training:
            residual, self.residual = self.residual, None
            if residual is None:
                raise ValueError(
                    "residual is None: after _set_next_layer_norm_weights() the layer adds the residual before the "
                    "norm; call _set_residual() before each forward"
                )
        with _recording(self):
            output, bias = super().forward(x)
            return output if residual is None else output + residual, bias


class InferenceLinear(ParallelLayer):
    """`y = x @ weight.T + bias`, `[output_size, input_size]` on every rank. Communicates nothing.

    Megatron's mixture of experts has one before and one after experts that work in a smaller space.

    Args:
        parallel_mode: None or "duplicated": every rank has the whole weight, the same at first.
        skip_weight_param_allocation, is_expert: False.
        tp_comm_buffer_name, symmetric_ar_type: accepted and not used: nothing is communicated.
        tp_group: the ranks that hold copies; None: Megatron's tensor-parallel group.

    The other arguments are those of `ColumnParallelLinear`; the bias is `[output_size]`.

    Raises:
        ValueError: the weight is to be cut by tensor parallelism, absent, or an expert's; or generalized tensor
            parallelism has several ranks and the installed Megatron-Core lacks it.
    """

    sequence_parallel = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: InitMethod,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        if parallel_mode not in (None, "duplicated"):
            raise ValueError(
                f"parallel_mode is {parallel_mode!r}: it must be None or 'duplicated', since every rank has the whole "
                "weight; use InferenceColumnParallelLinear or InferenceRowParallelLinear for a sharded weight"
            )
        refused = {"skip_weight_param_allocation": skip_weight_param_allocation, "is_expert": is_expert}
        for argument, value in refused.items():
            if value:
                raise ValueError(f"{argument} is True: this layer has a weight that all ranks share; pass False")
        self._read_config(config, require_tensor_parallel_group(tp_group), False)
        self.input_size, self.output_size = input_size, output_size
        self.name, self.skip_bias_add = name, skip_bias_add
        self.path = "collectives"
        self.weight = self._new_parameter(output_size, input_size)
        if getattr(config, "perform_initialization", True):
            tracker = get_cuda_rng_tracker()
            on_device = not getattr(config, "use_cpu_initialization", False) and tracker.is_initialized()
            with tracker.fork(get_data_parallel_rng_tracker_name()) if on_device else contextlib.nullcontext():
                init_method(self.weight)
        self._cut_weight_once_more(pg_collection)
        self._make_bias(bias, output_size)
        for parameter in self.parameters():  # each rank sees its tokens only: Megatron sums such gradients
            parameter.sequence_parallel = bool(getattr(config, "sequence_parallel", False))  # type: ignore[attr-defined]
        self._mark_for_gradient_sums()

    def plan(self) -> LinearPlan:
        return LinearPlan(fuse_main_grad=self.gradient_accumulation_fusion).in_mode(self.config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`(output, bias)` of `x` `[..., D]`: `[..., N]`, and None unless the layer has `skip_bias_add`.

        Raises:
            ValueError: shapes, dtypes or devices don't fit.
        """
        assert self.weight is not None
        with _recording(self):
            output = self._multiply(x, self.weight, None if self.skip_bias_add else self.bias, self.plan())
        return output, self.bias if self.skip_bias_add else None


# `inspect.signature` gives these layers the arguments of the plain ones.
functools.update_wrapper(InferenceLayerNormColumnParallelLinear.__init__, ColumnParallelLinear.__init__)
functools.update_wrapper(InferenceRowParallelLinear.__init__, RowParallelLinear.__init__)


def is_inference_column_parallel_linear(module: Any) -> bool:
    """True for the column-parallel layers for decoding, which have `set_barrier_before_all_gather`."""
    return isinstance(module, InferenceColumnParallelLinear)
