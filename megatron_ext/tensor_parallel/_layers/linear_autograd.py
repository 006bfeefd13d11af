"""The autograd function of column- and row-parallel linear layers, with all communication of both.

A tensor is laid out over the tensor-parallel group in one of three ways:
- "replicated": every rank holds all of it;
- "sequence": every rank holds its slice of the first dimension (the tokens);
- "sharded": every rank holds its part of the features. A matmul that sums over them gives its part of the sum.

A column-parallel layer goes from replicated or sequence to sharded, a row-parallel one the other way. The collectives
follow from the layouts alone; each collective of the backward pass is the dual of one forward:

    input         forward      backward                           output        forward          backward
    replicated    -            all-reduce(dx), under dW           replicated    all-reduce       -
    sequence      all-gather   all-gather(x), under dx;           sequence      reduce-scatter   all-gather
                               reduce-scatter(dx), under dW

Where the plan says so, a sequence's all-gather or reduce-scatter and the matmul next to it are one operation through
symmetric memory (`megatron_ext.distributed.symmetric_matmul`). In a backward pass these are the reduce-scatter of dx
and the all-gather of dy.

A gradient that is not needed is not computed, and nothing is communicated or saved for it. The schedule is that of
Megatron-LM (Korthikanti et al., https://arxiv.org/abs/2205.05198): of a sequence-parallel input each rank saves its own
slice only, and gathers the whole again in backward.

Legend: T tokens (all leading dimensions) of all ranks, t of this rank; D input size, N outputs, both of this rank.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.autograd import NOTHING, differentiable_once, without_autocast
from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.distributed.groups import Group, group_rank, group_size
from megatron_ext.distributed.symmetric_matmul import all_gather_matmul, matmul_reduce_scatter
from megatron_ext.numerics import cpu_products
from megatron_ext.numerics.batch_invariance import is_on, product, say_once
from megatron_ext.numerics.tensors import check_plain
from megatron_ext.numerics.tree_sums import sum_of_ranks
from megatron_ext.tensor_parallel._layers import distributed_weights
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import Deferral, add_to_main_grad

ActivationLayout = Literal["replicated", "sequence", "sharded"]

_unsafe_view = torch.ops.aten._unsafe_view.default

_COMMUNICATION = {
    ("replicated", "sharded"): "backward all-reduce",
    ("sequence", "sharded"): "forward all-gather, backward all-gather + reduce-scatter",
    ("sharded", "replicated"): "forward all-reduce",
    ("sharded", "sequence"): "forward reduce-scatter, backward all-gather",
    ("sharded", "sharded"): "none",
}


class LinearPlan(NamedTuple):
    """Layouts, group and options of one parallel linear.

    Attributes:
        group: the ranks that share the weight; None: this rank has all of it.
        input: layout of the input. "sharded" also stands for an input whose gradient is not to be summed.
        output: layout of the output.
        fuse_main_grad: add the weight gradient into `weight.main_grad` (see `megatron_ext.main_grad`).
        deferral: the lists in which weight gradients wait; None: they are computed at once.
        output_dtype: dtype of the output; None: that of the matmul.
        frozen: the weight gets no gradient, even if it asks for one.
        symmetric: fuse matmul and collective, where a layout is "sequence" (and `output_dtype` is None).
        invariant: a token's output has the same bits whatever other tokens there are: `batch_invariant_mode`. Over more
            than two ranks an all-to-all then replaces the sum, and its parts are added in one order, which an
            all-reduce does not promise; a "replicated" output takes an all-gather besides.
        in_pieces: the weight is one that generalized tensor parallelism cuts once more (`distributed_weights`).
    """

    group: Group = None
    input: ActivationLayout = "sharded"
    output: ActivationLayout = "sharded"
    fuse_main_grad: bool = False
    deferral: Deferral | None = None
    output_dtype: torch.dtype | None = None
    frozen: bool = False
    symmetric: bool = False
    invariant: bool = False
    in_pieces: bool = False

    def in_mode(self, config: Any = None) -> "LinearPlan":
        """Return this plan or, if `batch_invariant_mode` is on, the plan that keeps the mode's promise."""
        if not is_on(config):
            return self
        say_once("batch_invariant_mode is on: the tensor-parallel layers take products and sums of one order")
        return self._replace(invariant=True, symmetric=False)

    @property
    def communication(self) -> str:
        """Name the collectives of a call."""
        if group_size(self.group) == 1:
            return "none"
        words = _COMMUNICATION[self.input, self.output]
        if not self.adds_in_order:
            return words
        return words.replace("forward all-reduce", "forward all-to-all + all-gather").replace(
            "forward reduce-scatter", "forward all-to-all"
        )

    @property
    def adds_in_order(self) -> bool:
        """Return whether the ranks' parts of the output are added in one order; two parts have only one."""
        return self.invariant and self.output != "sharded" and group_size(self.group) > 2

    def output_shape(self, x_shape: torch.Size, outputs: int) -> list[int]:
        """Return the shape `[..., N]` of the output for an input `[..., D]`."""
        shape = [*x_shape[:-1], outputs]
        if self.input == "sequence":
            shape[0] *= group_size(self.group)
        if self.output == "sequence":
            shape[0] //= group_size(self.group)
        return shape

    def start_reduce_dgrad(self, dx_TD: Tensor) -> Pending:
        """Start the collective that the input's layout needs for its gradient. `dx_TD` may be overwritten."""
        if self.input == "replicated":
            return collectives.start_all_reduce(dx_TD, self.group, in_place=True)
        if self.input == "sequence":
            return collectives.start_reduce_scatter(dx_TD, self.group)
        return Pending(dx_TD)

    def reduce_output(self, y_TN: Tensor) -> Tensor:
        """Bring this rank's part of the sum into the output's layout. `y_TN` may be overwritten."""
        if self.adds_in_order:
            ranks = group_size(self.group)
            sizes = [y_TN.shape[0] // ranks] * ranks if self.output == "sequence" else None
            return sum_of_ranks(y_TN, y_TN, self.group, sizes)
        if self.output == "replicated":
            return collectives.all_reduce(y_TN, self.group, in_place=True)
        return collectives.reduce_scatter(y_TN, self.group) if self.output == "sequence" else y_TN


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """Compute `x @ weight.T + bias`, `[..., N]`, of `x` `[..., D]` and this rank's shard `[N, D]`, by `plan`.

    The bias is added after the output is reduced. A weight that generalized tensor parallelism cuts once more is
    gathered forward and backward (see `distributed_weights`).

    Raises:
        ValueError: shapes, dtypes or devices don't fit; on every rank, before anything is communicated.
    """
    check_tensor("input", x)
    check_tensor("weight", weight)
    if distributed_weights.is_distributed(weight):
        if plan.deferral is not None:
            raise ValueError(
                "weight gradients are deferred (grad_output_buffer), and generalized tensor parallelism shares out the "
                "weight: its gradient is reduced when it is made; turn defer_embedding_wgrad_compute off"
            )
        plan = plan._replace(fuse_main_grad=False, in_pieces=True)
    if plan.fuse_main_grad:
        main_grad.promise(weight)
    return ParallelLinear.apply(x, weight, bias, plan)


def check_tensor(argument: str, x: Any) -> None:
    """Raise ValueError unless `x` is a plain tensor: no DTensor, and outside of torch.func's transforms."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{argument} is {type(x).__name__}: it must be a tensor of floating numbers; make one by torch.tensor"
        )
    check_plain(argument, x)


class ParallelLinear(torch.autograd.Function):
    """Autograd function of `parallel_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = _autocast_dtype(x) if autocast else x.dtype
        _check(x, weight, bias, plan, dtype, autocast)
        needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and not plan.frozen
        kept = _cast(x, dtype)
        ctx.save_for_backward(kept if needs_w else None, weight if needs_x or needs_w else None)
        ctx.plan, ctx.dtype, ctx.x_shape, ctx.x_dtype = plan, dtype, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Hooks on saved tensors (offloading) hand back another object, without the parameter's attributes.
        ctx.parameter = weight if plan.fuse_main_grad or plan.in_pieces else None

        early_bias = bias if plan.output == "sharded" else None
        with without_autocast(x) if autocast else NOTHING:
            shard = ctx.parameter.materialize_group_for_forward() if plan.in_pieces else weight
            x_tD, w_DN = kept.reshape(-1, x.shape[-1]), _cast(shard, dtype).t()
            if plan.input == "sequence":
                y_tN, _ = _gather_and_multiply(x_tD, w_DN, plan, early_bias)
            elif plan.symmetric and plan.output == "sequence":
                y_tN = matmul_reduce_scatter(x_tD, w_DN, plan.group)
            else:
                y_tN = plan.reduce_output(_multiply(x_tD, w_DN, plan, early_bias))
            if bias is not None and early_bias is None:
                y_tN.add_(bias)
        # Like matmul's output, not a view for autograd, so that callers may change it in place.
        return _unsafe_view(y_tN, plan.output_shape(x.shape, shard.shape[0]))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        plan: LinearPlan = ctx.plan
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        needs_w = needs_w and not plan.frozen
        if plan.in_pieces and needs_w:
            distributed_weights.check_main_grad(ctx.parameter)
        if plan.fuse_main_grad and needs_w:
            main_grad.buffer_of(ctx.parameter)  # raises where it is missing, before anything is communicated

        dx = dw = db = None
        with without_autocast(dy):
            dy_tN = dy.reshape(-1, dy.shape[-1])
            if needs_b:
                db = _cast(dy_tN.sum(0), ctx.bias_dtype)
            if not needs_x and not needs_w:
                return None, None, db, None
            dy_tN = _cast(dy_tN, ctx.dtype)
            now = needs_w and not (plan.deferral is not None and plan.deferral.keep(x, dy))
            x_tD = x.reshape(-1, x.shape[-1]) if now else None
            gathering = None
            if x_tD is not None:
                in_slices = plan.input == "sequence"
                gathering = collectives.start_all_gather(x_tD, plan.group) if in_slices else Pending(x_tD)

            dy_TN, reducing = dy_tN, None
            if needs_x:
                shard = ctx.parameter.materialize_group_for_backward() if plan.in_pieces else weight
                w_ND = _cast(shard, ctx.dtype)
                if plan.output == "sequence":
                    dx_TD, dy_TN = _gather_and_multiply(dy_tN, w_ND, plan)
                    reducing = plan.start_reduce_dgrad(dx_TD)
                elif plan.symmetric and plan.input == "sequence":
                    reducing = Pending(matmul_reduce_scatter(dy_tN, w_ND, plan.group))
                else:
                    reducing = plan.start_reduce_dgrad(cpu_products.mm(dy_tN, w_ND))
            elif plan.output == "sequence":
                dy_TN = collectives.all_gather(dy_tN, plan.group)

            if gathering is not None:
                x_TD = gathering.wait()
                if plan.in_pieces:
                    dw = distributed_weights.reduce_gradient(ctx.parameter, dy_TN, x_TD)
                elif plan.fuse_main_grad:
                    add_to_main_grad(ctx.parameter, dy_TN, x_TD)
                else:
                    dw = _cast(cpu_products.mm(dy_TN.t(), x_TD), weight.dtype)
            if plan.fuse_main_grad and needs_w:
                dw = main_grad.finish(ctx.parameter, weight.dtype)
            if reducing is not None:
                dx = _cast(reducing.wait().view(ctx.x_shape), ctx.x_dtype)
        return dx, dw, db, None


def _multiply(x_TD: Tensor, w_DN: Tensor, plan: LinearPlan, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ w + bias` in the plan's dtype: one wider than the operands' keeps the matmul's full sums."""
    dtype = plan.output_dtype or x_TD.dtype
    if plan.invariant:
        wide = torch.promote_types(dtype, x_TD.dtype)
        return product(x_TD.to(wide), w_DN.to(wide), None if bias is None else bias.to(wide)).to(dtype)
    if dtype == x_TD.dtype:
        return cpu_products.mm(x_TD, w_DN, added=None if bias is None else _cast(bias, dtype))
    if x_TD.is_cuda and dtype == torch.float32:
        y_TN = torch.mm(x_TD, w_DN, out_dtype=dtype)
    else:
        wide = torch.promote_types(dtype, x_TD.dtype)
        y_TN = (x_TD.to(wide) @ w_DN.to(wide)).to(dtype)
    return y_TN if bias is None else y_TN.add_(bias)


def _gather_and_multiply(
    x_tD: Tensor, w_DN: Tensor, plan: LinearPlan, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(x @ w + bias, x)` for all ranks' `x_TD`. On CUDA the own rows are multiplied during the all-gather."""
    if plan.symmetric:
        y_TN, x_TD = all_gather_matmul(x_tD, w_DN, plan.group)
        return y_TN if bias is None else y_TN.add_(bias), x_TD
    gathering = collectives.start_all_gather(x_tD, plan.group)
    if not x_tD.is_cuda or plan.output_dtype is not None or plan.invariant or torch.compiler.is_compiling():
        x_TD = gathering.wait()
        return _multiply(x_TD, w_DN, plan, bias), x_TD
    return _own_rows_first(x_tD, w_DN, plan.group, bias, gathering)


def _own_rows_first(
    x_tD: Tensor, w_DN: Tensor, group: Group, bias: Tensor | None, gathering: Pending
) -> tuple[Tensor, Tensor]:
    t = x_tD.shape[0]
    y_TN = x_tD.new_empty(t * group_size(group), w_DN.shape[1])
    start = t * group_rank(group)
    torch.mm(x_tD, w_DN, out=y_TN[start : start + t])
    x_TD = gathering.wait()
    for rows in (slice(0, start), slice(start + t, None)):
        torch.mm(x_TD[rows], w_DN, out=y_TN[rows])
    return y_TN if bias is None else y_TN.add_(bias), x_TD


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that torch.nn.functional.linear chooses under autocast: autocast's, or an fp64 input's."""
    cast = x.dtype != torch.float64 and x.is_floating_point()
    return torch.get_autocast_dtype(x.device.type) if cast else x.dtype


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, without that call if the dtype is right: it takes ten times as long as the comparison."""
    return x if x.dtype == dtype else x.to(dtype)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, dtype: torch.dtype, autocast: bool
) -> None:
    shape = distributed_weights.shape_of_shard(weight) if plan.in_pieces else weight.shape
    if len(shape) != 2 or x.dim() == 0 or x.shape[-1] != shape[1]:
        raise ValueError(
            f"input is {tuple(x.shape)} and weight {tuple(shape)}: a linear layer takes [..., D] and [N, D]; "
            f"pass an input whose last dimension is {shape[-1]} (this rank's share of the features if they are "
            f"split over the ranks)"
        )
    device = x.device
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, input on {device}: both must be on one device; move one")
        if tensor.dtype != dtype and dtype == x.dtype and not autocast:
            raise ValueError(
                f"{name} is {tensor.dtype}, input {x.dtype}: both must have one dtype; cast one, or use torch.autocast"
            )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}: it must be [{shape[0]}], one number an output")
    ranks = group_size(plan.group)
    if ranks > 1 and "sequence" in (plan.input, plan.output):
        if x.dim() == 1:
            raise ValueError(
                f"input is {tuple(x.shape)}: with sequence parallelism its first dimension is the sequence; "
                f"pass [S, ..., D], or turn sequence_parallel off"
            )
        if plan.output == "sequence" and x.shape[0] % ranks:
            raise ValueError(
                f"input has sequence length {x.shape[0]}: with sequence parallelism it must divide by the {ranks} "
                f"ranks; pad it to {-(-x.shape[0] // ranks) * ranks}"
            )
