"""The Megatron backend against the same truth as the other one: transformers' model in one process."""

import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from megatron_ext.policy import ClippedPGLoss, MegatronPolicyWorker, NLLLoss, load_weights
from tests.dtensor.models import SIZES
from tests.policy.problems import (
    batching,
    largest_error,
    plain_log_probs,
    plain_model,
    plain_train,
    shard,
    shared_folder,
    tiny_batch,
    tiny_config,
)
from tests.ranks import ranks

GRPO = ClippedPGLoss(reference_policy_kl_penalty=0.1)
LAYOUTS = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "tp_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "recompute": {"tensor_model_parallel_size": 2, "activation_checkpointing": True},
    "cp_tp_sp": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
}


def model_config(kind="llama", tied=False):
    make = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    more = {"head_dim": 8} if kind == "qwen3" else {}
    return make(**SIZES | {"vocab_size": 98, "tie_word_embeddings": tied} | more)


@contextmanager
def worker_of(model, layout, **overrides):
    worker = MegatronPolicyWorker(tiny_config(model, **overrides) | {"megatron_cfg": LAYOUTS[layout]})
    try:
        yield worker
    finally:
        worker.shutdown()


def exported(worker):
    return {name: export.make() for name, export in worker._exports().items()}


def check(layout, kind="llama", tied=False, kinds=("fixed", "packed"), **overrides):
    model, data = model_config(kind, tied), tiny_batch(16)
    config = tiny_config(model, **overrides)
    true_losses, _, true_weights = plain_train(config, data, GRPO)
    with torch.no_grad():
        true_BS = plain_log_probs(plain_model(model), data)
    for cut in kinds:
        with worker_of(model, layout, **batching(cut), **overrides) as worker:
            mine = shard(data, worker)
            found = worker.get_logprobs(mine)["logprobs"]
            wanted = shard(type(data)(true=true_BS), worker)["true"]
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
            losses = worker.train(mine, GRPO)["global_loss"].tolist()
            torch.testing.assert_close(losses, true_losses, rtol=1e-5, atol=1e-6)
            assert largest_error(exported(worker), true_weights) < 3e-5, cut


@pytest.mark.parametrize("layout", ["dp", "tp_sp", "cp"])
@ranks(2)
def test_log_probs_and_training(layout):
    check(layout)


@ranks(2)
def test_activation_checkpointing():
    check("recompute", kinds=["fixed"])


@pytest.mark.slow
@pytest.mark.parametrize("kind, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
@ranks(2)
def test_models(kind, tied):
    check("tp", kind, tied, kinds=["dynamic"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp_sp", "cp_tp_sp"])
@ranks(4)
def test_four_ranks(layout):
    check(layout, "qwen3")


@ranks(2)
def test_reference_checkpoint_and_refit():
    """Saved at tp2, continued at dp2; transformers' model gets the weights by its own names."""
    folder, data, model = shared_folder(), tiny_batch(), model_config()
    paths = [str(folder / name) for name in ("weights", "optimizer")]
    with worker_of(model, "tp") as worker:
        mine = shard(data, worker)
        before = worker.get_logprobs(mine)["logprobs"]
        worker.train(mine, NLLLoss())
        assert torch.equal(worker.get_reference_policy_logprobs(mine)["reference_logprobs"], before)
        worker.save_checkpoint(*paths)
        [handle] = [*worker.get_weights_ipc_handles(list(worker.prepare_refit_info())).values()] or [None]
        shared = [handle]
        dist.broadcast_object_list(shared)
        plain = AutoModelForCausalLM.from_config(model)
        load_weights(plain, shared[0])
        true = exported(worker)
        assert plain.state_dict().keys() == true.keys()
        assert all(torch.equal(plain.state_dict()[name], x) for name, x in true.items())
        with torch.no_grad():
            found = plain_log_probs(plain, mine)
        torch.testing.assert_close(found, worker.get_logprobs(mine)["logprobs"], rtol=2e-5, atol=2e-5)
        goes_on = worker.train(mine, NLLLoss())["global_loss"]
        goes_on = [goes_on, worker.train(mine, NLLLoss())["global_loss"]]
    with worker_of(model, "dp") as worker:
        worker.load_checkpoint(*paths)
        mine = shard(data, worker)
        torch.testing.assert_close([worker.train(mine, NLLLoss())["global_loss"] for _ in range(2)], goes_on)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


@ranks(2)
def test_temperature_and_precision():
    data = tiny_batch()
    with torch.no_grad():
        true = plain_log_probs(plain_model(model_config()), data, 0.7)
        plain = plain_log_probs(plain_model(model_config()).bfloat16(), data, 0.7).float()
    with worker_of(model_config(), "tp", generation={"temperature": 0.7}) as worker:
        torch.testing.assert_close(worker.get_logprobs(data)["logprobs"], true, rtol=2e-5, atol=2e-5)
    with worker_of(model_config(), "tp", generation={"temperature": 0.7}, precision="bfloat16") as worker:
        error = (worker.get_logprobs(data)["logprobs"] - true).norm()
        assert 0 < error <= 1.5 * (plain - true).norm()
        worker.train(data, NLLLoss())


@pytest.mark.parametrize("size", ["pipeline_model_parallel_size", "expert_model_parallel_size"])
@ranks(2)
def test_layouts_that_a_policy_has_not(size):
    with pytest.raises(ValueError, match=f"megatron_cfg.{size} is 2: .* set it to 1"):
        MegatronPolicyWorker(tiny_config(model_config()) | {"megatron_cfg": {size: 2}})


@ranks(2)
def test_a_worker_that_cannot_be_made_leaves_nothing_open():
    """Neither the emulation of CUDA nor Megatron's groups: the next one finds none."""
    from megatron.core import parallel_state

    config = tiny_config(model_config()) | {"megatron_cfg": LAYOUTS["tp"]}
    allocated = torch.cuda.current_device
    with pytest.raises(ValueError, match="/nowhere"):
        MegatronPolicyWorker(config, None, "/nowhere/weights")
    with pytest.raises(ValueError, match="cannot be imported"):
        MegatronPolicyWorker(config | {"optimizer": {"name": "torch.optim.Nothing"}})
    with pytest.raises(ValueError, match="without weights_path"):
        MegatronPolicyWorker(config, None, None, "/nowhere/optimizer")
    assert not parallel_state.model_parallel_is_initialized()
    assert torch.cuda.current_device is allocated


@ranks(2)
def test_a_second_worker_of_another_size_is_refused():
    with worker_of(model_config(), "dp"), pytest.raises(ValueError, match="parallel size 2 .* are of 1 and 1"):
        MegatronPolicyWorker(tiny_config(model_config()) | {"megatron_cfg": LAYOUTS["tp"]})


@ranks(2)
def test_a_token_that_the_model_does_not_know_is_an_error_on_all():
    with worker_of(model_config(), "dp") as worker:
        data = shard(tiny_batch(), worker)
        if dist.get_rank() == 1:
            data["input_ids"][0, 3] = 98
        with pytest.raises(ValueError, match="input_ids are .* to 98: they must lie in 0 to 97"):
            worker.get_logprobs(data)


@ranks(1)
def test_models_that_gpt_model_does_not_compute():
    from megatron_ext.policy import megatron_llama

    with pytest.raises(ValueError, match="vocab_size is 97 with 2"):
        megatron_llama.check(LlamaConfig(**SIZES), 2)
    scaled = LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type is not the plain Llama's"):
        megatron_llama.check(scaled, 1)
    from transformers import Gemma3TextConfig

    with pytest.raises(ValueError, match="llama, qwen2, qwen3"), worker_of(Gemma3TextConfig(), "dp"):
        pass
