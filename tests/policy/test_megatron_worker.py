"""The Megatron backend against the same truth as the other one: transformers' model in one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_ext.policy import ClippedPGLoss, MegatronPolicyWorker, NLLLoss, load_weights
from tests.dtensor.models import SIZES
from tests.marks import slow
from tests.policy.problems import (
    batching,
    ended,
    largest_error,
    plain_log_probs,
    plain_model,
    plain_train,
    shard,
    tiny_batch,
    tiny_config,
)
from tests.ranks import ranks, shared_folder

GRPO = ClippedPGLoss(reference_policy_kl_penalty=0.1)
LAYOUTS = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "tp_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "recompute": {"tensor_model_parallel_size": 2, "activation_checkpointing": True},
    "cp_tp_sp": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "pp_uneven": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    "pp_virtual": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp_tp_sp": {
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "activation_checkpointing": True,
    },
    "pp_cp": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "pp_ep": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "ep_tp_sp": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def model_config(kind="llama", tied=False, layers=2):
    make = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "mixtral": MixtralConfig,
        "qwen3_moe": Qwen3MoeConfig,
    }[kind]
    more = {
        "qwen3": {"head_dim": 8},
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"mlp_only_layers": [1]},
    }.get(kind, {})
    sizes = {"vocab_size": 98, "tie_word_embeddings": tied, "num_hidden_layers": layers}
    return make(**SIZES | sizes | more)


def worker_of(model, layout, **overrides):
    return ended(MegatronPolicyWorker(tiny_config(model, **overrides) | {"megatron_cfg": LAYOUTS[layout]}))


def exported(worker):
    return {name: export.make() for name, export in worker._exports().items()}


def check(layout, kind="llama", tied=False, kinds=("fixed", "packed"), layers=2, **overrides):
    model, data = model_config(kind, tied, layers), tiny_batch(16)
    config = tiny_config(model, **overrides)
    true_losses, _, true_weights, true_norms = plain_train(config, data, GRPO)
    with torch.no_grad():
        true_BS = plain_log_probs(plain_model(model), data)
    for cut in kinds:
        with worker_of(model, layout, **batching(cut), **overrides) as worker:
            mine = shard(data, worker)
            found = worker.get_logprobs(mine)["logprobs"]
            wanted = shard(type(data)(true=true_BS), worker)["true"]
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
            found = worker.train(mine, GRPO)
            torch.testing.assert_close(found["global_loss"].tolist(), true_losses, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found["grad_norm"].tolist(), true_norms, rtol=1e-4, atol=0.0)
            assert largest_error(exported(worker), true_weights) < 3e-5, cut


@pytest.mark.parametrize("layout", ["tp_sp", *slow("dp", "cp")])
@ranks(2)
def test_log_probs_and_training(layout):
    check(layout)


@pytest.mark.slow
@ranks(2)
def test_activation_checkpointing():
    check("recompute", kinds=["fixed"])


@pytest.mark.slow
@pytest.mark.parametrize("kind, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
@ranks(2)
def test_models(kind, tied):
    check("tp", kind, tied, kinds=["dynamic"])


@pytest.mark.slow
@pytest.mark.parametrize("layout, kinds", [("tp_sp", ["dynamic"]), ("cp_tp_sp", ["fixed", "packed"])])
@ranks(4)
def test_four_ranks(layout, kinds):
    check(layout, "qwen3", kinds=kinds)


@pytest.mark.slow
@ranks(2)
def test_pipeline():
    check("pp", tied=True, kinds=["packed"])


@pytest.mark.slow
@pytest.mark.parametrize("layout, kind, layers", [("pp_virtual", "llama", 4), ("pp_uneven", "qwen3", 3)])
@ranks(2)
def test_stages(layout, kind, layers):
    """With virtual stages each rank has the layers 0 and 2, or 1 and 3; uneven, the first has one and the last two."""
    check(layout, kind, tied=True, layers=layers, kinds=["fixed", "dynamic", "packed"])


@pytest.mark.slow
@pytest.mark.parametrize("layout, kinds", [("pp", ["fixed"]), ("pp_tp_sp", ["packed"]), ("pp_cp", ["fixed", "packed"])])
@ranks(4)
def test_pipelines_beside_other_parallelism(layout, kinds):
    check(layout, "qwen2", kinds=kinds)


@pytest.mark.slow
@ranks(2)
def test_experts():
    check("ep", "qwen3_moe", kinds=["fixed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, kind, cut",
    [
        ("pp_ep", "mixtral", "fixed"),
        ("pp_ep", "qwen3_moe", "packed"),
        ("ep_tp_sp", "mixtral", "packed"),
        ("ep_tp_sp", "qwen3_moe", "fixed"),
    ],
)
@ranks(4)
def test_experts_beside_other_parallelism(layout, kind, cut):
    check(layout, kind, kinds=[cut])


@pytest.mark.slow
@ranks(2)
def test_reference_checkpoint_and_refit():
    saved_at_one_layout_and_continued_at_another("tp", "dp", model_config())


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, kind", [("pp_virtual", "tp", "llama"), ("dp", "pp", "qwen3"), ("ep", "pp", "mixtral")]
)
@ranks(2)
def test_reference_checkpoint_and_refit_of_stages_and_experts(before, after, kind):
    saved_at_one_layout_and_continued_at_another(before, after, model_config(kind, kind == "llama", 4))


def saved_at_one_layout_and_continued_at_another(before_at, after_at, model):
    """transformers' model gets the weights by its own names."""
    folder, data = shared_folder(), tiny_batch()
    paths = [str(folder / name) for name in ("weights", "optimizer")]
    with worker_of(model, before_at) as worker:
        mine = shard(data, worker)
        before = worker.get_logprobs(mine)["logprobs"]
        worker.train(mine, NLLLoss())
        assert torch.equal(worker.get_reference_policy_logprobs(mine)["reference_logprobs"], before)
        worker.save_checkpoint(*paths)
        [handle] = [*worker.get_weights_ipc_handles(list(worker.prepare_refit_info())).values()] or [None]
        shared = [handle]
        dist.broadcast_object_list(shared)
        plain = plain_model(model, seed=4)
        load_weights(plain, shared[0])
        true = exported(worker)
        assert dict(plain.named_parameters()).keys() == true.keys()  # each once, tied or not
        assert all(torch.equal(plain.state_dict()[name], x) for name, x in true.items())
        with torch.no_grad():
            found = plain_log_probs(plain, mine)
        assert not torch.equal(worker.get_logprobs(mine)["logprobs"], before)
        torch.testing.assert_close(found, worker.get_logprobs(mine)["logprobs"], rtol=2e-5, atol=2e-5)
        goes_on = worker.train(mine, NLLLoss())["global_loss"]
        goes_on = [goes_on, worker.train(mine, NLLLoss())["global_loss"]]
    with worker_of(model, after_at) as worker:
        worker.load_checkpoint(*paths)
        mine = shard(data, worker)
        torch.testing.assert_close([worker.train(mine, NLLLoss())["global_loss"] for _ in range(2)], goes_on)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size is 2: .* set it to 1"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2 and the model has 0 experts"),
        ({"expert_parallel_size": 2}, "expert_parallel_size is 2: .* set megatron_cfg.expert_model_parallel_size"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size is 2 and pipeline.* 1"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "num_hidden_layers is 2 and the pipeline has 4 stages",
        ),
    ],
)
@ranks(2)
def test_layouts_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        MegatronPolicyWorker(tiny_config(model_config()) | {"megatron_cfg": sizes})


@ranks(2)
def test_experts_of_tensor_parallel_ranks_need_sequence_parallelism():
    with pytest.raises(ValueError, match="sequence_parallel is False .* set sequence_parallel to True"):
        MegatronPolicyWorker(tiny_config(model_config("mixtral")) | {"megatron_cfg": LAYOUTS["tp"]})


@ranks(2)
def test_a_loss_that_fails_on_the_last_stage_is_an_error_on_all():
    def fails(*_):
        raise ArithmeticError("the loss has had enough")

    fails.needs = ("token_mask",)
    with worker_of(model_config(), "pp") as worker:
        data = shard(tiny_batch(), worker)
        with pytest.raises((ArithmeticError, RuntimeError), match="had enough|loss_fn failed on ranks .1."):
            worker.train(data, fails)
        assert torch.isfinite(worker.train(data, NLLLoss())["global_loss"]).all()


@pytest.mark.slow
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


@pytest.mark.slow
@ranks(2)
def test_a_second_worker_of_another_size_is_refused():
    with worker_of(model_config(), "dp"), pytest.raises(ValueError, match="tensor parallel size 2.* are of 1"):
        MegatronPolicyWorker(tiny_config(model_config()) | {"megatron_cfg": LAYOUTS["tp"]})


@pytest.mark.slow
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
    from megatron_ext.policy.megatron_model import llama

    with pytest.raises(ValueError, match="vocab_size is 97 with 2"):
        llama.check(LlamaConfig(**SIZES), 2)
    scaled = LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type is not the plain Llama's"):
        llama.check(scaled, 1)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    for kind, others in ((Qwen3MoeConfig, experts), (Qwen2Config, {}), (Qwen3Config, {"head_dim": 8})):
        llama.check(kind(**SIZES, **others, use_sliding_window=False), 1)
        windowed = kind(**SIZES, **others, use_sliding_window=True, sliding_window=4, max_window_layers=0)
        with pytest.raises(ValueError, match="sliding window is not the plain Llama's; use DTensorPolicyWorker"):
            llama.check(windowed, 1)
    from transformers import Gemma3TextConfig

    with pytest.raises(ValueError, match="llama, qwen2, qwen3"), worker_of(Gemma3TextConfig(), "dp"):
        pass
