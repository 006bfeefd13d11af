"""The Megatron backend against the same truth as the other one: transformers' model in one process."""

import pytest
import torch
import torch.distributed as dist
import transformers

from megatron_ext.policy import ClippedPGLoss, MegatronPolicyWorker, NLLLoss, load_weights
from megatron_ext.policy.worker.optimizer import check_elementwise
from tests.dtensor.models import family_config
from tests.gpt import forget_megatron
from tests.marks import slow
from tests.policy.problems import (
    batching,
    check_trains,
    ended,
    exported,
    plain_log_probs,
    plain_model,
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


def model_config(kind="llama", tied=False, layers=2, **more):
    more = {"sliding_window": None, "use_sliding_window": False} | more
    return family_config(kind, tied, vocab_size=98, num_hidden_layers=layers, **more)


def worker_of(model, layout, **overrides):
    return ended(MegatronPolicyWorker(tiny_config(model, **overrides) | {"megatron_cfg": LAYOUTS[layout]}))


def check(layout, kinds, *model):
    config = tiny_config(model_config(*model))
    for cut in kinds:
        with worker_of(config["model_name"], layout, **batching(cut)) as worker:
            check_trains(worker, config, tiny_batch(16), GRPO)


@pytest.mark.parametrize(
    "layout, kinds, model",
    [
        ("tp_sp", ["fixed", "packed"], ()),
        *slow(
            ("dp", ["fixed", "packed"], ()),
            ("cp", ["fixed", "packed"], ()),
            ("recompute", ["fixed"], ()),
            ("tp", ["dynamic"], ("llama", True)),
            ("tp", ["dynamic"], ("qwen2",)),
            ("tp", ["dynamic"], ("qwen3", True)),
            ("pp", ["packed"], ("llama", True)),
            # A rank has the layers 0 and 2, or 1 and 3.
            ("pp_virtual", ["fixed", "dynamic", "packed"], ("llama", True, 4)),
            # The first rank has one layer, the last two.
            ("pp_uneven", ["fixed", "dynamic", "packed"], ("qwen3", True, 3)),
            ("ep", ["fixed"], ("qwen3_moe",)),
        ),
    ],
    ids=str,
)
@ranks(2)
def test_two_ranks(layout, kinds, model):
    check(layout, kinds, *model)


@pytest.mark.parametrize(
    "layout, kinds, model",
    [
        ("tp_sp", ["dynamic"], "qwen3"),
        ("cp_tp_sp", ["fixed", "packed"], "qwen3"),
        ("pp", ["fixed"], "qwen2"),
        ("pp_tp_sp", ["packed"], "qwen2"),
        ("pp_cp", ["fixed", "packed"], "qwen2"),
        ("pp_ep", ["fixed"], "mixtral"),
        ("pp_ep", ["packed"], "qwen3_moe"),
        ("ep_tp_sp", ["packed"], "mixtral"),
        ("ep_tp_sp", ["fixed"], "qwen3_moe"),
    ],
    ids=str,
)
@ranks(4)
def test_four_ranks(layout, kinds, model):
    check(layout, kinds, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before_at, after_at, model",
    [
        ("tp", "dp", ()),
        ("pp_virtual", "tp", ("llama", True, 4)),
        ("dp", "pp", ("qwen3", False, 4)),
        ("ep", "pp", ("mixtral", False, 4)),
    ],
    ids=str,
)
@ranks(2)
def test_saved_at_one_layout_and_continued_at_another(before_at, after_at, model):
    """transformers' model gets the weights by its own names."""
    model, folder, data = model_config(*model), shared_folder(), tiny_batch()
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
    "kind, sizes, message",
    [
        ("mixtral", LAYOUTS["tp"], "sequence_parallel is False .* set sequence_parallel to True"),
        ("llama", {"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size is 2: .* set it to 1"),
        ("llama", {"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2 and the model has 0 experts"),
        (
            "llama",
            {"expert_parallel_size": 2},
            "expert_parallel_size is 2: expert_model_parallel_size is the key that shares experts out",
        ),
        (
            "llama",
            {"virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size is 2 and pipeline.* 1",
        ),
        ("llama", LAYOUTS["pp_virtual"], "num_hidden_layers is 2 and the pipeline has 4 stages"),
    ],
)
@ranks(2)
def test_layouts_that_cannot_be(kind, sizes, message):
    with pytest.raises(ValueError, match=message):
        MegatronPolicyWorker(tiny_config(model_config(kind)) | {"megatron_cfg": sizes})


def test_optimizers_that_look_at_a_whole_weight_are_told():
    def check(name):
        check_elementwise({"name": f"torch.optim.{name}", "kwargs": {"lr": 1e-2}}, torch.device("cpu"))

    for name in ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]:
        check(name)
    for name in ("Adafactor", "Muon"):
        with pytest.raises(ValueError, match=f"optimizer is torch.optim.{name}, whose step .* depends on the whole"):
            check(name)


@pytest.mark.slow
@ranks(2)
def test_an_optimizer_of_whole_weights_is_refused_for_parts():
    config = tiny_config(model_config(), optimizer={"name": "torch.optim.Adafactor", "kwargs": {"lr": 1e-2}})
    with pytest.raises(ValueError, match="Adafactor, whose step of a weight depends on the whole weight"):
        MegatronPolicyWorker(config | {"megatron_cfg": LAYOUTS["tp"]})
    with ended(MegatronPolicyWorker(config | {"megatron_cfg": LAYOUTS["dp"]})) as worker:
        worker.train(shard(tiny_batch(), worker), NLLLoss())


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
    forget_megatron()


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


@pytest.mark.parametrize(
    "options, layers",
    [
        ({"mlp_only_layers": []}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
    ids=str,
)
def test_layers_with_experts_are_those_of_transformers(options, layers):
    from megatron_ext.policy.megatron_model import llama

    config = model_config("qwen3_moe", layers=4, **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers] == layers
    assert llama._experts_arguments(config, 4)["moe_layer_freq"] == layers


@ranks(1)
def test_models_that_gpt_model_does_not_compute():
    from megatron_ext.policy.megatron_model import llama

    with pytest.raises(ValueError, match="vocab_size is 97 with 2"):
        llama.check(family_config("llama"), 2)
    with pytest.raises(ValueError, match="rope_type is not the plain Llama's"):
        llama.check(model_config(rope_scaling={"rope_type": "linear", "factor": 2.0}), 1)
    with pytest.raises(ValueError, match="is_causal is not the plain Llama's"):
        llama.check(model_config(is_causal=False), 1)
    for kind in ("qwen3_moe", "qwen2", "qwen3"):
        llama.check(model_config(kind, use_sliding_window=False), 1)
        windowed = model_config(kind, use_sliding_window=True, sliding_window=4, max_window_layers=0)
        with pytest.raises(ValueError, match="sliding window is not the plain Llama's; use DTensorPolicyWorker"):
            llama.check(windowed, 1)
    with pytest.raises(ValueError, match="llama, qwen2, qwen3"), worker_of(family_config("gemma3"), "dp"):
        pass
