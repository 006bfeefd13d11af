"""`InferenceLinear`: a linear layer for decoding with the whole weight on every rank."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, require_tensor_parallel_group
from megatron_ext.tensor_parallel._layers.initialization import InitMethod
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan
from megatron_ext.tensor_parallel._layers.sharded_layer import ParallelLayer
from megatron_ext.tensor_parallel._random.process_tracker import get_cuda_rng_tracker
from megatron_ext.tensor_parallel._random.rng_tracker import get_data_parallel_rng_tracker_name


def recording(layer: ParallelLayer) -> torch.set_grad_enabled:
    """Around a call of a layer for decoding: in evaluation mode no gradients are kept."""
    return torch.set_grad_enabled(layer.training and torch.is_grad_enabled())


class InferenceLinear(ParallelLayer):
    """`y = x @ weight.T + bias`, `[output_size, input_size]` on every rank. Communicates nothing.

    Megatron's mixture of experts has one before and one after experts that work in a smaller space.

    Args:
        input_size, output_size: numbers of features.
        parallel_mode: None or "duplicated": every rank has the whole weight.
        config: Megatron's `ModelParallelConfig`, or anything with those of its attributes that matter.
        init_method: fills a tensor in place with first values, the same on all tensor-parallel ranks.
        bias: have one, `[output_size]`, zero at first.
        skip_bias_add: return the bias instead of adding it.
        skip_weight_param_allocation: False.
        is_expert: False.
        tp_comm_buffer_name, symmetric_ar_type: accepted and not used: nothing is communicated.
        tp_group: the ranks that hold copies; None: Megatron's tensor-parallel group.
        name, pg_collection: as of `ColumnParallelLinear`.

    Raises:
        ValueError: the weight is to be cut by tensor parallelism, absent, or an expert's; or generalized tensor
            parallelism has more than one rank and Megatron-Core has none.
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
        self.input_size, self.output_size, self.name, self.skip_bias_add = input_size, output_size, name, skip_bias_add
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
        with recording(self):
            output = self._multiply(x, self.weight, None if self.skip_bias_add else self.bias, self.plan())
        return output, self.bias if self.skip_bias_add else None
