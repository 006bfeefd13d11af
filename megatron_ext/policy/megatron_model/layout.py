"""The parallel layout of a policy's GPTModel: valid sizes, Megatron's process groups, and its configuration."""

from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_ext.policy.config import Settings
from megatron_ext.policy.megatron_model import llama


def check_layout(settings: Settings, config: Any) -> None:
    """Raise ValueError unless the model of transformers' `config` can be cut as the settings ask."""
    pipeline = settings.pipeline
    uneven = pipeline.first_layers is not None or pipeline.last_layers is not None
    stages = 1 if uneven else pipeline.stages * pipeline.virtual
    llama.check(config, settings.tensor_parallel_size, stages, settings.expert_parallel_size)
    if llama.experts(config) and settings.faults_with_experts:
        raise ValueError(f"{config.model_type} has experts: {'; '.join(settings.faults_with_experts)}")
    if llama.experts(config) and settings.tensor_parallel_size > 1 and not settings.sequence_parallel:
        raise ValueError(
            f"{config.model_type} has experts, and megatron_cfg.sequence_parallel is False with "
            f"tensor_model_parallel_size {settings.tensor_parallel_size}: experts get the tokens of each "
            f"rank; set sequence_parallel to True"
        )


def join_groups(settings: Settings, on_exit: ExitStack) -> None:
    """Make Megatron's process groups, if there are none (`on_exit` destroys them); check the sizes of those there."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_parallel_size,
            pipeline_model_parallel_size=settings.pipeline.stages,
            virtual_pipeline_model_parallel_size=_above_1(settings.pipeline.virtual),
            context_parallel_size=settings.context_parallel_size,
            expert_model_parallel_size=settings.expert_parallel_size,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        on_exit.callback(parallel_state.destroy_model_parallel)
    asked = {
        "tensor": (settings.tensor_parallel_size, parallel_state.get_tensor_model_parallel_world_size()),
        "context": (settings.context_parallel_size, parallel_state.get_context_parallel_world_size()),
        "pipeline": (settings.pipeline.stages, parallel_state.get_pipeline_model_parallel_world_size()),
        "virtual pipeline": (
            settings.pipeline.virtual,
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        ),
        "expert": (settings.expert_parallel_size, parallel_state.get_expert_model_parallel_world_size()),
    }
    for name, (wanted, found) in asked.items():
        if wanted != found:
            raise ValueError(
                f"megatron_cfg asks for {name} parallel size {wanted}, and Megatron's groups in this process are of "
                f"{found}: a process has one set of groups; shut the other worker down first, or give both workers "
                "the same sizes"
            )


def transformer_config(settings: Settings, config: Any) -> TransformerConfig:
    """Megatron's configuration of transformers' `config`, in the layout that the settings ask for."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    pipeline = settings.pipeline
    return TransformerConfig(
        **llama.transformer_arguments(config),
        **(recompute if settings.activation_checkpointing else {}),
        tensor_model_parallel_size=settings.tensor_parallel_size,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=_above_1(pipeline.virtual),
        num_layers_in_first_pipeline_stage=pipeline.first_layers,
        num_layers_in_last_pipeline_stage=pipeline.last_layers,
        pipeline_dtype=torch.float32,  # the dtype of the residual stream under autocast
        # Send shapes along, but not with virtual stages: there two ranks of Megatron's mix up the shapes they exchange.
        variable_seq_lengths=pipeline.stages > 1 and pipeline.virtual == 1,
        overlap_p2p_comm=pipeline.virtual > 1,
        batch_p2p_comm=pipeline.virtual == 1,
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_parallel_size,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",  # Megatron's default refuses shapes that differ
        sequence_parallel=settings.sequence_parallel and settings.tensor_parallel_size > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _above_1(size: int) -> int | None:
    return size if size > 1 else None
