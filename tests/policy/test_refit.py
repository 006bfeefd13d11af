"""Weights arrive whole and equal in another process that holds the plain Hugging Face model, and nothing is left."""

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss, join_collective, load_weights, receive_weights
from megatron_ext.policy.refit import buckets
from tests.policy.problems import shard, tiny_batch, tiny_config, tiny_model, whole
from tests.ranks import ranks

BUFFER_BYTES = 16 << 10  # the embedding takes 12 kB: several buckets


def trained_worker(model, tp=1, **overrides):
    worker = DTensorPolicyWorker(tiny_config(model, tp=tp, refit_buffer_bytes=BUFFER_BYTES, **overrides))
    worker.train(shard(tiny_batch(), worker), NLLLoss())
    return worker


def plain_with_other_weights(model):
    torch.manual_seed(99)
    return AutoModelForCausalLM.from_config(model)


def groups_of(sizes, budget):
    """Names, so many at a time as the budget allows."""
    found, room = [[]], budget
    for name, nbytes in sizes:
        if found[-1] and nbytes > room:
            found.append([])
            room = budget
        found[-1].append(name)
        room -= nbytes
    return found


@pytest.mark.parametrize("tied, tp", [(False, 2), (True, 1)])
@ranks(2)
def test_shared_memory(tied, tp):
    """Rank 0 shares; rank 1, another process, reads."""
    model = tiny_model(tie_word_embeddings=tied)
    worker = trained_worker(model, tp)
    plain = plain_with_other_weights(model)
    info = worker.prepare_refit_info()
    sizes, budget = worker.prepare_weights_for_ipc()
    assert [name for name, _ in sizes] == list(info)
    assert budget == BUFFER_BYTES
    seen = []
    for keys in groups_of(sizes, budget):
        handles = worker.get_weights_ipc_handles(keys)
        assert len(handles) == (dist.get_rank() == 0)
        shared = [handles]
        dist.broadcast_object_list(shared)
        [(device, handle)] = shared[0].items()
        assert device == worker.report_device_id()
        assert [row.name for row in handle.rows] == keys
        assert all(name not in os.listdir("/dev/shm") for name in seen)  # one buffer at a time
        seen.append(handle.where)
        assert handle.where in os.listdir("/dev/shm")
        assert os.stat(f"/dev/shm/{handle.where}").st_size <= BUFFER_BYTES + 64 * len(keys)
        if dist.get_rank() == 1:
            load_weights(plain, handle)
        dist.barrier()
    assert len(seen) > 3
    if dist.get_rank() == 1:
        assert not torch.equal(plain.model.norm.weight, plain_with_other_weights(model).model.norm.weight)
    worker.offload_after_refit()
    dist.barrier()
    assert all(name not in os.listdir("/dev/shm") for name in seen)
    true = whole(worker._state())
    if dist.get_rank() == 1:
        assert all(torch.equal(plain.state_dict()[name], x) for name, x in true.items())
    worker.prepare_for_training()
    worker.train(shard(tiny_batch(), worker), NLLLoss())


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@ranks(2)
def test_collective(precision):
    """A thread of rank 1 is the generator: it meets rank 0 in a group that the trainer's world knows nothing of."""
    model = tiny_model()
    worker = trained_worker(model, 2, precision=precision)
    plain = plain_with_other_weights(model)
    port = [free_port()]
    dist.broadcast_object_list(port)
    info = worker.prepare_refit_info()
    faults = []

    def generate():
        try:
            group = join_collective("127.0.0.1", port[0], 1, 2)
            for _ in range(2):
                receive_weights(plain, group, info, BUFFER_BYTES)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=generate)
    if dist.get_rank() == 1:
        thread.start()
    worker.init_collective("127.0.0.1", port[0], 2)
    worker.broadcast_weights_for_collective()
    worker.broadcast_weights_for_collective()
    if dist.get_rank() == 1:
        thread.join(30)
        assert not faults
    true = whole(worker._state())
    if dist.get_rank() == 1:
        dtype = getattr(torch, precision)
        assert all(torch.equal(plain.state_dict()[name], x.to(dtype).float()) for name, x in true.items())
    worker.shutdown()


def test_buckets_keep_to_their_size_and_order():
    info = {f"w{i}": (torch.Size([n]), torch.float32) for i, n in enumerate([100, 3, 0, 5000, 7, 100, 100])}
    found = buckets(info, 1024)
    assert [row.name for bucket in found for row in bucket.rows] == list(info)
    assert all(bucket.nbytes <= 1024 or len(bucket.rows) == 1 for bucket in found)
    assert [len(bucket.rows) for bucket in found] == [3, 1, 3]
    for bucket in found:
        ends = [row.offset + row.nbytes for row in bucket.rows]
        assert all(row.offset >= end for row, end in zip(bucket.rows[1:], ends, strict=False))
        assert all(row.offset % 64 == 0 for row in bucket.rows)
        assert ends[-1] <= bucket.nbytes
    assert buckets({}, 1024) == []


@ranks(1)
def test_a_model_of_other_shape_is_refused():
    worker = DTensorPolicyWorker(tiny_config())
    [handle] = worker.get_weights_ipc_handles(list(worker.prepare_refit_info())).values()
    other = AutoModelForCausalLM.from_config(tiny_model(intermediate_size=64))
    with pytest.raises(ValueError, match=r"the model has it as \[64, 32\]"):
        load_weights(other, handle)
    worker.shutdown()
    assert handle.where not in os.listdir("/dev/shm")
