"""`ColumnParallelLinear`: the weight is sharded along the output dim."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_size, require_tensor_parallel_group
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import Deferral, drain_embedding_wgrad_compute
from megatron_ext.tensor_parallel._layers.distributed_weights import is_distributed, shape_of_shard
from megatron_ext.tensor_parallel._layers.initialization import InitMethod
from megatron_ext.tensor_parallel._layers.linear_autograd import ActivationLayout, LinearPlan, check_tensor
from megatron_ext.tensor_parallel._layers.parameter_attributes import set_tensor_model_parallel_attributes
from megatron_ext.tensor_parallel._layers.sharded_layer import ParallelLayer
from megatron_ext.tensor_parallel.mappings import gather_from_tensor_model_parallel_region


class ColumnParallelLinear(ParallelLayer):
    """`y = x @ weight.T + bias`, each rank with its rows of the weight: `[output_size / R, input_size]`.

    From Megatron-LM (https://arxiv.org/abs/1909.08053). Communicates, where R > 1: nothing forward and one all-reduce
    (of the input gradient) backward; with `config.sequence_parallel` one all-gather forward, one all-gather and one
    reduce-scatter backward. Nothing for gradients that are not needed. `gather_output` adds an all-gather forward.

    Args:
        input_size: Number of input features.
        output_size: Number of output features, over all ranks; divides by R.
        config: Megatron's `ModelParallelConfig`, or any object with the attributes of it that the layer reads. With
            `config.tp_comm_overlap` and sequence parallelism, matmuls and collectives are fused through symmetric
            memory; if there is none, a warning says so, and so does `repr`.
        init_method: Fills a tensor in place with first values; the bias starts at zero.
        bias: Have a bias, `[output_size / R]`.
        gather_output: Return all features on every rank.
        stride: Number of equal blocks that the outputs consist of, each of which is sharded by itself.
        keep_master_weight_for_test: Keep the full first weight as `master_weight` (CPU initialisation only).
        skip_bias_add: Return the bias instead of adding it, for a caller that fuses the addition.
        skip_weight_param_allocation: Have no weight; `forward` is given one (tied embeddings).
        embedding_activation_buffer, grad_output_buffer: Lists that keep inputs and output gradients of deferred weight
            gradients, if `config.defer_embedding_wgrad_compute` is set; at most `config.wgrad_deferral_limit` of them.
        is_expert: The layer belongs to an expert: it is cut over the experts' tensor-parallel group, and if that has
            several ranks, or there is expert parallelism, the token dispatcher does the communication.
        tp_comm_buffer_name: Accepted and not used, as in Megatron.
        disable_grad_reduce: Leave the input gradient unsummed, for a caller that sums it together with others.
        tp_group: The ranks that share the weight; None: Megatron's group.
        name: Stored as the layer's attribute `name`, for logs.
        output_dtype: dtype of the output; None: that of the matmul. float32 keeps the sums of 16-bit products.
        pg_collection: An object with process groups. The layer reads `gtp_remat` (for experts `expt_gtp_remat`), by
            default Megatron's own, and `dp_cp` (`expt_dp`). If `gtp_remat` has several ranks, generalized tensor
            parallelism cuts the weight once more: an all-gather in forward and in backward, and a reduce-scatter of
            its gradient into `main_grad`.

    Raises:
        ValueError: `output_size` doesn't divide by R, several ranks run and the group cannot be known, sizes are no
            whole numbers, `init_method` is no function, `config` is a dict, or generalized tensor parallelism has
            several ranks and the installed Megatron-Core lacks it.
    """

    sharded_axes: ClassVar = {"weight": 0, "bias": 0}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Group = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
    ):
        torch.nn.Module.__init__(self)  # `super()` may be Megatron's class of this name
        self._read_config(config, require_tensor_parallel_group(tp_group, expert=is_expert), is_expert)
        self.name, self.output_dtype = name, output_dtype
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = self._share("output_size", output_size)
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.disable_grad_reduce = disable_grad_reduce
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        alone = group_size(self.tp_group) == 1
        self.sequence_parallel = bool(getattr(config, "sequence_parallel", False)) and not alone
        self.allreduce_dgrad = not alone and not self.sequence_parallel and not disable_grad_reduce
        self._choose_path()

        if skip_weight_param_allocation:
            self.weight = None
        else:
            full = self._make_weight(self.output_size_per_partition, input_size, 0, init_method, stride)
            self.master_weight = full if keep_master_weight_for_test else None
        self._cut_weight_once_more(pg_collection)
        self._make_bias(bias, self.output_size_per_partition)
        if bias:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        self._mark_for_gradient_sums()

    def plan(self) -> LinearPlan:
        layout: ActivationLayout = "sharded"
        if not self.explicit_expert_comm:
            # If sequence_parallel is turned off later, allreduce_dgrad is still False, and the gradient must be summed.
            summed = self.allreduce_dgrad or not (self.disable_grad_reduce or group_size(self.tp_group) == 1)
            layout = "sequence" if self.sequence_parallel else "replicated" if summed else "sharded"
        deferral = None
        if self.grad_output_buffer is not None and getattr(self.config, "defer_embedding_wgrad_compute", False):
            limit = getattr(self.config, "wgrad_deferral_limit", 0)
            deferral = Deferral(self.grad_output_buffer, self.embedding_activation_buffer, limit)
        return LinearPlan(
            self.tp_group,
            layout,
            "sharded",
            fuse_main_grad=self.gradient_accumulation_fusion,
            deferral=deferral,
            output_dtype=self.output_dtype,
            symmetric=self.symmetric,
        ).in_mode(self.config)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `(output, bias)`; the bias is None unless the layer has `skip_bias_add`.

        Args:
            input_: `[..., input_size]`; with sequence parallelism `[S/R, ..., input_size]`, this rank's slice.
            weight: `[output_size / R, input_size]`, in place of the layer's own.
            runtime_gather_output: Replaces the layer's `gather_output`; None: the layer's.

        Returns:
            output: `[..., output_size / R]`, or `[..., output_size]` if gathered.

        Raises:
            ValueError: there is no weight, or shapes, dtypes or devices don't fit.
        """
        own = self.weight if weight is None else weight
        if own is None:
            raise ValueError(
                "weight is None, and the layer has none of its own (skip_weight_param_allocation=True): "
                "pass weight=, for instance the word embeddings' shard"
            )
        expected = (self.output_size_per_partition, self.input_size)
        if weight is not None:
            check_tensor("weight", weight)
            if is_distributed(weight):
                raise ValueError(
                    f"weight is a piece {tuple(weight.shape)} of a weight that generalized tensor parallelism cuts "
                    f"once more: it must be the layer's own one then; untie embedding and output layer "
                    f"(share_embeddings_and_output_weights=False)"
                )
        if (shape := own.shape if self.gtp_remat_size == 1 else shape_of_shard(own)) != expected:
            check_tensor("weight", own)
            raise ValueError(
                f"weight is {tuple(shape)}: it must be {expected}, this rank's shard of "
                f"[{self.output_size}, {self.input_size}]; pass the shard, not the full weight"
            )
        self._mark_for_offloading(input_)
        output = self._multiply(input_, own, None if self.skip_bias_add else self.bias, self.plan())
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        """Compute the weight gradients that wait in the layer's buffers, if it has any."""
        inputs, grads = self.embedding_activation_buffer, self.grad_output_buffer
        if inputs and grads and self.weight is not None:
            drain_embedding_wgrad_compute(self.config, inputs, grads, self.weight, self.tp_group)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", gather_output=True" if self.gather_output else "")
