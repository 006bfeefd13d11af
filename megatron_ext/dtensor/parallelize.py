"""A transformers model made parallel, in place: our attention, a tensor-parallel plan, recomputation, FSDP2."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megatron_ext.distributed.same_on_ranks import require_same
from megatron_ext.dtensor.attention import use_attention
from megatron_ext.dtensor.decoder import decoder_layers, import_transformers, is_tied, tie
from megatron_ext.dtensor.experts import reach_all
from megatron_ext.dtensor.layers import Layout
from megatron_ext.dtensor.output_head import head_rule
from megatron_ext.dtensor.output_reading import register
from megatron_ext.dtensor.plans import Chosen, Plan, choose_plan


class _Wrapping(NamedTuple):
    """How each layer, and then the model, is wrapped: recomputation and FSDP2."""

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


def _parallelize_qwen(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cp_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """`_parallelize_model` for a `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, with FSDP2's policies given."""
    wrapping = _Wrapping(dp_mesh, mp_policy, offload_policy, activation_checkpointing)
    return _parallelize_with(model, wrapping, tp_mesh, cp_mesh, sequence_parallel)


def _parallelize_gemma3(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cp_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """`_parallelize_model` for a `Gemma3ForCausalLM`, or the text tower of a `Gemma3ForConditionalGeneration`."""
    wrapping = _Wrapping(dp_mesh, mp_policy, offload_policy, activation_checkpointing)
    return _parallelize_with(model, wrapping, tp_mesh, cp_mesh, sequence_parallel)


_BY_NAME: dict[str, Callable[..., nn.Module]] = {
    "LlamaForCausalLM": _parallelize_llama,
    "Qwen2ForCausalLM": _parallelize_qwen,
    "Qwen3ForCausalLM": _parallelize_qwen,
    "Gemma3ForCausalLM": _parallelize_gemma3,
    "Gemma3ForConditionalGeneration": _parallelize_gemma3,
}


def parallelize_functions() -> dict[type, Callable[..., nn.Module]]:
    """transformers' model classes and the functions that parallelize them; imports these classes."""
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
    custom_parallel_plan: Mapping[str, Any] | str | None = None,
    cp_mesh: DeviceMesh | None = None,
    expert_parallel: bool = False,
) -> nn.Module:
    """Shard `model` over tensor-parallel, context-parallel and data-parallel ranks, in place.

    A model whose parts are all understood (`megatron_ext.dtensor.layers`) gets our attention and plan, with sequence,
    context and expert parallelism. Any other one gets transformers' own `tp_plan` and keeps its attention. With both
    `causal_lm_loss` and `causal_lm_log_probs` work. Tied embeddings stay tied. The signature is NeMo-RL's, with
    `cp_mesh` and `expert_parallel` after it.

    Args:
        model: a transformers model with an lm head, on any device (also meta), the same on every rank.
        dp_mesh: ranks that share the parameters by FSDP2; with context parallelism data- and context-parallel ranks
            together, `mesh["dp", "cp"]._flatten()`. Gradients are averaged over it.
        tp_mesh: 1-D, of the same root mesh as `dp_mesh`.
        param_dtype: dtype of parameters and activations in forward and backward; gradients are reduced in fp32.
        sequence_parallel: shard the residual stream over `tp_mesh` too; no effect on one rank. Beside a custom plan:
            whether that one does.
        activation_checkpointing: keep the inputs of layers only, and compute layers again in backward.
        cpu_offload: parameters, gradients and optimizer states live on the CPU.
        custom_parallel_plan: module names to parallel styles, or the import path of that, instead of the plan.
        cp_mesh: 1-D, ranks that share each sequence in the zigzag layout; None: sequences are whole.
        expert_parallel: each rank of `tp_mesh` holds whole experts of a mixture, instead of a piece of every one.

    Returns:
        `model`. `model(input_ids)` gives logits, at several tensor-parallel ranks a DTensor `[B, S, V]` sharded by V.

    Raises:
        ValueError: sizes that do not divide by the tensor-parallel ranks; context, sequence or expert parallelism of a
            model with parts that are not understood; tensor parallelism of one that transformers has no plan for
            either; a `dp_mesh` without the context-parallel ranks.
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


def _parallelize_with(
    model: nn.Module,
    wrapping: _Wrapping,
    tp_mesh: DeviceMesh,
    cp_mesh: DeviceMesh | None,
    sequence_parallel: bool,
    expert_parallel: bool = False,
    custom_parallel_plan: Mapping[str, Any] | str | None = None,
) -> nn.Module:
    cp = 1 if cp_mesh is None else cp_mesh.size()
    tp = 1 if tp_mesh is None else tp_mesh.size()
    layout = Layout(tp, cp, sequence_parallel, expert_parallel)
    chosen, fault = Chosen({}, None), None
    try:
        _refuse_parallel(model)
        chosen = choose_plan(model, layout, custom_parallel_plan)
    except Exception as error:  # raised below, where the other ranks hear of it
        fault = error
    options = (layout, wrapping.mp_policy, wrapping.offload_policy, wrapping.activation_checkpointing)
    _require_same_model(model, chosen.plan, options, (tp_mesh, wrapping.dp_mesh), fault)
    if chosen.attends:
        group = cp_mesh.get_group() if cp_mesh is not None and cp > 1 else None
        use_attention(model, group, tp, sequence_parallel)
    return _shard(model, chosen.plan, tp_mesh, wrapping)


def _refuse_parallel(model: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has parameters that are DTensors: it is parallel already; parallelize a model "
            f"once, before FSDP2 or any other sharding"
        )


def _require_same_model(
    model: nn.Module, plan: Plan, options: Any, meshes: Sequence[DeviceMesh | None], fault: Exception | None
) -> None:
    """Raise on every rank unless all have the same of these, and none a fault; see `require_same`."""
    groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
    kinds = [(name, p.shape, p.dtype, p.requires_grad, p.is_meta) for name, p in model.named_parameters()]
    facts = {
        "the model's class or parameters": (type(model).__qualname__, kinds),
        "the model's weights": _some_weights(model) if fault is None else None,
        "the plan": [(name, type(style).__qualname__, _settings(style)) for name, style in plan.items()],
        "the options": options,
    }
    devices = [mesh.device_type for mesh in meshes if mesh is not None]
    require_same("parallelize", facts, groups, (*devices, "cpu")[0], fault)


def _settings(value: Any) -> Any:
    """What tells a parallel style's settings apart, on every rank the same: no addresses of functions and objects."""
    if isinstance(value, ParallelStyle):
        return [(name, _settings(setting)) for name, setting in vars(value).items()]
    if isinstance(value, tuple | list):
        return [_settings(one) for one in value]
    plain = value is None or isinstance(value, bool | int | float | str | Placement)
    return value if plain else type(value).__qualname__


def _some_weights(model: nn.Module) -> list[float]:
    """A few elements of every parameter, evenly spread: enough to tell weights that were drawn from other seeds."""
    samples = []
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().flatten()
            samples.append(flat[:: -(-flat.numel() // 8)].double())
    return torch.cat([sample.cpu() for sample in samples]).tolist() if samples else []


def _shard(model: nn.Module, plan: Plan, tp_mesh: DeviceMesh, wrapping: _Wrapping) -> nn.Module:
    tied, rule = is_tied(model), head_rule(model)
    if tp_mesh.size() > 1:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        parallelize_module(model, tp_mesh, plan)
        for name in frozen:  # replicated parameters come back as trainable ones
            model.get_parameter(name).requires_grad_(False)
    if tied:  # sharding, like the meta device, gave each module a parameter of its own
        tie(model)
    for module in model.modules():
        if isinstance(experts := getattr(module, "experts", None), nn.ModuleList):
            reach_all(module, experts)
    layers = decoder_layers(model)
    # Between layers activations stay in param_dtype; only what leaves the model has output_dtype.
    inner_policy = dataclasses.replace(wrapping.mp_policy, output_dtype=None)
    where: dict[str, Any] = {"mesh": wrapping.dp_mesh, "offload_policy": wrapping.offload_policy}
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer) if wrapping.activation_checkpointing else layer
        fully_shard(layers[i], mp_policy=inner_policy, **where)
    fully_shard(model, mp_policy=wrapping.mp_policy, **where)
    register(model, rule)
    return model
