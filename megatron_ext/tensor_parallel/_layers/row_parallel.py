"""`RowParallelLinear`: the weight is sharded along the input dim, and partial outputs are summed."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_size, require_tensor_parallel_group
from megatron_ext.tensor_parallel._layers.initialization import InitMethod
from megatron_ext.tensor_parallel._layers.linear_autograd import ActivationLayout, LinearPlan, check_tensor
from megatron_ext.tensor_parallel._layers.sharded_layer import ParallelLayer
from megatron_ext.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region


class RowParallelLinear(ParallelLayer):
    """`y = x @ weight.T + bias`, each rank with its columns of the weight: `[output_size, input_size / R]`.

    From Megatron-LM (https://arxiv.org/abs/1909.08053). Communicates, where R > 1: one all-reduce (of the output)
    forward and nothing backward; with `config.sequence_parallel` one reduce-scatter forward and one all-gather (of the
    output gradient) backward. `input_is_parallel=False` adds an all-gather (of the input gradient) backward.

    Args:
        input_size: Number of input features, over all ranks; divides by R.
        output_size: Number of output features.
        bias: Have a bias, `[output_size]`, the same on every rank.
        input_is_parallel: The input is this rank's `[..., input_size / R]`; False: it is whole and is cut here.
        stride: Number of equal blocks that the inputs consist of, each of which is sharded by itself.
        is_expert: The layer belongs to an expert: it is cut over the experts' tensor-parallel group, and if that has
            several ranks, or there is expert parallelism, the output stays this rank's part of the sum (with its part
            of the bias) for the token dispatcher to add up.
        config, init_method, skip_bias_add, keep_master_weight_for_test, tp_comm_buffer_name, tp_group, name,
            pg_collection: As of `ColumnParallelLinear`.

    Raises:
        ValueError: as of `ColumnParallelLinear`, here of `input_size`; or `config.sequence_parallel` is set for an
            input that is not parallel.
    """

    sharded_axes: ClassVar = {"weight": 1}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: Any = None,
    ):
        torch.nn.Module.__init__(self)  # `super()` may be Megatron's class of this name
        self._read_config(config, require_tensor_parallel_group(tp_group, expert=is_expert), is_expert)
        self.name = name
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = self._share("input_size", input_size)
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError(
                "input_is_parallel is False while config.sequence_parallel is True: a sequence-parallel layer takes an "
                "input sharded along its last dim; pass input_is_parallel=True"
            )
        self._choose_path()
        full = self._make_weight(output_size, self.input_size_per_partition, 1, init_method, stride)
        self.master_weight = full if keep_master_weight_for_test else None
        self._cut_weight_once_more(pg_collection)
        self._make_bias(bias, output_size)
        if bias:
            # Under sequence parallelism each rank sees its tokens only: Megatron sums such gradients over the dense
            # layers' tensor-parallel ranks. An expert's layer that adds its bias itself sees all tokens. If experts are
            # not cut, ranks have different ones, or copies, whose gradients data parallelism sums.
            complete = is_expert and (group_size(self.tp_group) == 1 or not skip_bias_add)
            self.bias.sequence_parallel = self.sequence_parallel and not complete  # type: ignore[attr-defined]
        self._mark_for_gradient_sums()

    def plan(self) -> LinearPlan:
        layout: ActivationLayout = "sharded"
        if not self.explicit_expert_comm:
            layout = "sequence" if self.sequence_parallel else "replicated"
        return LinearPlan(
            self.tp_group,
            "sharded",
            layout,
            fuse_main_grad=self.gradient_accumulation_fusion,
            symmetric=self.symmetric,
        ).in_mode(self.config)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `(output, bias)`; the bias is None unless the layer has `skip_bias_add`.

        Args:
            input_: `[..., input_size / R]`, or `[..., input_size]` unless `input_is_parallel`.

        Returns:
            output: `[..., output_size]`; with sequence parallelism `[S/R, ..., output_size]`, this rank's slice.

        Raises:
            ValueError: shapes, dtypes or devices don't fit.
        """
        if not self.input_is_parallel:
            check_tensor("input", input_)
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        self._mark_for_offloading(input_)
        bias: Tensor | None = None if self.skip_bias_add else self.bias
        if bias is not None and self.explicit_expert_comm:
            # The parts add up to the bias once; its gradient, the same on every rank, is not divided.
            bias = bias.detach() / group_size(self.tp_group) + (bias - bias.detach())
        assert self.weight is not None
        output = self._multiply(input_, self.weight, bias, self.plan())
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.input_is_parallel else ", input_is_parallel=False")
