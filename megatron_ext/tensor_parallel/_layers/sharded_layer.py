"""The base class of the parallel layers: process group, sharded weight, deep copies, checkpoints."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.distributed.groups import UNSHARDED, Group, generalized_tensor_parallel_group, group_rank, group_size
from megatron_ext.distributed.sizes import check_size
from megatron_ext.distributed.symmetric_matmul import why_unavailable
from megatron_ext.tensor_parallel._layers.distributed_weights import cut_weight
from megatron_ext.tensor_parallel._layers.initialization import (
    InitMethod,
    device_for_parameters,
    initialize_on_cpu,
    initialize_on_device,
)
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from megatron_ext.tensor_parallel._layers.megatron_linear_functions import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_ext.tensor_parallel._layers.parameter_attributes import (
    copy_attributes,
    copy_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron_ext.tensor_parallel._layers.sharded_checkpoints import LayerPlacement
from megatron_ext.tensor_parallel._recompute.checkpoint import note_layer_group
from megatron_ext.tensor_parallel._replaced_functions import users_linear_function
from megatron_ext.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def check_config(config: Any) -> None:
    """Raise ValueError for a dict: the layers read attributes, not keys."""
    if isinstance(config, Mapping):
        raise ValueError(
            f"config is a {type(config).__name__}: it must have the config's attributes; pass Megatron's "
            "ModelParallelConfig, or types.SimpleNamespace(**config)"
        )


class ShardedLayer(torch.nn.Module):
    """A layer with a weight that is cut over `tp_group`.

    Attributes:
        gtp_remat_size: the number of ranks over which generalized tensor parallelism cuts the weight once more.
    """

    config: Any
    tp_group: Group
    weight: Tensor | None
    is_expert = False
    gtp_remat_size = 1

    def _cut_weight_once_more(self, pg_collection: Any, *, sent_ahead: bool = True) -> None:
        """Keep only this rank's piece of the weight if there is generalized tensor parallelism (see `cut_weight`)."""
        group = generalized_tensor_parallel_group(pg_collection, expert=self.is_expert)
        replicas = getattr(pg_collection, "expt_dp" if self.is_expert else "dp_cp", None)
        self.gtp_remat_size = cut_weight(self, group, replicas, sent_ahead)

    def _make_weight(
        self, rows: int, columns: int, dim: int, init_method: InitMethod, stride: int = 1
    ) -> Tensor | None:
        """Make the layer's `[rows, columns]` shard of a weight cut along `dim`. On CPU, return the full weight."""
        check_size("stride", stride, 1)
        weight = self._new_parameter(rows, columns)
        set_tensor_model_parallel_attributes(weight, True, dim, stride)
        self.weight = weight
        if not getattr(self.config, "perform_initialization", True):
            return None
        if not callable(init_method):
            raise ValueError(
                f"init_method is {init_method!r}: it must be a function that fills a tensor in place; pass for "
                f"instance torch.nn.init.xavier_normal_, or config.init_method of a TransformerConfig"
            )
        if getattr(self.config, "use_cpu_initialization", False):
            rank, ranks = group_rank(self.tp_group), group_size(self.tp_group)
            return initialize_on_cpu(weight, init_method, dim, stride, rank, ranks)
        initialize_on_device(weight, init_method, dim, stride, self.tp_group, is_expert=self.is_expert)
        return None

    def _new_parameter(self, *shape: int) -> Parameter:
        device = device_for_parameters(getattr(self.config, "use_cpu_initialization", False))
        dtype = getattr(self.config, "params_dtype", torch.float32)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"config.params_dtype is {dtype!r}: it must be a floating dtype; pass torch.bfloat16, say")
        return Parameter(torch.empty(shape, dtype=dtype, device=device))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedLayer":
        """A copy with parameters of its own, attributes and all, that lives on the same ranks."""
        if self.gtp_remat_size > 1:
            raise ValueError(
                f"{type(self).__name__} has a weight that generalized tensor parallelism cuts over "
                f"{self.gtp_remat_size} ranks: it cannot be copied; build a second layer and load this one's state_dict"
            )
        if self.tp_group is not None:
            memo[id(self.tp_group)] = self.tp_group
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        for name, parameter in self.named_parameters(recurse=False):
            new = getattr(clone, name)
            copy_tensor_model_parallel_attributes(new, parameter)
            copy_attributes(("allreduce", "sequence_parallel", "shared", "shared_embedding"), new, parameter)
        return clone


class ParallelLayer(ShardedLayer):
    """The base of the column-parallel and the row-parallel layer.

    Attributes:
        symmetric: the layer fuses matmuls and collectives, through symmetric memory.
        path: the means of its communication, in words; `repr` shows it.
        sharded_axes: the dim along which each parameter is cut; parameters not named are whole on every rank.
    """

    sharded_axes: ClassVar[Mapping[str, int]] = {}
    sequence_parallel: bool

    def _read_config(self, config: Any, group: Group, is_expert: bool) -> None:
        check_config(config)
        self.config = config
        self.tp_group = group
        self.is_expert = is_expert
        self.expert_parallel = getattr(config, "expert_model_parallel_size", 1) > 1
        # The experts' token dispatcher then does the layers' communication.
        self.explicit_expert_comm = is_expert and (group_size(group) > 1 or self.expert_parallel)
        self.gradient_accumulation_fusion = bool(getattr(config, "gradient_accumulation_fusion", False))
        self.master_weight: Tensor | None = None

    def _choose_path(self) -> None:
        """Choose between symmetric memory and collectives; warn if symmetric memory is asked for and unavailable."""
        self.symmetric, self.path = False, "collectives"
        if not getattr(self.config, "tp_comm_overlap", False) or group_size(self.tp_group) == 1:
            return
        if self.explicit_expert_comm:  # communicates nothing
            return
        assert self.tp_group is not None
        reason = why_unavailable(self.tp_group) if self.sequence_parallel else "sequence_parallel is off"
        if reason is None:
            self.symmetric, self.path = True, "symmetric memory"
            return
        self.path = f"collectives, not symmetric memory: {reason}"
        warnings.warn(
            f"config.tp_comm_overlap is True, but matmuls cannot go through symmetric memory ({reason}): the layers "
            f"use plain collectives, overlapped with other matmuls",
            stacklevel=3,
        )

    def _share(self, argument: str, features: int) -> int:
        """This rank's share of `features`."""
        ranks = group_size(self.tp_group)
        for name in ("input_size", "output_size"):
            check_size(name, getattr(self, name))
        if features % ranks:
            raise ValueError(
                f"{argument} is {features}: it must divide by the {ranks} tensor-parallel ranks; "
                f"pad it to {-(-features // ranks) * ranks}"
            )
        return features // ranks

    def _make_bias(self, wanted: bool, features: int) -> None:
        if not wanted:
            self.register_parameter("bias", None)
            return
        self.bias = self._new_parameter(features)
        if getattr(self.config, "perform_initialization", True):
            torch.nn.init.zeros_(self.bias)

    def _mark_for_gradient_sums(self) -> None:
        """Set `allreduce`; False: gradients are summed over the ranks that hold the same part of the same experts.

        These differ from the dense layers' data-parallel ranks if ranks hold different experts (expert parallelism), or
        experts are cut into another number of parts than dense layers, by generalized tensor parallelism too.
        """
        dense = getattr(self.config, "tensor_model_parallel_size", 1)
        cut_alike = getattr(self.config, "expert_tensor_parallel_size", None) in (None, dense)
        pieces = [getattr(self.config, f"{kind}gtp_weight_remat_size", 1) for kind in ("", "expert_")]
        cut_alike = cut_alike and pieces[0] == pieces[1]
        elsewhere = self.is_expert and (self.expert_parallel or not cut_alike)
        for parameter in self.parameters(recurse=False):
            parameter.allreduce = not elsewhere  # type: ignore[attr-defined]

    def _mark_for_offloading(self, x: Tensor) -> None:
        """Record on `x`, in Megatron's CPU offloading context, whether the saved input shall leave the device."""
        context = getattr(self.config, "_cpu_offloading_context", None)
        if context is not None and getattr(context, "inside_context", False):
            x.activation_offloading = getattr(self.config, "cpu_offloading_activations", True)  # type: ignore[attr-defined]

    def plan(self) -> LinearPlan:
        """Return the layouts and options of the next call."""
        raise NotImplementedError

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply, by Megatron's arguments. Called only if a subclass or a user's linear function replaces ours."""
        frozen = not weight.requires_grad
        function = linear_with_frozen_weight if frozen else linear_with_grad_accumulation_and_async_allreduce
        return (users_linear_function(frozen) or function)(input, weight, *args, **kwargs)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        """`x @ weight.T + bias` by `plan`.

        A user's `_forward_impl` or linear function is called as by Megatron's layers, and nothing is deferred.
        """
        if "sequence" in (plan.input, plan.output):
            note_layer_group(None)
        elif not self.is_expert:
            note_layer_group(UNSHARDED if plan.group is None else plan.group)
        own = type(self)._forward_impl is ParallelLayer._forward_impl and "_forward_impl" not in self.__dict__
        if own and users_linear_function(not weight.requires_grad) is None:
            return parallel_linear(x, weight, bias, plan)
        output = self._forward_impl(
            input=x,
            weight=weight,
            bias=bias if plan.output == "sharded" else None,
            gradient_accumulation_fusion=plan.fuse_main_grad,
            allreduce_dgrad=plan.input == "replicated",
            sequence_parallel=plan.input == "sequence",
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
            tp_group=plan.group,
            **({} if plan.output_dtype is None else {"output_dtype": plan.output_dtype}),
            **({} if self.gtp_remat_size == 1 else {"gtp_remat_size": self.gtp_remat_size}),
        )
        if plan.output == "sharded":
            return output
        reduce = reduce_from_tensor_model_parallel_region
        if plan.output == "sequence":
            reduce = reduce_scatter_to_sequence_parallel_region
        output = reduce(output, group=plan.group)
        return output if bias is None else output + bias

    def backward_dw(self) -> None:
        """Compute the deferred weight gradients, if there are any."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the layer's tensors for Megatron's dist_checkpointing, cut along `sharded_axes`.

        Raises:
            ValueError: Megatron's dist_checkpointing is not imported.
        """
        state = self.state_dict(prefix="", keep_vars=True)
        return LayerPlacement(sharded_offsets, metadata, self.tp_group).layer(state, self.sharded_axes, prefix)

    def get_extra_state(self) -> None:
        """Return None; the entry exists because Transformer Engine's layers have one, and checkpoints serve both."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state of another kind of layer."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", None)  # checkpoints without it load too
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        plan = self.plan()
        sizes = f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}"
        way = f"{self.path}, batch-invariant" if plan.invariant else self.path
        path = "" if plan.communication == "none" else f", path={way}"
        return f"{sizes}, TP={group_size(self.tp_group)}, communication={plan.communication}{path}"
