"""NeMo-RL's own post-processors and losses, from its source, with its functions and with ours: the same numbers.

    NEMO_RL_SRC=/path/to/RL python -m pytest tests/integrations/test_nemo_rl_source.py

runs them; docs/rl.md says of which commit. The Megatron worker imports Megatron-Core's newest names: it is imported
where they are there (PYTHONPATH=$PWD:/path/to/Megatron-LM). What else the source imports and these parts do not use is
stood in for.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from megatron_ext.integrations import nemo_rl
from megatron_ext.replace import replacement_of
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.gpt import model_parallel
from tests.integrations.stand_ins import applied, standing_in_for
from tests.ranks import ranks

SOURCE = os.environ.get("NEMO_RL_SRC")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="NEMO_RL_SRC names no source of NeMo-RL")

STOOD_IN = [
    *("zmq", "hydra", "nemo_automodel", "megatron.bridge", "decord", "vllm", "torch.utils.tensorboard", "pynvml"),
    *("uvicorn", "fastapi", "tensordict", "datasets", "mlflow", "swanlab", "wandb", "prometheus_client"),
]
_NEWER = "megatron.core.transformer.moe.moe_logging"  # than Megatron-Core 0.16
if importlib.util.find_spec(_NEWER) is None:
    STOOD_IN.append(_NEWER)
PARTS = {
    "loss": "nemo_rl.algorithms.loss",
    "losses": "nemo_rl.algorithms.loss.loss_functions",
    "loss_input": "nemo_rl.algorithms.loss.utils",
    "x_token": "nemo_rl.algorithms.x_token.loss_utils",
    "automodel": "nemo_rl.models.automodel.train",
    "megatron": "nemo_rl.models.megatron.train",
    "data": "nemo_rl.distributed.batched_data_dict",
    "sampling": "nemo_rl.algorithms.logits_sampling_utils",
}
WORKERS = [
    "nemo_rl.models.policy.workers.dtensor_policy_worker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2",
    "nemo_rl.models.policy.workers.megatron_policy_worker",
]
VOCABULARY, SEQUENCES, LENGTH = 32, 2, 8
PACKED = ("nll", "grpo", "gspo", "cispo")  # losses that take packs


@contextlib.contextmanager
def source(*more: str):
    """NeMo-RL's modules, imported; on CPU `.cuda()` and pinned memory do nothing."""
    sys.path.insert(0, SOURCE)
    tensor, to_cuda = torch.tensor, torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
    try:
        with standing_in_for(STOOD_IN, lacking={"NeMoAutoModelForTokenClassification"}):
            importlib.import_module(nemo_rl.MODULE)
            importlib.import_module("transformers.models.qwen2.modeling_qwen2")  # transformers loads itself twice
            sys.modules["transformers"].__version__ = "5.11.0"  # above it refuses to be imported
            found = {name: importlib.import_module(module) for name, module in PARTS.items()}
            for module in more:
                importlib.import_module(module)
        yield types.SimpleNamespace(**found)
    finally:
        torch.tensor, torch.Tensor.cuda = tensor, to_cuda
        sys.path.remove(SOURCE)


def close(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def batch(parts, samples: int = SEQUENCES):
    g = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    shape = (samples, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=g)
    mask = torch.ones(shape)
    mask[:, :2], mask[-1, 6:] = 0, 0
    logits, likely = 2 * draw(*shape, VOCABULARY), 2 * draw(*shape, VOCABULARY)
    teacher = likely.topk(4)
    data = {
        "input_ids": tokens,
        "input_lengths": torch.tensor([LENGTH] * (samples - 1) + [6]),
        "token_mask": mask,
        "sample_mask": torch.ones(samples),
        "advantages": draw(*shape),
        "prev_logprobs": -3 + 0.3 * draw(*shape),
        "generation_logprobs": -3 + 0.3 * draw(*shape),
        "reference_policy_logprobs": -3 + 0.3 * draw(*shape),
        "teacher_topk_logits": teacher.values,
        "teacher_topk_indices": teacher.indices,
    }
    # What was sampled is likely: top-k and top-p leave it.
    data["input_ids"][:, 1:] = logits[:, :-1].topk(3).indices[..., 1]
    return logits, parts.data.BatchedDataDict(data)


def losses(parts):
    f = parts.losses
    yield "nll", f.NLLLossFn()
    yield "grpo", f.ClippedPGLossFn(f.ClippedPGLossConfig(use_importance_sampling_correction=True))
    yield (
        "gspo",
        f.ClippedPGLossFn(f.ClippedPGLossConfig(sequence_level_importance_ratios=True, token_level_loss=False)),
    )
    yield "cispo", f.ClippedPGLossFn(f.ClippedPGLossConfig(use_cispo=True))
    yield "dpo", f.DPOLossFn(f.DPOLossConfig(reference_policy_kl_penalty=0.1))
    for kind in ("forward", "reverse", "mixed"):
        for zero in (False, True):
            config = f.DistillationLossConfig(kl_type=kind, zero_outside_topk=zero)
            yield f"distillation {kind} {zero}", f.DistillationLossFn(config)


def samplings(parts):
    yield "plain", None
    yield "temperature", parts.sampling.TrainingSamplingParams(temperature=0.7)
    yield "top-k", parts.sampling.TrainingSamplingParams(top_k=20, temperature=0.7)
    yield "top-p", parts.sampling.TrainingSamplingParams(top_p=0.999)
    yield "both", parts.sampling.TrainingSamplingParams(top_k=20, top_p=0.999)


def valid(data) -> dict:
    toks = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": toks}


def megatron_numbers(parts, tp: int, cp: int) -> dict:
    """Log-probs, top-k and losses with gradients by the Megatron path's post-processors; packed, with cp only so."""
    rank = dist.get_rank()
    numbers = {}
    for pack in (False, True):
        if cp > 1 and not pack:
            continue
        for name, sampling in samplings(parts):
            for chunk in (None, 4):
                config = {
                    "sequence_packing": {"enabled": pack, "fuse_loss": pack},
                    "logprob_chunk_size": chunk,
                    "megatron_cfg": {"context_parallel_size": cp},
                }
                where = f"{name} {pack} {chunk}"
                logits, data = batch(parts)
                # The last document reaches to the end of a longer pack, as pipelines have it.
                starts = torch.tensor([0, LENGTH, 4 * LENGTH], dtype=torch.int32)
                ids, whole = data["input_ids"], logits
                if pack:
                    ids = torch.cat([ids.view(1, -1), torch.zeros(1, 2 * LENGTH, dtype=torch.int64)], 1)
                    whole = torch.cat([logits.view(1, -1, VOCABULARY), torch.ones(1, 2 * LENGTH, VOCABULARY)], 1)
                share = SequenceParts(_context_group(cp), starts).split(whole, 1) if pack else whole
                mine = share.chunk(tp, -1)[rank % tp].clone().requires_grad_()

                def scaled(z, sampling=sampling):
                    z = z * 1.0
                    parts.megatron.apply_temperature_scaling(z, sampling)
                    return z

                processor = parts.megatron.LogprobsPostProcessor(config, sampling)
                found = processor(data, ids, starts)(scaled(mine.detach()))[1]
                numbers[f"log-probs {where}"] = found["logprobs"]
                if name == "plain":
                    top = parts.megatron.TopkLogitsPostProcessor(config, 3)(data, starts)(mine.detach())[1]
                    numbers[f"top-k {where}"], numbers[f"top-k ids {where}"] = top["topk_logits"], top["topk_indices"]
                for loss_name, loss in losses(parts):
                    filtered = name in ("top-k", "top-p", "both")
                    if (filtered and loss_name not in ("grpo",)) or (pack and loss_name not in PACKED):
                        continue
                    processor = parts.megatron.LossPostProcessor(loss, config, sampling_params=sampling)
                    params = types.SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_q_padded=starts) if pack else None
                    value, _metrics = processor(data, params, **valid(data))(scaled(mine))
                    numbers[f"{loss_name} {where}"] = value.detach()
                    (numbers[f"{loss_name} gradient {where}"],) = torch.autograd.grad(value, mine)
    return numbers


def packed_distillation(parts, tp: int, cp: int) -> dict:
    """Top-k logits of a packed teacher by NeMo-RL's post-processor, and a packed student's losses with gradients, which
    it takes document by document."""
    rank = dist.get_rank()
    config = {"sequence_packing": {"enabled": True, "fuse_loss": False}, "logprob_chunk_size": 3}
    config["megatron_cfg"] = {"context_parallel_size": cp}
    data = batch(parts)[1]
    g = torch.Generator().manual_seed(9)
    student, teacher = torch.randn(2, 1, SEQUENCES * LENGTH, VOCABULARY, generator=g)
    starts = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    lengths = starts - torch.tensor([0, 0, 2 if cp > 1 else 0], dtype=torch.int32)  # NeMo-RL pads for cp alone
    cut = SequenceParts(_context_group(cp), starts)

    def held(x):
        return cut.split(x, 1).chunk(tp, -1)[rank % tp].clone()

    top = parts.megatron.TopkLogitsPostProcessor(config, 4)(data, starts)(held(teacher))[1]
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top["topk_logits"], top["topk_indices"]
    mine, numbers = held(student).requires_grad_(), dict(top)
    params = types.SimpleNamespace(cu_seqlens_q=lengths, cu_seqlens_q_padded=starts)
    for name, loss in losses(parts):
        if "distillation" in name:
            value, metrics = parts.megatron.LossPostProcessor(loss, config)(data, params, **valid(data))(mine)
            numbers[name], numbers[f"{name} metric"] = value.detach(), torch.tensor(metrics["loss"])
            (numbers[f"{name} gradient"],) = torch.autograd.grad(value, mine)
    return numbers


@ranks(1, 2, 4)
def test_packed_distillation_in_the_megatron_path():
    world = dist.get_world_size()
    with source() as parts:
        for cp in (1, 2, 4):
            if world % cp:
                continue
            with model_parallel(tp=world // cp, cp=cp):
                theirs = packed_distillation(parts, world // cp, cp)
                with applied(nemo_rl):
                    close(packed_distillation(parts, world // cp, cp), theirs)
                assert len(theirs) == 2 + 3 * 6


def _context_group(cp: int):
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group() if cp > 1 else None


@ranks(1, 2, 4)
def test_the_megatron_path():
    world = dist.get_world_size()
    with source() as parts:
        for cp in (1, 2):
            if world % cp or (world == 4 and cp == 1):
                continue
            with model_parallel(tp=world // cp, cp=cp):
                theirs = megatron_numbers(parts, world // cp, cp)
                with applied(nemo_rl):
                    found = megatron_numbers(parts, world // cp, cp)
        close(found, theirs)
        assert len(theirs) > 30


def automodel_numbers(parts, mesh) -> dict:
    """The same of the DTensor path, of logits that the mesh shares."""
    numbers = {}
    for name, sampling in samplings(parts):
        for chunk in (None, 4):
            logits, data = batch(parts)
            config = {"logprob_chunk_size": chunk}
            processed = types.SimpleNamespace(input_ids=data["input_ids"], seq_len=LENGTH)
            sharded = distribute_tensor(logits, mesh["tp"], [Shard(-1)]).requires_grad_()

            def scaled(z, sampling=sampling):
                return parts.automodel.apply_temperature_scaling(z * 1.0, sampling)

            meshes = (mesh, None, mesh["tp"], 1)
            processor = parts.automodel.LogprobsPostProcessor(config, *meshes, sampling_params=sampling)
            with torch.no_grad():
                found = processor(scaled(sharded), data, processed, SEQUENCES, LENGTH)
            numbers[f"log-probs {name} {chunk}"] = found
            top = parts.automodel.TopkLogitsPostProcessor(config, *meshes, 3)
            values, ids = top(sharded.detach(), data, processed, SEQUENCES, LENGTH)
            numbers[f"top-k {name} {chunk}"], numbers[f"top-k ids {name} {chunk}"] = values, ids
            for loss_name, loss in losses(parts):
                if name in ("top-k", "top-p", "both") and loss_name != "grpo":
                    continue
                processor = parts.automodel.LossPostProcessor(loss, config, *meshes, 1, sampling_params=sampling)
                value, _metrics = processor(scaled(sharded), data, processed, **valid(data))
                numbers[f"{loss_name} {name} {chunk}"] = value.detach()
                (grad,) = torch.autograd.grad(value, sharded)
                numbers[f"{loss_name} gradient {name} {chunk}"] = grad.full_tensor()
    return numbers


@ranks(1, 2)
def test_the_dtensor_path():
    with source() as parts:
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("cp", "tp"))
        theirs = automodel_numbers(parts, mesh)
        with applied(nemo_rl):
            found = automodel_numbers(parts, mesh)
        close(found, theirs)
        assert len(theirs) > 30


@ranks(1, 2)
def test_cross_tokenizer_functions():
    """Losses whose teacher has another tokenizer call these functions."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with source() as parts, model_parallel(tp=world):
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()

        def numbers():
            logits, data = batch(parts)
            mine = logits.chunk(world, -1)[rank].clone().requires_grad_()
            ids = torch.tensor([3, 31, 0, 17])
            made = {
                "log softmax": parts.losses.vocab_parallel_log_softmax(mine, 0.7, tp_group=group),
                "all columns": parts.losses.vocab_parallel_full_log_softmax(mine, 0.7, tp_group=group),
                "columns": parts.losses.vocab_parallel_gather_columns(mine, ids, tp_group=group),
            }
            found = {}
            for name, value in made.items():
                upstream = torch.linspace(-1, 1, value.shape[-1]).expand_as(value)
                (found[f"{name} gradient"],) = torch.autograd.grad(value, mine, upstream)
                found[name] = value.detach()
            found["likeliest"] = parts.x_token.vocab_parallel_argmax(mine, tp_group=group)
            found["next"] = parts.losses.cp_shift_next(data["advantages"], None, fill=-1.0)
            found["next of ranks"] = parts.losses.cp_shift_next(data["advantages"], group, fill=-1.0)
            found["sum"] = parts.losses.group_all_reduce_sum(data["advantages"] + rank, group)
            found["part"] = parts.x_token.cp_load_balanced_to_contiguous(data["advantages"] + rank, cp_group=group)
            return found

        theirs = numbers()
        with applied(nemo_rl):
            close(numbers(), theirs)


def test_the_modules_and_workers_run_with_ours():
    """All of them hold ours after `apply()`, whether imported before or after, and theirs after `restore()`."""
    newest = hasattr(importlib.import_module("megatron.core.dist_checkpointing.strategies.torch"), "get_async_strategy")
    late = [name for name in WORKERS if newest or "megatron" not in name]
    with source() as parts:
        theirs = parts.megatron.from_parallel_logits_to_logprobs
        with applied(nemo_rl):
            with source(*late):
                pass
            holders = {
                name: module
                for name, module in sys.modules.items()
                if name.startswith("nemo_rl.") and hasattr(module, "get_logprobs_from_vocab_parallel_logits")
            }
            assert parts.megatron.from_parallel_logits_to_logprobs is not theirs
            assert "nemo_rl.algorithms.x_token.loss_utils" in holders
            assert WORKERS[0] in holders
            for module in holders.values():
                assert replacement_of(module.get_logprobs_from_vocab_parallel_logits) is not None
        for module in holders.values():
            assert replacement_of(module.get_logprobs_from_vocab_parallel_logits) is None
        assert parts.megatron.from_parallel_logits_to_logprobs is theirs
