"""Every key of a policy's configuration is read, known to have no influence on numbers, or refused."""

import ast
import copy

import pytest
import torch
from transformers import Gemma3Config

from megatron_ext.policy import DistillationLossFn, DPOLossFn, DTensorPolicyWorker
from megatron_ext.policy.backend.model_factories import model_factories
from megatron_ext.policy.config import read_config
from megatron_ext.policy.config_keys import OF_EXPERTS, ONLY, ONLY_OFF, READ, WITHOUT_INFLUENCE
from tests.policy.problems import ended, tiny_batch, tiny_config, tiny_model
from tests.ranks import ranks

# What recipes of NeMo-RL have under `policy`, with a value that asks for something.
RECIPES = {
    "dtensor_cfg": {
        "_v2": True,
        "activation_checkpointing": True,
        "automodel_kwargs.attn_implementation": "eager",
        "automodel_kwargs.backend.attn": "te",
        "automodel_kwargs.backend.fake_balanced_gate": True,
        "automodel_kwargs.backend.gate_precision": "float64",
        "automodel_kwargs.force_hf": True,
        "automodel_kwargs.freeze_config": {"freeze_language_model": False, "freeze_vision_tower": True},
        "automodel_kwargs.use_liger_kernel": True,
        "clear_cache_every_n_steps": 50,
        "cpu_offload": True,
        "dp_replicate_size": 2,
        "env_vars": {"NVTE_FUSED_ATTN": "0"},
        "lora_cfg": {"enabled": True, "dim": 8, "alpha": 32},
        "moe_parallelizer.ignore_router_for_ac": True,
        "moe_parallelizer.lm_head_precision": "float32",
        "sequence_parallel": True,
    },
    "megatron_cfg": {
        "apply_rope_fusion": True,
        "attention_backend": "flash",
        "checkpoint": {"async_save": True},
        "defer_fp32_logits": True,
        "distributed_data_parallel_config.grad_reduce_in_fp32": False,
        "distributed_data_parallel_config.overlap_grad_reduce": True,
        "distributed_data_parallel_config.use_custom_fsdp": True,
        "empty_unused_memory_level": 1,
        "fp8_cfg": {"enabled": True, "fp8": "e4m3"},
        "freeze_config": {"freeze_vision_model": True},
        "freeze_moe_router": True,
        "freeze_vision_model": True,
        "model_overrides": {"num_layers": 3},
        "moe_router_bias_update_rate": "1e-3",
        "moe_router_dtype": "fp64",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.1,
        "moe_router_load_balancing_type": "aux_loss",
        "mtp_num_layers": 2,
        "optimizer": {"optimizer": "adam", "lr": 5e-6},
        "peft": {"enabled": True, "dim": 8},
        "scheduler": {"lr_warmup_iters": 13},
        "use_fused_linear_logprobs": True,
    },
    "": {
        "activation_checkpointing_enabled": True,
        "dequantize_base_checkpoint": True,
        "draft": {"enabled": True, "loss_weight": 0.1},
        "dynamic_batching.sequence_length_round": 64,
        "fsdp_offload_enabled": True,
        "generation.bad_words": ["<image>"],
        "generation.backend": "vllm",
        "generation.val_temperature": 0.5,
        "generation.vllm_cfg": {"precision": "bfloat16"},
        "generation_batch_size": 32,
        "hf_config_overrides": {"max_position_embeddings": 256},
        "is_vlm": True,
        "logprob_chunk_size": 2048,
        "make_sequence_length_divisible_by": 8,
        "max_total_sequence_length": 512,
        "offload_optimizer_for_logprob": True,
        "quant_cfg": "nvfp4.yaml",
        "refit_buffer_size_gb": 4,
        "router_replay": {"enabled": True},
        "sequence_packing.algorithm": "modified_first_fit_decreasing",
        "tokenizer": {"name": "a tokenizer"},
    },
}
MISSPELT = {
    "train_global_batchsize": "train_global_batch_size",
    "max_gradnorm": "max_grad_norm",
    "dtensor_cfg.sequence_paralel": "sequence_parallel",
    "dtensor_cfg.automodel_kwargs.freeze_confg": "freeze_config",
    "generation.temprature": "temperature",
    "sequence_packing.enable": "enabled",
    "optimizer.kwarg": "kwargs",
}


def with_key(path, value, parallel_key="dtensor_cfg"):
    config = copy.deepcopy(tiny_config())
    section = config
    *outer, key = path.split(".")
    for name in outer:
        section = section.setdefault(name, {})
    section[key] = value
    for section in {"dtensor_cfg", "megatron_cfg"} - {parallel_key}:
        config[section] = {"enabled": False}
    return config


CASES = [
    (f"{section}.{key}".removeprefix("."), value, section or "dtensor_cfg")
    for section, keys in RECIPES.items()
    for key, value in keys.items()
]


@pytest.mark.parametrize("path,value,parallel_key", CASES, ids=[case[0] for case in CASES])
def test_recipe_key_is_read_inert_or_refused(path, value, parallel_key):
    section, _, key = path.rpartition(".")
    if path in WITHOUT_INFLUENCE or key in READ.get(section, ()):
        read_config(with_key(path, value, parallel_key), parallel_key)
    elif path in OF_EXPERTS:
        [fault] = read_config(with_key(path, value, parallel_key), parallel_key).faults_with_experts
        assert fault.startswith(f"{path} is {value!r}, and ")
    else:
        assert path in ONLY_OFF or path in ONLY
        with pytest.raises(ValueError, match=f"^{path} is .*: .*; "):
            read_config(with_key(path, value, parallel_key), parallel_key)


@pytest.mark.parametrize("path", [*ONLY, *OF_EXPERTS])
def test_the_value_that_a_refusal_advises_is_taken(path):
    fix = (ONLY | OF_EXPERTS)[path][1]
    advised = ast.literal_eval(fix.partition("set it to ")[2])
    section = path.partition(".")[0]
    assert not read_config(with_key(path, advised, section), section).faults_with_experts


@pytest.mark.parametrize("path", [path for path in ONLY_OFF if not path.startswith("megatron_cfg")])
@pytest.mark.parametrize("value", [None, False, {}, {"enabled": False, "dim": 8}])
def test_options_that_are_off_are_taken(path, value):
    read_config(with_key(path, value))


@pytest.mark.parametrize("path", MISSPELT)
def test_misspelt_key_is_refused_with_the_right_one(path):
    with pytest.raises(ValueError, match=f"has '{path.rpartition('.')[2]}'.*did you mean '{MISSPELT[path]}'"):
        read_config(with_key(path, 1))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}, "dtensor_cfg.enabled is False: this"),
        ({"megatron_cfg": {"enabled": True}}, "megatron_cfg.enabled is True: this worker reads only dtensor_cfg"),
        ({"dtensor_cfg": {"sequence_parallel": "false"}}, "sequence_parallel is 'false': it must be True or False"),
        ({"sequence_packing": {"enabled": "false"}}, "sequence_packing.enabled is 'false': it must be True or False"),
        ({"seed": 3.5}, "seed is 3.5: it must be an integer"),
        ({"generation": 1.0}, "generation is 1.0: it must be a mapping"),
        ({"scheduler": [{"name": "x", "kwarg": {}}]}, "scheduler has 'kwarg'.*did you mean 'kwargs'"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tiny_config() | changes)


def test_no_key_is_in_two_tables():
    tables = [set(WITHOUT_INFLUENCE), set(ONLY_OFF), set(ONLY), set(OF_EXPERTS)]
    tables.append({f"{section}.{key}".removeprefix(".") for section, keys in READ.items() for key in keys})
    assert sum(len(table) for table in tables) == len(set().union(*tables))
    assert all(reason for reason in WITHOUT_INFLUENCE.values())


def test_overrides_make_the_models_config():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    given = {"max_position_embeddings": 256, "rope_scaling": rope}
    source = tiny_model()
    model = model_factories(source, overrides=given).make()
    found = getattr(model.config, "rope_parameters", None) or model.config.rope_scaling
    assert (found["rope_type"], found["factor"], model.config.max_position_embeddings) == ("yarn", 4.0, 256)
    assert not torch.equal(model.model.rotary_emb.inv_freq, model_factories(source).make().model.rotary_emb.inv_freq)
    assert source.max_position_embeddings == 128


def test_overrides_of_inner_configs_keep_the_rest():
    source = Gemma3Config(text_config={"hidden_size": 48, "num_hidden_layers": 3})
    text = model_factories(source, overrides={"text_config": {"hidden_size": 64}}).config.text_config
    assert (text.hidden_size, text.num_hidden_layers) == (64, 3)


@pytest.mark.parametrize("overrides", [{"hiden_size": 64}, {"rope": 3}])
def test_override_that_no_config_has_is_refused(overrides):
    with pytest.raises(ValueError, match="hf_config_overrides has .*which LlamaConfig does not"):
        model_factories(tiny_model(), overrides=overrides)
    with pytest.raises(ValueError, match="model_name a function"):
        model_factories(lambda: None, overrides=overrides)


@ranks(1)
def test_worker_scores_with_overrides():
    data, given = tiny_batch(), {"rms_norm_eps": 0.5}
    found = []
    for config in (tiny_config(tiny_model(rms_norm_eps=0.5)), tiny_config(hf_config_overrides=given)):
        with ended(DTensorPolicyWorker(config, init_optimizer=False, init_reference_model=False)) as worker:
            found.append(worker.get_logprobs(data)["logprobs"])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "loss, option, message",
    [
        (DPOLossFn, {"preference_average_log_probs": "false"}, "preference_average_log_probs is 'false': it"),
        (DPOLossFn, {"sft_average_log_probs": 0}, "sft_average_log_probs is 0: it must be True or False"),
        (DPOLossFn, {"sft_loss_weight": "0.1"}, "sft_loss_weight is '0.1': it must be at least 0"),
        (DPOLossFn, {"preference_loss_weight": float("nan")}, "preference_loss_weight is nan: it must be"),
        (DPOLossFn, {"reference_policy_kl_penalty": {"x": 0.1}}, "reference_policy_kl_penalty is {'x': 0.1}"),
        (DistillationLossFn, {"zero_outside_topk": "false"}, "zero_outside_topk is 'false': it must be True or"),
        (DistillationLossFn, {"kl_type": {"kl_type": "forward"}}, "kl_type"),
    ],
)
def test_options_of_losses_are_of_their_types(loss, option, message):
    with pytest.raises(ValueError, match=message):
        loss(**option)
