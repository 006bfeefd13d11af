"""Weights for generators of any kind: by the Hub's names, in buckets, and into vLLM's `load_weights`."""

import pickle

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_ext.dtensor.pretrained.saving import hub_rename
from megatron_ext.policy import DTensorPolicyWorker, MegatronPolicyWorker, NLLLoss
from megatron_ext.policy.refit.weight_transfer import require_same_buckets, send_weights
from megatron_ext.policy.vllm_extension import refit_vllm
from tests.dtensor.models import make
from tests.marks import slow
from tests.policy.problems import ended, exported, plain_model, shard, tiny_batch, tiny_config, tiny_model
from tests.policy.test_megatron_worker import LAYOUTS, model_config
from tests.policy.vllm_standin import Engine
from tests.ranks import ranks

# What vLLM asks for of a layer's experts: w1, w2 and w3 of each of Mixtral's, the projections of each of Qwen3-MoE's,
# and all of GPT-OSS's in one.
EXPERTS = {
    "llama": set(),
    "mixtral": {f"block_sparse_moe.experts.{i}.w{n}.weight" for i in range(4) for n in (1, 2, 3)},
    "qwen3_moe": {f"mlp.experts.{i}.{n}_proj.weight" for i in range(4) for n in ("gate", "up", "down")},
    "gpt_oss": {f"mlp.experts.{n}_proj{kind}" for n in ("gate_up", "down") for kind in ("", "_bias")},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
def test_names_are_those_of_files(tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path)  # what the Hub has
    true = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    rename = hub_rename(lambda: make(kind))
    found = dict(pair for name, x in model.state_dict().items() for pair in rename(name, x))
    assert found.keys() == true.keys()
    assert all(torch.equal(found[name], x) for name, x in true.items())
    experts = {name.partition("layers.0.")[2] for name in true if "layers.0." in name and "experts." in name}
    assert experts == EXPERTS[kind]


@pytest.mark.parametrize("backend", [*slow("dtensor"), "megatron"])
@ranks(2)
def test_iterated_after_training(backend):
    """All ranks get every weight whole, as one process has it, in buckets that are no larger than asked for."""
    if backend == "dtensor":
        worker = DTensorPolicyWorker(tiny_config(tp=2, precision="bfloat16"))
    else:
        config = tiny_config(model_config("mixtral"), precision="bfloat16", megatron_cfg=LAYOUTS["ep"])
        worker = MegatronPolicyWorker(config)
    with ended(worker):
        worker.train(shard(tiny_batch(), worker), NLLLoss())
        true = {name: x.bfloat16() for name, x in exported(worker).items()}
        plain = dict(worker.iter_weights(hub_names=False))
        assert plain.keys() == true.keys()
        assert all(torch.equal(plain[name], x) for name, x in true.items())
        filled = list(worker.iter_weight_buckets(4096))
        sizes = [sum(x.nbytes for _, x in bucket) for bucket in filled]
        assert len(sizes) > 3
        assert all(size <= 4096 or len(bucket) == 1 for size, bucket in zip(sizes, filled, strict=True))
        hub = {name: x for bucket in filled for name, x in bucket}
        rename = hub_rename(lambda: plain_model(worker.settings.model))
        wanted = dict(pair for name, x in true.items() for pair in rename(name, x))
        assert list(hub) == list(wanted)
        assert all(torch.equal(hub[name], x) for name, x in wanted.items())
        for bytes_ in (-1, 0):
            with pytest.raises(ValueError, match=f"buffer_bytes is {bytes_}"):
                next(worker.iter_weight_buckets(bytes_))


class Policy:
    """`RayPolicy`'s methods for refitting, of one worker in this process."""

    def __init__(self, worker):
        self.worker = worker

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def free_weights(self):
        self.worker.get_weights_ipc_handles([])


@pytest.mark.parametrize("kind", ["llama", *slow("mixtral")])
@ranks(1)
def test_refit_of_vllm(kind):
    config = model_config(kind)
    worker = DTensorPolicyWorker(tiny_config(config, refit_buffer_bytes=1 << 13))
    hub = dict(worker.iter_weights())
    engine = Engine(hub, config, 2)
    refit_vllm(Policy(worker), engine)
    assert [x.model_runner.model.largest_difference(hub) for x in engine.workers] == [0.0, 0.0]
    worker.train(tiny_batch(), NLLLoss())
    changed = dict(worker.iter_weights())
    assert engine.workers[0].model_runner.model.largest_difference(changed) > 1e-4
    refit_vllm(Policy(worker), engine)
    assert [x.model_runner.model.largest_difference(changed) for x in engine.workers] == [0.0, 0.0]
    assert worker.refitter.held is None
    worker.shutdown()


@pytest.mark.parametrize("method", ["policy_weights_load", "policy_weights_finish"])
def test_weights_are_freed_when_vllm_fails(method):
    """Shared weights would stay in memory; the caller sees the engine's own error."""

    class Worker:
        def prepare_weights_for_ipc(self):
            return [], 1024.0

        def prepare_refit_info(self):
            return {"w": (torch.Size([3]), torch.float32)}

        def get_weights_ipc_handles(self, keys, devices=None):
            open_now[:] = keys
            return {"CPU-here": None}

    class Failing:
        def collective_rpc(self, name, timeout=None, args=(), kwargs=None):
            if name == "policy_device_id":
                return ["CPU-here"]
            assert open_now == ["w"]
            if name == method:
                raise RuntimeError("a worker of the engine died")
            return []

    open_now = []
    with pytest.raises(RuntimeError, match="a worker of the engine died"):
        refit_vllm(Policy(Worker()), Failing())
    assert open_now == []


@pytest.mark.slow
@ranks(3)
def test_refit_of_vllm_by_broadcast():
    """The policy is rank 0 of the jobs' group, the engine's two workers are 1 and 2."""
    from megatron_ext.distributed.group_between_jobs import JobsGroup
    from tests.held_port import shared_port

    plain = plain_model(tiny_model())
    weights = {name: x.detach() for name, x in plain.state_dict().items()}
    info = {name: (x.shape, x.dtype) for name, x in weights.items()}
    port = shared_port()
    if dist.get_rank() == 0:
        group = JobsGroup("127.0.0.1", port, 0, 3)
        require_same_buckets(info, group, 1 << 13)
        send_weights(weights.items(), info, group, 1 << 13)
        return
    engine = Engine(weights, tiny_model(), 2)
    worker = engine.workers[dist.get_rank() - 1]
    engine.workers = [worker]  # the other one is in another process
    received = {"args": (pickle.dumps(info), 1 << 13)}
    with pytest.raises(ValueError, match=r"came before policy_weights_join\(\)"):
        engine.collective_rpc("policy_weights_receive", **received)
    engine.collective_rpc("policy_weights_join", args=("127.0.0.1", port, 1, 3))
    with pytest.raises(TypeError, match=r"torch\.(Size|dtype).* is not serializable"):
        engine.collective_rpc("policy_weights_receive", args=(info, 1 << 13))
    engine.collective_rpc("policy_weights_receive", **received)
    engine.collective_rpc("policy_weights_finish")
    assert worker.model_runner.model.largest_difference(weights) == 0.0


@ranks(1)
def test_what_vllm_cannot_take_is_said():
    config = tiny_model()
    worker = DTensorPolicyWorker(tiny_config(config))
    hub = dict(worker.iter_weights())
    [receiver] = Engine(hub, config, 1).workers
    names = list(worker.prepare_refit_info())
    handles = worker.get_weights_ipc_handles(names[:-1])
    with pytest.raises(ValueError, match="rank 0 runs on CPU-.*the weights lie on GPU-1"):
        receiver.policy_weights_load({"GPU-1": None})
    receiver.policy_weights_load(handles)
    with pytest.raises(ValueError, match=r"did not get lm_head/weight#0 \(1 weights\)"):
        receiver.policy_weights_finish()
    receiver.model_runner.vllm_config.quant_config = "fp8"
    with pytest.raises(ValueError, match="vLLM's model is quantized"):
        receiver.policy_weights_load(handles)
    worker.shutdown()
