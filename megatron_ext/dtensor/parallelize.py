"""A transformers model made parallel, in place: our attention, a tensor-parallel plan, recomputation, FSDP2."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.distributed.same_on_ranks import require_same
from megatron_ext.dtensor.attention import use_attention
from megatron_ext.dtensor.decoder import (
    decoder_layers,
    import_transformers,
    is_tied,
    output_head_path,
    require_model,
    tie,
)
from megatron_ext.dtensor.experts import reach_all
from megatron_ext.dtensor.layers import ParallelSizes
from megatron_ext.dtensor.output.hidden_states_or_logits import register
from megatron_ext.dtensor.plans import CustomPlan, Plan, choose_plan
from megatron_ext.dtensor.pretrained.saving import Ranks, save_as_transformers
from megatron_ext.dtensor.replicated_parameters import check_first_gradients, tell_of_cut_parameters
from megatron_ext.head.layer_facts import local_shard


class _Wrapping(NamedTuple):
    """Options of the wrapping of each layer, and then of the model: recomputation and FSDP2."""

    dp_mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    activation_checkpointing: bool


def _parallelize_llama(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cp_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """`_parallelize_model` for a `LlamaForCausalLM`, with FSDP2's policies given."""
    wrapping = _Wrapping(dp_mesh, mp_policy, offload_policy, activation_checkpointing)
    return _parallelize_with(model, wrapping, tp_mesh, cp_mesh, sequence_parallel)


_parallelize_qwen = _parallelize_llama
"""`_parallelize_llama` for a `Qwen2ForCausalLM` or `Qwen3ForCausalLM`."""

_parallelize_gemma3 = _parallelize_llama
"""`_parallelize_llama` for a `Gemma3ForCausalLM`, or the text tower of a `Gemma3ForConditionalGeneration`."""

_BY_NAME: dict[str, Callable[..., nn.Module]] = {
    "LlamaForCausalLM": _parallelize_llama,
    "Qwen2ForCausalLM": _parallelize_qwen,
    "Qwen3ForCausalLM": _parallelize_qwen,
    "Gemma3ForCausalLM": _parallelize_gemma3,
    "Gemma3ForConditionalGeneration": _parallelize_gemma3,
}


def parallelize_functions() -> dict[type, Callable[..., nn.Module]]:
    """Return transformers' model classes, which this imports, and the functions that parallelize them."""
    transformers = import_transformers()
    return {getattr(transformers, name): function for name, function in _BY_NAME.items()}


def _parallelize_model(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    custom_parallel_plan: CustomPlan = None,
    cp_mesh: DeviceMesh | None = None,
    expert_parallel: bool = False,
) -> nn.Module:
    """Shard `model` over tensor-parallel, context-parallel and data-parallel ranks, in place: `parallelize`, by meshes.

    The signature is NeMo-RL's, with `cp_mesh` and `expert_parallel` after it.

    Args:
        model, activation_checkpointing, cpu_offload, expert_parallel: as for `parallelize`.
        dp_mesh: ranks that share the parameters by FSDP2; with context parallelism data- and context-parallel ranks
            together, `mesh["dp", "cp"]._flatten()`. Gradients are averaged over the mesh.
        tp_mesh: 1-D, of the same root mesh as `dp_mesh`.
        param_dtype, custom_parallel_plan: `dtype` and `plan` of `parallelize`.
        sequence_parallel: as for `parallelize`; no effect on one rank. With a custom plan: whether that plan does it.
        cp_mesh: 1-D, ranks that share each sequence in the zigzag layout; None: each rank has whole sequences.

    Raises:
        ValueError: sizes that do not divide by the tensor-parallel ranks; context, sequence or expert parallelism of a
            model with parts that are not understood; tensor parallelism of such a model, if transformers has no plan
            for it either; a `dp_mesh` without the context-parallel ranks.
    """
    if cp_mesh is not None and not set(cp_mesh.mesh.flatten().tolist()) <= set(dp_mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"dp_mesh {dp_mesh} lacks ranks of cp_mesh {cp_mesh}: these ranks hold the same parameters and must add "
            f"up their gradients; pass mesh['dp', 'cp']._flatten() as dp_mesh"
        )
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=False) if cpu_offload else OffloadPolicy()
    wrapping = _Wrapping(dp_mesh, mp_policy, offload_policy, activation_checkpointing)
    return _parallelize_with(
        model, wrapping, tp_mesh, cp_mesh, sequence_parallel, expert_parallel, custom_parallel_plan
    )


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    plan: CustomPlan = None,
    expert_parallel: bool = False,
) -> nn.Module:
    """Shard a causal language model of transformers over the ranks of `mesh`, in place.

    FSDP2 runs over "dp", context parallelism over "cp", tensor parallelism over "tp". A model whose parts are all
    understood (`megatron_ext.dtensor.layers`) gets our attention and plan, with sequence, context and expert
    parallelism; any other model gets transformers' own `tp_plan` and keeps its attention: see docs/hugging_face.md.
    Tied embeddings stay tied. `causal_lm_loss` and `use_fused_loss` compute the model's loss without logits.

    Args:
        model: a transformers model with an lm head, on any device (also meta), the same on every rank: draw its weights
            from the same seed, or load them (`from_pretrained`). Parameters keep their dtype, in which the optimizer
            updates them: float32 as a rule.
        mesh: all ranks of the job, with any of the dims "dp", "cp" and "tp", in any order. `dp` ranks get different
            rows of the batch; `cp` and `tp` ranks get the same rows.
        dtype: dtype of parameters and activations in forward and backward; gradients are reduced in fp32.
        sequence_parallel: shard the residual stream over "tp" too.
        activation_checkpointing: keep the inputs of layers only, and compute layers again in backward.
        cpu_offload: parameters, gradients and optimizer states live on the CPU.
        plan: a mapping of module names to parallel styles, or its import path, instead of the plan that is found.
        expert_parallel: each tensor-parallel rank holds whole experts of a mixture, instead of a piece of every one.

    Returns:
        `model`. `model(input_ids)` gives logits `[B, S, V]`, with several tensor-parallel ranks a DTensor sharded by V.

    Communicates: one small all-gather a dim, which compares model, plan and options; then the collectives that shard
    the weights.

    Raises:
        ValueError: on every rank: dims of other names; a model that is parallel already, or that cannot have the
            parallelism asked for; ranks that differ in model, weights, plan or options.
    """
    mesh = with_all_dims(mesh)
    require_model(model)
    return _parallelize_model(
        model,
        mesh["dp", "cp"]._flatten("dp_cp"),
        mesh["tp"],
        dtype,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        cpu_offload=cpu_offload,
        custom_parallel_plan=plan,
        cp_mesh=mesh["cp"],
        expert_parallel=expert_parallel,
    )


_DIMS = ("dp", "cp", "tp")


def with_all_dims(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh` with the dims "dp", "cp", "tp" in this order; a dim that `mesh` lacks gets one rank."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is {mesh!r}: it must be a DeviceMesh of all ranks; make it as "
            f"init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), under torchrun"
        )
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in _DIMS for name in names):
        raise ValueError(
            f"mesh has dims {list(names)}: they must be named, of {list(_DIMS)}; make it as "
            f"init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp'))"
        )
    if tuple(names) == _DIMS:
        return mesh
    ordered = mesh.mesh.permute([names.index(name) for name in _DIMS if name in names])
    sizes = [mesh.size(names.index(name)) if name in names else 1 for name in _DIMS]
    ranks = ordered.reshape(sizes).clone(memory_format=torch.contiguous_format)  # torch 2.11 orders dims by strides
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=_DIMS)


def _parallelize_with(
    model: nn.Module,
    wrapping: _Wrapping,
    tp_mesh: DeviceMesh,
    cp_mesh: DeviceMesh | None,
    sequence_parallel: bool,
    expert_parallel: bool = False,
    custom_parallel_plan: CustomPlan = None,
) -> nn.Module:
    cp = 1 if cp_mesh is None else cp_mesh.size()
    layout = ParallelSizes(tp_mesh.size(), cp, sequence_parallel, expert_parallel)
    plan: Plan = {}
    unknown = fault = None
    try:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has parameters that are DTensors: it is parallel already; parallelize a model "
                f"once, before FSDP2 or any other sharding"
            )
        plan, unknown = choose_plan(model, layout, custom_parallel_plan)
    except Exception as error:  # raised below, on the other ranks too
        fault = error
    ranks = Ranks.of((tp_mesh, wrapping.dp_mesh))
    require_same_model(model, plan, (layout, *wrapping[1:]), ranks, fault)
    if unknown is None:
        group = cp_mesh.get_group() if cp_mesh is not None and cp > 1 else None
        use_attention(model, group, layout.tp, sequence_parallel)
    _shard(model, plan, tp_mesh, wrapping)
    if layout.tp > 1 and (unknown is not None or custom_parallel_plan is not None):
        check_first_gradients(model, decoder_layers(model), tp_mesh.get_group())
        tell_of_cut_parameters(model)
    save_as_transformers(model, ranks)
    return model


def _shard(model: nn.Module, plan: Plan, tp_mesh: DeviceMesh, wrapping: _Wrapping) -> None:
    tied = is_tied(model)
    if tp_mesh.size() > 1:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        parallelize_module(model, tp_mesh, plan)
        for name in frozen:  # torch makes replicated parameters trainable
            model.get_parameter(name).requires_grad_(False)
    if tied:  # sharding, like the meta device, gave each module a parameter of its own
        tie(model)
    for module in model.modules():
        if isinstance(experts := getattr(module, "experts", None), nn.ModuleList):
            reach_all(module, experts)
    head: Any = model.get_submodule(output_head_path(model))
    vocabulary = local_shard(head.weight, 0)[1]
    layers = decoder_layers(model)
    # Between layers activations stay in param_dtype; only the model's outputs have output_dtype.
    inner_policy = dataclasses.replace(wrapping.mp_policy, output_dtype=None)
    where: dict[str, Any] = {"mesh": wrapping.dp_mesh, "offload_policy": wrapping.offload_policy}
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer) if wrapping.activation_checkpointing else layer
        fully_shard(layers[i], mp_policy=inner_policy, **where)
    fully_shard(model, mp_policy=wrapping.mp_policy, **where)
    register(model, None if vocabulary is UNSHARDED else vocabulary)


def require_same_model(model: nn.Module, plan: Plan, options: Any, ranks: Ranks, fault: Exception | None) -> None:
    """Raise on all `ranks` unless model, plan and options are the same on all, and none has a fault: `require_same`."""
    kinds = [(name, p.shape, p.dtype, p.requires_grad, p.is_meta) for name, p in model.named_parameters()]
    facts = {
        "the model's class or parameters": (type(model).__qualname__, kinds),
        "the model's weights": _some_weights(model) if fault is None else None,
        "the plan": [(name, type(style).__qualname__, _settings(style)) for name, style in plan.items()],
        "the options": options,
    }
    require_same("parallelize", facts, *ranks, fault)


def _settings(value: Any) -> Any:
    """Return a parallel style's settings in a form that is the same on every rank: without addresses of objects."""
    if isinstance(value, ParallelStyle):
        return [(name, _settings(setting)) for name, setting in vars(value).items()]
    if isinstance(value, tuple | list):
        return [_settings(one) for one in value]
    plain = value is None or isinstance(value, bool | int | float | str | Placement)
    return value if plain else type(value).__qualname__


def _some_weights(model: nn.Module) -> list[float]:
    """Return a few elements of every parameter, evenly spread, which differ for weights drawn from other seeds."""
    samples = []
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().flatten()
            samples.append(flat[:: -(-flat.numel() // 8)].double())
    return torch.cat([sample.cpu() for sample in samples]).tolist() if samples else []
