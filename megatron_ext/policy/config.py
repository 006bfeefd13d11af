"""Configuration of a policy worker: NeMo-RL's nested dict, read once, checked, and made a dataclass."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch

from megatron_ext.head.checks import Bits, as_number, check_number, filters, is_int, one_of
from megatron_ext.policy.config_keys import check_keys

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ABSENT = object()


@dataclass(frozen=True)
class Batching:
    """Settings by which rows are put together for one pass through the model.

    Attributes:
        kind: "fixed": a fixed number of rows, padded as they came; "dynamic": rows of similar lengths, cut to the
            longest; "packed": rows laid end to end without padding.
        train_rows, logprob_rows: rows of a fixed micro-batch.
        train_tokens, logprob_tokens: the most tokens of a dynamic or packed micro-batch.
    """

    kind: Literal["fixed", "dynamic", "packed"]
    train_rows: int
    logprob_rows: int
    train_tokens: int = 0
    logprob_tokens: int = 0


@dataclass(frozen=True)
class Pipeline:
    """Cut of the layers into pipeline stages.

    Attributes:
        stages: the number of stages. virtual: pieces of the model on each stage (1: no virtual stages).
        first_layers, last_layers: layers of the first and the last stage; None: as many as the others have.
    """

    stages: int = 1
    virtual: int = 1
    first_layers: int | None = None
    last_layers: int | None = None


@dataclass(frozen=True)
class Settings:
    """A worker's configuration; see `read_config` for the keys."""

    model: Any
    seed: int
    dtype: torch.dtype
    global_batch_size: int
    batching: Batching
    max_grad_norm: float | None
    tensor_parallel_size: int
    context_parallel_size: int
    expert_parallel: bool
    sequence_parallel: bool
    cpu_offload: bool
    activation_checkpointing: bool
    custom_parallel_plan: Any
    optimizer: Mapping[str, Any] | None
    scheduler: Any
    temperature: float
    refit_buffer_bytes: int
    top_k: int | None = None
    top_p: float = 1.0
    gives_rewards: bool = False
    pipeline: Pipeline = Pipeline()
    expert_parallel_size: int = 1
    bits: Bits | None = None
    skip_masked_tokens: bool | int = False
    logit_dtype: torch.dtype | None = None
    batch_invariant_mode: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    faults_with_experts: tuple[str, ...] = ()


def read_config(config: Mapping[str, Any], parallel_key: str = "dtensor_cfg") -> Settings:
    """Read and check a worker's configuration. `config_keys` has the keys of NeMo-RL's that are not named here.

    Keys: `model_name` (a local folder, a transformers config, or a function without arguments that makes a model),
    `hf_config_overrides` (values of the model's config, instead of those that the folder or config has),
    `precision` ("float32", "bfloat16", "float16"), `train_global_batch_size`, `train_micro_batch_size`,
    `logprob_batch_size` (default: `train_micro_batch_size`), `max_grad_norm` (None: no clipping), `optimizer` and
    `scheduler` (see `worker/optimizer.py`), `seed` of weights that are drawn, `refit_buffer_bytes`; under `dtensor_cfg`
    `tensor_parallel_size` (under `megatron_cfg` `tensor_model_parallel_size`), `context_parallel_size`,
    `sequence_parallel`, `cpu_offload`, `activation_checkpointing`; under `dtensor_cfg` alone `expert_parallel_size` (1,
    or the tensor-parallel size) and `custom_parallel_plan`; under `megatron_cfg` alone
    `pipeline_model_parallel_size`, `virtual_pipeline_model_parallel_size`, `num_layers_in_first_pipeline_stage`,
    `num_layers_in_last_pipeline_stage`, `expert_model_parallel_size`; under `dynamic_batching` or
    `sequence_packing` `enabled`, `train_mb_tokens`, `logprob_mb_tokens`; under `generation` `temperature`, by which
    logits are divided, and `top_k` and `top_p`: log-probabilities are those of the filtered distribution, from which
    the generator draws (`top_k` None, -1 or 0, and `top_p` 1.0, filter nothing); `bits` of the head (see `LmHead`; the
    default is "batch" where `batch_invariant_mode` under `dtensor_cfg` or `megatron_cfg` is True, which makes the
    model's layers batch-invariant too, see `megatron_ext.batch_invariant_mode`); `logit_dtype`, "float32" or the
    `precision`, to which the head rounds logits; `skip_masked_tokens`: the head skips padding and tokens that
    `token_mask` or `sample_mask` leave out, and losses see log-probabilities of 0 there; a loss that takes logits gets
    all of them. An int bounds the tokens of a micro-batch that count (`train` refuses more): each rank has room for so
    many, and does not wait for the device to count them.

    Raises:
        ValueError: a key is missing or unknown, or has an invalid value.
    """
    faults_with_experts = check_keys(config, parallel_key)
    precision = _required(config, "precision", "config")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    gives_rewards = _gives_rewards(config.get("reward_model_cfg") or {}, parallel_key)
    parallel = config.get(parallel_key) or {}
    tp_key = "tensor_model_parallel_size" if parallel_key == "megatron_cfg" else "tensor_parallel_size"
    ranks, experts = (_positive(parallel, key, parallel_key, 1) for key in (tp_key, "expert_parallel_size"))
    if experts not in (1, ranks):
        raise ValueError(
            f"{parallel_key}.expert_parallel_size is {experts}: the tensor-parallel ranks share out the experts, so it "
            f"must be 1 (each has a piece of every expert) or {tp_key}, {ranks} (each has whole experts)"
        )
    rows = _positive(config, "train_micro_batch_size", "config")
    temperature = (config.get("generation") or {}).get("temperature", 1.0)
    greedy = "greedy sampling has no log-probs"
    check_number("generation.temperature", temperature, "above 0 and finite", lambda x: 0 < x < math.inf, greedy)
    top_k, top_p = _filters(config.get("generation") or {})
    if not is_int(seed := config.get("seed", 0)):
        raise ValueError(f"seed is {seed!r}: it must be an integer")
    max_grad_norm = config.get("max_grad_norm")
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm, "above 0", lambda x: x > 0, "None leaves gradients unclipped")
    return Settings(
        model=_required(config, "model_name", "config"),
        seed=seed,
        dtype=PRECISIONS[precision],
        global_batch_size=_positive(config, "train_global_batch_size", "config"),
        batching=_batching(config, rows, _positive(config, "logprob_batch_size", "config", rows)),
        max_grad_norm=max_grad_norm,
        tensor_parallel_size=ranks,
        context_parallel_size=_positive(parallel, "context_parallel_size", parallel_key, 1),
        expert_parallel=experts > 1,
        sequence_parallel=_flag(parallel, "sequence_parallel", parallel_key),
        cpu_offload=_flag(parallel, "cpu_offload", parallel_key),
        activation_checkpointing=_flag(parallel, "activation_checkpointing", parallel_key),
        custom_parallel_plan=parallel.get("custom_parallel_plan"),
        optimizer=config.get("optimizer"),
        scheduler=config.get("scheduler"),
        temperature=float(temperature),
        refit_buffer_bytes=_positive(config, "refit_buffer_bytes", "config", 1 << 30),
        top_k=top_k,
        top_p=top_p,
        gives_rewards=gives_rewards,
        pipeline=_pipeline(parallel, parallel_key),
        expert_parallel_size=_positive(parallel, "expert_model_parallel_size", parallel_key, 1),
        bits=_bits(config, parallel),
        skip_masked_tokens=_skips(config.get("skip_masked_tokens")),
        logit_dtype=_logit_dtype(config, precision),
        batch_invariant_mode=_flag(parallel, "batch_invariant_mode", parallel_key),
        config_overrides=dict(config.get("hf_config_overrides") or {}),
        faults_with_experts=faults_with_experts,
    )


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False: a string would be true whatever it says."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False, in YAML true or false unquoted")


def _flag(section: Mapping[str, Any], key: str, where: str) -> bool:
    if (value := section.get(key)) is not None:
        check_flag(f"{where}.{key}", value)
    return bool(value)


def _skips(value: Any) -> bool | int:
    if value is None or isinstance(value, bool):
        return bool(value)
    if not is_int(value, 1):
        raise ValueError(
            f"skip_masked_tokens is {value!r}: it must be true, false, or a positive integer, the most tokens of a "
            f"micro-batch that count"
        )
    return value


def _bits(config: Mapping[str, Any], parallel: Mapping[str, Any]) -> Bits | None:
    bits = config.get("bits")
    if bits is not None:
        one_of("bits", bits, get_args(Bits))
        return cast(Bits, bits)
    return "batch" if parallel.get("batch_invariant_mode") else None


def _logit_dtype(config: Mapping[str, Any], precision: str) -> torch.dtype | None:
    name = config.get("logit_dtype")
    if name not in (None, "float32", precision):
        raise ValueError(
            f"logit_dtype is {name!r} and precision {precision!r}: logits are summed in float32, or rounded to the "
            f"dtype that the model computes in; set it to one of these, or leave it out"
        )
    return None if name is None else PRECISIONS[name]


def _gives_rewards(config: Mapping[str, Any], parallel_key: str) -> bool:
    if not _flag(config, "enabled", "reward_model_cfg"):
        return False
    if parallel_key == "megatron_cfg":
        raise ValueError(
            "reward_model_cfg.enabled is True: MegatronPolicyWorker has only causal language models, which have no "
            "head for rewards; use DTensorPolicyWorker"
        )
    if (kind := config.get("reward_model_type")) != "bradley_terry":
        raise ValueError(
            f"reward_model_cfg.reward_model_type is {kind!r}: it must be 'bradley_terry', a single number for each row"
        )
    return True


def check_positive(name: str, value: Any) -> int:
    """`value`, if it is a positive integer.

    Raises:
        ValueError: it is not; the message calls it `name`.
    """
    if not is_int(value, 1):
        raise ValueError(f"{name} is {value!r}: it must be a positive integer")
    return int(value)


def check_kwargs(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that the configuration has as a string."""
    for key, value in kwargs.items():
        if fix := as_number(value):
            raise ValueError(f"{name}.kwargs.{key} is {value!r}: it must be a number; {fix}")


def import_from_path(path: str) -> Any:
    """Import the object that `package.module.Name` names.

    Raises:
        ValueError: the object cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path!r} cannot be imported ({error}); pass package.module.Name, as torch.optim.AdamW"
        ) from None


def _batching(config: Mapping[str, Any], train_rows: int, logprob_rows: int) -> Batching:
    kinds: dict[str, Literal["dynamic", "packed"]] = {"dynamic_batching": "dynamic", "sequence_packing": "packed"}
    chosen = [key for key in kinds if _flag(config.get(key) or {}, "enabled", key)]
    if len(chosen) > 1:
        raise ValueError("dynamic_batching and sequence_packing are both enabled: they exclude each other; enable one")
    for key in chosen:
        train_tokens = _positive(config[key], "train_mb_tokens", key)
        logprob_tokens = _positive(config[key], "logprob_mb_tokens", key, train_tokens)
        return Batching(kinds[key], train_rows, logprob_rows, train_tokens, logprob_tokens)
    return Batching("fixed", train_rows, logprob_rows)


def _filters(generation: Mapping[str, Any]) -> tuple[int | None, float]:
    """Top-k, None where it is off, and top-p."""
    top_k, top_p = generation.get("top_k"), generation.get("top_p")
    top_k, top_p = None if top_k in (0, -1) else top_k, 1.0 if top_p is None else top_p
    try:
        filters(top_k, top_p)
    except ValueError as error:
        raise ValueError(f"generation.{error}") from None
    return top_k, float(top_p)


def _pipeline(parallel: Mapping[str, Any], where: str) -> Pipeline:
    stages = _positive(parallel, "pipeline_model_parallel_size", where, 1)
    virtual_key = "virtual_pipeline_model_parallel_size"
    virtual = 1 if parallel.get(virtual_key) is None else _positive(parallel, virtual_key, where)
    if virtual > 1 and stages == 1:
        raise ValueError(
            f"{where}.{virtual_key} is {virtual} and pipeline_model_parallel_size 1: virtual stages are pieces of a "
            f"pipeline's stages; leave it out, or raise pipeline_model_parallel_size"
        )
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    first, last = (None if parallel.get(key) is None else _positive(parallel, key, where) for key in ends)
    return Pipeline(stages, virtual, first, last)


def _required(config: Mapping[str, Any], key: str, where: str, default: Any = _ABSENT) -> Any:
    value = config.get(key, default)
    if value is _ABSENT:
        raise ValueError(f"{where} lacks {key!r}: the policy worker cannot guess it; add it")
    return value


def _positive(config: Mapping[str, Any], key: str, where: str, default: Any = _ABSENT) -> int:
    return check_positive(f"{where}.{key}", _required(config, key, where, default))
