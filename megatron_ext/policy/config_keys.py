"""The keys of NeMo-RL's policy configuration: read here, without influence on numbers, or refused unless off.

A key that is in none of these tables is refused: misspelt, it would leave its option at the default without a word.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

PARALLEL_KEYS = ("dtensor_cfg", "megatron_cfg")


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _each(section: str, reason: str, names: str) -> dict[str, str]:
    return {section + name: reason for name in names.split()}


# Keys that the worker reads, by section; "" is the configuration itself.
READ: dict[str, tuple[str, ...]] = {
    "": _names(
        "model_name hf_config_overrides precision train_global_batch_size train_micro_batch_size "
        "logprob_batch_size max_grad_norm seed refit_buffer_bytes bits logit_dtype "
        "skip_masked_tokens"
    ),
    "dtensor_cfg": _names(
        "enabled tensor_parallel_size context_parallel_size expert_parallel_size sequence_parallel "
        "cpu_offload activation_checkpointing custom_parallel_plan batch_invariant_mode"
    ),
    "megatron_cfg": _names(
        "enabled tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage expert_model_parallel_size "
        "sequence_parallel activation_checkpointing batch_invariant_mode"
    ),
    "dynamic_batching": ("enabled", "train_mb_tokens", "logprob_mb_tokens"),
    "sequence_packing": ("enabled", "train_mb_tokens", "logprob_mb_tokens"),
    "generation": _names("temperature top_k top_p max_new_tokens stop_token_ids stop_strings bad_words _pad_token_id"),
    "reward_model_cfg": ("enabled", "reward_model_type"),
    "optimizer": ("name", "kwargs"),
    "scheduler": ("name", "kwargs", "milestones"),
    "dtensor_cfg.automodel_kwargs": (),
    "dtensor_cfg.automodel_kwargs.backend": (),
    "dtensor_cfg.moe_parallelizer": (),
    "megatron_cfg.distributed_data_parallel_config": (),
}

_MEMORY = "it bounds memory"
_SPEED = "it chooses among ways to compute the same"
_GENERATOR = "the generator reads it"
_PACKING = "losses do not depend on how rows are put together"

# By key, the reason why no number depends on its value.
WITHOUT_INFLUENCE: dict[str, str] = {
    "tokenizer": "text becomes token ids outside of the worker",
    "max_total_sequence_length": "rows are made, and cut, outside of the worker",
    "make_sequence_length_divisible_by": "the worker pads rows itself, and padding does not count",
    "generation_batch_size": _MEMORY,
    "logprob_chunk_size": _MEMORY,
    "offload_optimizer_for_logprob": _MEMORY,
    "refit_buffer_size_gb": _MEMORY + " of a refit; refit_buffer_bytes does so here",
    "disable_modelopt_layer_spec": "it changes quantised models alone, which are refused",
    "dtensor_cfg._v2": "there is one worker here",
    "dtensor_cfg.defer_fsdp_grad_sync": _SPEED,
    "dtensor_cfg.clear_cache_every_n_steps": _MEMORY,
    "dtensor_cfg.automodel_kwargs.force_hf": "models are always those of transformers",
    "dtensor_cfg.automodel_kwargs.use_liger_kernel": _SPEED,
    "dtensor_cfg.automodel_kwargs.use_sdpa_patching": _SPEED,
    "dtensor_cfg.automodel_kwargs.attn_implementation": _SPEED,
    **_each(
        "dtensor_cfg.automodel_kwargs.backend.",
        _SPEED,
        "_target_ attn linear rms_norm experts dispatcher enable_deepep enable_fsdp_optimizations rope_fusion",
    ),
    "dtensor_cfg.automodel_kwargs.backend.enable_hf_state_dict_adapter": "weights have transformers' names always",
    **_each("dtensor_cfg.moe_parallelizer.", _MEMORY, "ignore_router_for_ac reshard_after_forward wrap_outer_model"),
    **_each(
        "megatron_cfg.",
        _MEMORY,
        "empty_unused_memory_level recompute_granularity recompute_modules "
        "fine_grained_activation_offloading offload_modules clear_memory_caches_before_refit "
        "fused_linear_logprobs_chunk_size",
    ),
    **_each(
        "megatron_cfg.",
        _SPEED,
        "apply_rope_fusion bias_activation_fusion gradient_accumulation_fusion "
        "use_fused_weighted_squared_relu use_fused_linear_logprobs attention_backend "
        "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps moe_permute_fusion "
        "moe_grouped_gemm moe_token_dispatcher_type moe_shared_expert_overlap moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_hybridep_num_sms hybridep_num_ranks_per_nvlink_domain "
        "hybridep_use_mnnvl use_gloo_process_groups",
    ),
    "megatron_cfg.defer_fp32_logits": "the head computes in float32, and logit_dtype says what it rounds to",
    "megatron_cfg.pipeline_dtype": "stages pass float32 on",
    "megatron_cfg.converter_type": "weights have transformers' names always",
    "megatron_cfg.force_reconvert_from_hf": "weights are always read as transformers has them",
    "megatron_cfg.checkpoint": "it says how files are written; the worker has a format of its own",
    "megatron_cfg.moe_per_layer_logging": "it adds metrics",
    "megatron_cfg.track_moe_metrics": "it adds metrics",
    **_each("megatron_cfg.", "mtp_num_layers is 0", "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads"),
    **_each(
        "megatron_cfg.distributed_data_parallel_config.",
        _SPEED,
        "overlap_grad_reduce overlap_param_gather average_in_collective data_parallel_sharding_strategy",
    ),
    "dynamic_batching.sequence_length_round": _PACKING,
    **_each("sequence_packing.", _PACKING, "algorithm microbatch_order sequence_length_round fuse_loss"),
    **_each(
        "generation.",
        _GENERATOR,
        "backend model_name val_temperature val_top_p val_top_k colocated port_range_low "
        "port_range_high use_async_rollouts refit_transport refit_cfg real_quant "
        "real_quant_ignore real_quant_export_cpu_offload quant_cfg vllm_cfg vllm_kwargs "
        "sglang_cfg trtllm_cfg trtllm_kwargs dynamo_cfg mcore_generation_config "
        "_mtp_weights_from_refit _debug_payload_metrics",
    ),
}

_ALL_TRAIN = "all weights train; leave it out, or make a model_name function whose model has adapters or frozen weights"
_NO_QUANTISATION = "the worker quantises nothing; leave it out"
_OWN_OPTIMIZER = (
    "the worker reads 'optimizer' and 'scheduler' beside megatron_cfg, as DTensorPolicyWorker does; set it there"
)
_DTENSORS = "only DTensorPolicyWorker reads it; leave it out"
_NO_SUCH_RANKS = (
    (None, 1),
    "this policy has no such parallelism: raise the tensor parallel size to save memory, and set it to 1",
)
_ENVIRONMENT = "the worker sets no variables of its process; pass env_vars to RayPolicy, or set them at the start"

# By key, its rule and fix: refused unless the value is off (None, False, 0, empty, or `enabled: False`).
ONLY_OFF: dict[str, str] = {
    "draft": "there is no draft model to train; set draft.enabled to False",
    "router_replay": "routes are not replayed; set router_replay.enabled to False",
    "is_vlm": "the text tower alone is trained; leave it out",
    "pretrained_checkpoint": "weights are read from model_name; name that folder there",
    "dequantize_base_checkpoint": _NO_QUANTISATION,
    "fsdp_offload_enabled": "it is dtensor_cfg.cpu_offload now; set that",
    "activation_checkpointing_enabled": "it is dtensor_cfg.activation_checkpointing now; set that",
    **_each("quant_", _NO_QUANTISATION, "cfg calib_data calib_size batch_size sequence_length"),
    "dtensor_cfg.lora_cfg": _ALL_TRAIN,
    "dtensor_cfg.env_vars": _ENVIRONMENT,
    "dtensor_cfg.automodel_kwargs.freeze_config": _ALL_TRAIN,
    "dtensor_cfg.automodel_kwargs.backend.fake_balanced_gate": "routes are the router's own; leave it out",
    "dtensor_cfg.automodel_kwargs.backend.gate_precision": "routers compute in the precision; leave it out",
    "dtensor_cfg.moe_parallelizer.lm_head_precision": "the head computes as 'logit_dtype' and 'bits' say; set those",
    "megatron_cfg.cpu_offload": _DTENSORS,
    "megatron_cfg.custom_parallel_plan": _DTENSORS,
    "megatron_cfg.peft": _ALL_TRAIN,
    "megatron_cfg.freeze_config": _ALL_TRAIN,
    **_each(
        "megatron_cfg.",
        _ALL_TRAIN,
        "freeze_vision_model freeze_vision_projection freeze_sound_encoder "
        "freeze_sound_projection radio_force_cpe_eval_mode",
    ),
    "megatron_cfg.env_vars": _ENVIRONMENT,
    "megatron_cfg.fp8_cfg": "the model computes in 'precision'; set fp8_cfg.enabled to False",
    "megatron_cfg.model_overrides": "the model is transformers' config; change that by hf_config_overrides",
    "megatron_cfg.mtp_num_layers": "there are no layers for later tokens; set it to 0",
    "megatron_cfg.optimizer": _OWN_OPTIMIZER,
    "megatron_cfg.scheduler": _OWN_OPTIMIZER,
    "megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": "weights are not sharded by it; set it to False",
}

# By key, its values, and the rule and fix for any other one, which is refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtensor_cfg.pipeline_model_parallel_size": _NO_SUCH_RANKS,
    "dtensor_cfg.virtual_pipeline_model_parallel_size": _NO_SUCH_RANKS,
    "dtensor_cfg.expert_model_parallel_size": _NO_SUCH_RANKS,
    "dtensor_cfg.expert_tensor_parallel_size": _NO_SUCH_RANKS,
    "megatron_cfg.expert_tensor_parallel_size": _NO_SUCH_RANKS,
    "megatron_cfg.expert_parallel_size": (
        (None, 1),
        "expert_model_parallel_size is the key that shares experts out; leave this one out, or set it to 1",
    ),
    "dtensor_cfg.dp_replicate_size": ((None, 1), "weights are sharded over all data-parallel ranks; set it to 1"),
    "megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32": (
        (None, True),
        "gradients are reduced in float32; set it to True",
    ),
}

# Like `ONLY`, for models with experts; for other models these keys have no effect.
OF_EXPERTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "megatron_cfg.freeze_moe_router": ((None, False), "routers train; set it to False"),
    "megatron_cfg.moe_router_dtype": ((None, "fp32"), "routers compute in float32; set it to 'fp32'"),
    "megatron_cfg.moe_router_load_balancing_type": ((None, "none"), "no loss balances experts; set it to 'none'"),
    "megatron_cfg.moe_aux_loss_coeff": ((None, 0), "no loss balances experts; set it to 0"),
    "megatron_cfg.moe_router_bias_update_rate": ((None, 0), "experts have no bias; set it to 0.0"),
    "megatron_cfg.moe_router_enable_expert_bias": ((None, False), "experts have no bias; set it to False"),
}

_HARMLESS_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST"}


def check_keys(config: Mapping[str, Any], parallel_key: str) -> tuple[str, ...]:
    """Raise ValueError unless every key of `config` is read, without influence, or off.

    `parallel_key`: the section of this backend; of the other one only `enabled` is looked at.

    Returns:
        A sentence for each value that is wrong for models with experts, and harmless for others.
    """
    for section in PARALLEL_KEYS:
        enabled, own = (config.get(section) or {}).get("enabled"), section == parallel_key
        if enabled is not None and enabled is not own:
            raise ValueError(
                f"{section}.enabled is {enabled!r}: this worker reads only {parallel_key}; set it to {own}, or use the "
                f"other worker class"
            )
    return tuple(_faults_with_experts(config, "", parallel_key))


def _faults_with_experts(section: Mapping[str, Any], path: str, parallel_key: str) -> list[str]:
    later: list[str] = []
    for key, value in section.items():
        where = f"{path}.{key}" if path else str(key)
        if where in PARALLEL_KEYS and where != parallel_key:
            continue
        if where in READ:
            several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            entries = value if where == "scheduler" and several else [value]
            for entry in entries:
                if entry is None:
                    continue
                if not isinstance(entry, Mapping):
                    raise ValueError(f"{where} is {entry!r}: it must be a mapping of keys to values; correct it")
                later += _faults_with_experts(entry, where, parallel_key)
        elif where in OF_EXPERTS:
            values, fix = OF_EXPERTS[where]
            later += [] if _number(value) in values else [f"{where} is {value!r}, and {fix}"]
        elif where in ONLY:
            values, fix = ONLY[where]
            if value not in values:
                raise ValueError(f"{where} is {value!r}: {fix}")
        elif where in ONLY_OFF:
            if not _is_off(value) and not (key == "env_vars" and value.keys() <= _HARMLESS_VARIABLES):
                raise ValueError(f"{where} is {value!r}: {ONLY_OFF[where]}")
        elif key not in READ[path] and where not in WITHOUT_INFLUENCE:
            raise ValueError(_unknown(str(key), path))
    return later


def _unknown(key: str, path: str) -> str:
    prefix = f"{path}." if path else ""
    tables = (*WITHOUT_INFLUENCE, *ONLY_OFF, *ONLY, *OF_EXPERTS, *READ)
    beside = (name.removeprefix(prefix) for name in tables if name.startswith(prefix))
    known = sorted(dict.fromkeys([*READ[path], *(name for name in beside if name and "." not in name)]))
    near = difflib.get_close_matches(key, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"the keys there are {', '.join(known)}."
    return f"{path or 'config'} has {key!r}, a key that no policy worker knows: {advice} Correct or remove it"


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not any(value.values()) or value.get("enabled") is False
    return not value


def _number(value: Any) -> Any:
    """Convert a number that YAML reads as a string, such as 1e-3."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
