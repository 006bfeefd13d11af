"""Weights arrive whole and equal in another process that holds the plain Hugging Face model, and nothing is left."""

import inspect
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.policy import DTensorPolicyWorker, NLLLoss, join_collective, load_weights, receive_weights
from megatron_ext.policy.refit import weight_transfer
from megatron_ext.policy.refit.shared_memory import SharedBlock, map_block
from megatron_ext.policy.refit.weight_transfer import buckets, require_same_buckets, send_weights
from tests.held_port import shared_port
from tests.marks import slow
from tests.policy.problems import plain_model, shard, tiny_batch, tiny_config, tiny_model, whole
from tests.ranks import TIMEOUT_S, ranks

BUFFER_BYTES = 16 << 10  # the embedding takes 12 kB: several buckets


def trained_worker(model, tp=1, **overrides):
    worker = DTensorPolicyWorker(tiny_config(model, tp=tp, refit_buffer_bytes=BUFFER_BYTES, **overrides))
    worker.train(shard(tiny_batch(), worker), NLLLoss())
    return worker


def is_open(address):
    """Says whether the block still has its descriptor, whose number another file may have by now."""
    return os.path.exists(address.path) and os.stat(address.path).st_ino == address.inode


@pytest.mark.parametrize("tied, tp", [(True, 1), *slow((False, 2))])
@ranks(2)
def test_shared_memory(tied, tp):
    """Rank 0 shares; rank 1, another process, reads."""
    model = tiny_model(tie_word_embeddings=tied)
    worker = trained_worker(model, tp)
    plain = plain_model(model, seed=99)
    info = worker.prepare_refit_info()
    sizes, budget = worker.prepare_weights_for_ipc()
    assert sizes == [(name, shape.numel() * dtype.itemsize) for name, (shape, dtype) in info.items()]
    assert budget == BUFFER_BYTES
    seen = []
    for keys in ([row.name for row in bucket] for bucket in buckets(info, BUFFER_BYTES)):
        handles = worker.get_weights_ipc_handles(keys)
        assert len(handles) == (dist.get_rank() == 0)
        shared = [handles]
        dist.broadcast_object_list(shared)
        [(device, handle)] = shared[0].items()
        assert device == worker.report_device_id()
        assert [row.name for row in handle.rows] == keys
        assert not any(is_open(address) for address in seen)  # one buffer at a time
        seen.append(handle.where)
        assert is_open(handle.where)
        assert os.stat(handle.where.path).st_size <= BUFFER_BYTES + 64 * len(keys)
        if dist.get_rank() == 1:
            load_weights(plain, handle)
        dist.barrier()
    assert len(seen) > 3
    if dist.get_rank() == 1:
        assert not torch.equal(plain.model.norm.weight, plain_model(model, seed=99).model.norm.weight)
    worker.offload_after_refit()
    dist.barrier()
    assert not any(is_open(address) for address in seen)
    true = whole(worker.return_state_dict())
    if dist.get_rank() == 1:
        assert all(torch.equal(plain.state_dict()[name], x) for name, x in true.items())
    worker.prepare_for_training()
    worker.train(shard(tiny_batch(), worker), NLLLoss())


@contextmanager
def generating(generate):
    """A thread of rank 1 that runs `generate()` meanwhile; a fault of it is raised at the end."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(generate) if dist.get_rank() == 1 else None
        yield
        if made is not None:
            made.result(TIMEOUT_S)


@pytest.mark.parametrize("precision", ["float32", *slow("bfloat16")])
@ranks(2)
def test_collective(precision):
    """A thread of rank 1 is the generator: it meets rank 0 in a group that the trainer's world knows nothing of."""
    model = tiny_model()
    worker = trained_worker(model, 2, precision=precision)
    plain = plain_model(model, seed=99)
    port = shared_port()
    info = worker.prepare_refit_info()

    def generate():
        group = join_collective("127.0.0.1", port, 1, 2)
        for _ in range(2):
            receive_weights(plain, group, info, BUFFER_BYTES)

    with generating(generate):
        worker.init_collective("127.0.0.1", port, 2)
        worker.broadcast_weights_for_collective()
        worker.broadcast_weights_for_collective()
    true = whole(worker.return_state_dict())
    if dist.get_rank() == 1:
        dtype = getattr(torch, precision)
        assert all(torch.equal(plain.state_dict()[name], x.to(dtype).float()) for name, x in true.items())
    worker.shutdown()


@pytest.mark.slow
@ranks(2)
def test_a_generator_that_comes_too_late_needs_a_new_group():
    """All are told: the policy's other rank by the first. At the same port they meet again, and nothing was lost."""
    model, port = tiny_model(), shared_port()
    worker = trained_worker(model, 2)
    plain, info = plain_model(model, seed=99), worker.prepare_refit_info()
    given_up = threading.Event()

    def generate():
        group = join_collective("127.0.0.1", port, 1, 2)
        given_up.wait(TIMEOUT_S)
        with pytest.raises(RuntimeError, match=r"^ranks \[1\] of the 2 that"):
            receive_weights(plain, group, info, BUFFER_BYTES)
        receive_weights(plain, join_collective("127.0.0.1", port, 1, 2), info, BUFFER_BYTES)

    with generating(generate):
        worker.init_collective("127.0.0.1", port, 2)
        if dist.get_rank() == 0:
            worker.refitter.to_generators._store.set_timeout(timedelta(seconds=1))
        with pytest.raises(RuntimeError, match=r"ranks \[1\] of the 2 that meet for weights did not come"):
            worker.broadcast_weights_for_collective()
        given_up.set()
        worker.init_collective("127.0.0.1", port, 2)
        worker.broadcast_weights_for_collective()
    true = whole(worker.return_state_dict())
    if dist.get_rank() == 1:
        assert all(torch.equal(plain.state_dict()[name], x) for name, x in true.items())
    worker.shutdown()


@pytest.mark.parametrize("given", ["order", "size"])
@ranks(2)
def test_generators_that_expect_other_buckets_are_told(given):
    """Weights of one shape in another order arrived under each other's names, and buckets of other sizes never."""
    group = JobsGroup("127.0.0.1", shared_port(), dist.get_rank(), 2)
    weights = {name: torch.full((64,), value) for name, value in {"up": 1.0, "down": 2.0, "gate": 3.0}.items()}
    info = {name: (x.shape, x.dtype) for name, x in weights.items()}
    plain = torch.nn.ParameterDict({name: torch.zeros(64) for name in weights})

    def refit(info, buffer_bytes):
        if dist.get_rank() == 0:
            require_same_buckets(info, group, buffer_bytes)
            send_weights(weights.items(), info, group, buffer_bytes)
        else:
            receive_weights(plain, group, info, buffer_bytes)

    other = (dict(reversed(info.items())), BUFFER_BYTES) if given == "order" else (info, 300)
    with pytest.raises(ValueError, match=r"ranks \[1\] of 2 expect other buckets.*in its order, and its refit_buffer"):
        refit(*(other if dist.get_rank() == 1 else (info, BUFFER_BYTES)))
    assert all(not x.any() for x in plain.values())
    lacking = plain.pop("up")  # is told when all has been received
    with pytest.raises(ValueError, match="weight up .* lacks it") if dist.get_rank() == 1 else nullcontext():
        refit(info, 300)
    plain["up"] = lacking
    refit(info, BUFFER_BYTES)
    if dist.get_rank() == 1:
        assert all(torch.equal(plain[name], x) for name, x in weights.items())


@ranks(2)
def test_ranks_that_ask_for_other_handles_are_told():
    worker = DTensorPolicyWorker(tiny_config(tp=2))
    names = list(worker.prepare_refit_info())[:3]
    with pytest.raises(ValueError, match=r"other keys or devices on ranks \[1\] than on rank 0"):
        worker.get_weights_ipc_handles(names if dist.get_rank() == 0 else names[::-1])
    with pytest.raises(ValueError, match="the model has no weights"):
        worker.get_weights_ipc_handles(names if dist.get_rank() == 0 else ["none"])


def test_buckets_keep_to_their_size_and_order():
    info = {f"w{i}": (torch.Size([n]), torch.float32) for i, n in enumerate([100, 3, 0, 5000, 7, 100, 100])}
    found = buckets(info, 1024)
    assert [row.name for bucket in found for row in bucket] == list(info)
    assert all(bucket[-1].end <= 1024 or len(bucket) == 1 for bucket in found)
    assert [len(bucket) for bucket in found] == [3, 1, 3]
    for bucket in found:
        ends = [row.offset + row.nbytes for row in bucket]
        assert all(row.offset >= end for row, end in zip(bucket[1:], ends, strict=False))
        assert all(row.offset % 64 == 0 for row in bucket)
        assert ends[-1] <= bucket[-1].end
    assert buckets({}, 1024) == []


@ranks(1)
def test_a_model_of_other_shape_is_refused():
    worker = DTensorPolicyWorker(tiny_config())
    [handle] = worker.get_weights_ipc_handles(list(worker.prepare_refit_info())).values()
    other = plain_model(tiny_model(intermediate_size=64))
    with pytest.raises(ValueError, match=r"the model has it as \[64, 32\]"):
        load_weights(other, handle)
    worker.shutdown()
    assert not is_open(handle.where)


@ranks(2)
def test_only_the_devices_that_are_asked_for():
    worker = DTensorPolicyWorker(tiny_config(), init_optimizer=False, init_reference_model=False)
    names, here = list(worker.prepare_refit_info()), worker.report_device_id()
    assert worker.get_weights_ipc_handles(names, ["GPU-of-another-host"]) == {}
    assert worker.refitter.held is None
    found = worker.get_weights_ipc_handles(names, [here, "GPU-of-another-host"])
    assert list(found) == [here] * (dist.get_rank() == 0)
    worker.shutdown()


def test_a_gpu_is_found_by_its_id_not_its_number(monkeypatch):
    """The owner's GPU is its number 0, and number 1 of the reader."""
    seen = {"CPU-here": torch.device("cpu"), "GPU-a": torch.device("cuda", 0), "GPU-b": torch.device("cuda", 1)}
    monkeypatch.setattr(weight_transfer, "visible_devices", lambda: seen)

    def rebuild(size, storage_device, storage_handle):
        return size, storage_device, storage_handle

    address = weight_transfer.CudaAddress("GPU-b", rebuild, (7, 0, b"handle"))
    assert weight_transfer._on_this_gpu(address) == (7, 1, b"handle")
    with pytest.raises(ValueError, match="lie on GPU-c, and this process sees CPU-here, GPU-a, GPU-b"):
        weight_transfer._on_this_gpu(weight_transfer.CudaAddress("GPU-c", rebuild, (7, 0, b"handle")))


@pytest.mark.gpu
def test_what_torch_calls_the_number_of_a_gpu():
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(torch.ones(3, device="cuda"))
    assert inspect.signature(rebuild).bind(*arguments).arguments["storage_device"] == 0


def test_a_shared_block_is_mapped_by_its_host_while_it_lasts():
    block = SharedBlock(5)
    block.buffer.copy_(torch.arange(5))
    other = map_block(block.address)
    assert other.tolist() == list(range(5))
    other[0] = 9  # stays here
    assert block.buffer[0] == 0
    with pytest.raises(ValueError, match="shared cannot be mapped"):
        map_block(replace(block.address, host="elsewhere"))
    block.free()
    assert other.tolist() == [9, 1, 2, 3, 4]
    descriptor = os.memfd_create("another one, with the same number")
    assert descriptor == block.address.descriptor
    with pytest.raises(ValueError, match="were freed"):
        map_block(block.address)
    os.close(descriptor)
    with pytest.raises(ValueError, match="were freed"):
        map_block(block.address)
    block.free()


def _lay_open(pipe):
    held = weight_transfer.HeldWeights(buckets({"w": (torch.Size([3]), torch.float32)}, 1024)[0], torch.device("cpu"))
    pipe.send(held.handle)
    time.sleep(TIMEOUT_S)


def test_nothing_is_left_of_a_process_that_was_killed():
    before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    owner = context.Process(target=_lay_open, args=(there,))
    owner.start()
    handle = here.recv()
    assert is_open(handle.where)
    assert [name for name, _ in weight_transfer.read_weights(handle)] == ["w"]
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert not is_open(handle.where)
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(ValueError, match="their owner has died"):
        next(weight_transfer.read_weights(handle))
