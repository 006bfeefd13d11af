"""Answers of `torch` inside the emulation: devices, random numbers, streams, files."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_on_cpu import megatron_on_cpu
from tests.ranks import TIMEOUT_S


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_cuda_devices_are_the_cpu(device):
    like = torch.ones(2)
    with megatron_on_cpu():
        made = [
            torch.full((2,), 1.0, device=device),
            torch.tensor([1.0, 1.0], device=device, pin_memory=True),
            torch.ones_like(like, device=device),
            like.new_ones(2, device=device),
            like.to(device),
            like.to(device=device),
            like.to(device, torch.float32, non_blocking=True),
            like.cuda(device, non_blocking=True),
            torch.nn.Linear(2, 2, device=device).to(device).cuda().weight.detach().fill_(1)[0],
        ]
        if device != 0:
            with torch.device(device):
                made.append(torch.ones(2))
    for tensor in made:
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, like)


def test_other_devices_and_dtypes_stay():
    with megatron_on_cpu():
        assert torch.empty(2, device="meta").device.type == "meta"
        assert torch.ones(2).to("meta").device.type == "meta"
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(2).to(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


def test_tensor_types_are_named_as_on_cuda():
    with megatron_on_cpu():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        with torch.device("cpu"):  # any function mode makes torch call the method twice
            assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
        assert torch.ones(1).type(torch.int32).dtype == torch.int32
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_the_device_has_a_generator_of_its_own():
    """Seeded alike, both give the same numbers; what one gives is not missing from the other."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    with megatron_on_cpu():
        torch.manual_seed(7)  # which seeds all CUDA devices too
        assert torch.equal(torch.rand(3), expected)
        assert torch.equal(torch.rand(3, device="cuda"), expected)
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        assert torch.equal(torch.rand(3, device=torch.device("cuda", 0)), expected)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.empty(3).uniform_(), expected)  # what an operator draws is the device's
        with torch.random.fork_rng(devices=[0]):
            torch.rand(5, device="cuda")
            torch.rand(5)
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), expected)
        torch.cuda.manual_seed(8)
        assert torch.initial_seed() == 7 != torch.cuda.initial_seed()


def test_a_number_is_a_device():
    """A number comes from `torch.cuda.current_device()`; the device is torch's own all the same, and its pickle too."""
    with megatron_on_cpu():
        kind = torch.device
        device = torch.device(torch.cuda.current_device())
        assert device == torch.device(device=0) == torch.device("cuda", 0) == torch.device("cuda:0")
        assert (torch.device("meta").type, torch.device(type="cpu", index=0).index) == ("meta", 0)
        with torch.device(0):
            assert torch.zeros(1).device.type == "cpu"
        assert isinstance(device, torch.device)
        assert not isinstance("cuda", torch.device)
        assert {type(device): "found"}.get(torch.device) == "found"

        def annotated(x: Tensor, device: torch.device) -> Tensor:
            return x

        assert torch.library.infer_schema(annotated, mutates_args=()) == "(Tensor x, Device device) -> Tensor"
        assert [copy.deepcopy(device), pickle.loads(pickle.dumps(device))] == [device, device]
        pickled = pickle.dumps(device)
        stored = io.BytesIO()
        torch.save({"device": device}, stored)
        stored.seek(0)
        assert torch.load(stored, weights_only=True) == {"device": device}
    assert torch.device is not kind
    assert type(device) is torch.device
    assert pickle.loads(pickled) == device


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0), 0, "cpu", None])
def test_generators_beside_the_devices_own(device):
    """One that a program makes, as Megatron's inference does, whatever the device is called."""
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    with megatron_on_cpu():
        kind = torch.Generator
        generator = torch.Generator() if device is None else torch.Generator(device=device)
        generator.manual_seed(7)
        assert torch.equal(torch.rand(2, generator=generator, device="cuda"), expected[:2])
        pickled = pickle.loads(pickle.dumps(generator))
        for known in (generator, torch.default_generator, torch.cuda.default_generators[0]):
            assert isinstance(known, torch.Generator)
        assert not isinstance(torch.ones(1), torch.Generator)
        assert hasattr(torch.Generator, "clone_state"), "what Transformer Engine asks for"
    assert torch.Generator is not kind
    assert type(generator) is torch.Generator
    assert torch.equal(torch.rand(2, generator=pickled), expected[2:])


def test_a_data_loader_leaves_the_devices_numbers_alone():
    data = torch.utils.data.TensorDataset(torch.arange(5))
    with megatron_on_cpu():
        torch.manual_seed(7)
        host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        list(torch.utils.data.DataLoader(data, shuffle=True))
        torch.utils.data.random_split(data, [2, 3])
        assert torch.equal(torch.cuda.get_rng_state(), device)
        assert not torch.equal(torch.get_rng_state(), host)
        host = torch.get_rng_state()
        torch.nn.functional.dropout(torch.ones(4))
        torch.randn_like(torch.ones(4))
        assert torch.equal(torch.get_rng_state(), host)
        assert not torch.equal(torch.cuda.get_rng_state(), device)


def test_outside_random_numbers_go_on_where_the_hosts_stand():
    torch.manual_seed(7)
    torch.rand(2)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with megatron_on_cpu():
        torch.rand(2)
        torch.rand(9, device="cuda")
    assert torch.equal(torch.rand(3), expected)


def test_states_that_are_referred_to():
    """The device draws from whichever state it was given, and advances that state, as CUDA graphs want."""
    with megatron_on_cpu():
        torch.manual_seed(7)
        device = torch.cuda.default_generators[0]
        first = device.graphsafe_get_state()
        second = device.clone_state()
        second.manual_seed(8)
        expected = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (7, 8)]
        assert torch.equal(torch.rand(2, device="cuda"), expected[0][:2])
        device.graphsafe_set_state(second)
        assert torch.equal(torch.rand(2, device="cuda"), expected[1][:2])
        device.graphsafe_set_state(first)
        assert torch.equal(torch.rand(2, device="cuda"), expected[0][2:])
        device.graphsafe_set_state(second)
        assert torch.equal(torch.rand(2, device="cuda"), expected[1][2:])
        assert torch.equal(second.get_state(), torch.cuda.get_rng_state())
        assert first.initial_seed() == 7
        assert second.initial_seed() == torch.cuda.initial_seed() == 8


def test_scripts_find_a_device():
    with megatron_on_cpu():
        assert torch.cuda.is_available()
        torch.cuda.set_device(0)
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        assert properties.total_memory > 1 << 28
        assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
        assert isinstance(torch.cuda.get_device_name(0), str)
        assert 0 < torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info()[1] == properties.total_memory
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
        assert torch.cuda.memory_snapshot() == torch.cuda.memory_snapshot(include_traces=False) == []
        assert 0 < torch.cuda.device_memory_used() < properties.total_memory
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()


def test_one_device_for_each_rank_of_the_machine(monkeypatch):
    with megatron_on_cpu():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4


@pytest.mark.essential
def test_streams_and_events():
    with megatron_on_cpu():
        side, tensor = torch.cuda.Stream(device="cuda"), torch.ones(3, device="cuda")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.mul_(2)
        tensor.record_stream(side)
        torch.cuda.default_stream().wait_event(side.record_event())
        end.record(side)
        end.synchronize()
        torch.cuda.synchronize()
        assert 0 < start.elapsed_time(end) < 1000 * TIMEOUT_S  # in milliseconds
        assert tensor.tolist() == [2, 2, 2]


def test_a_graph_that_writes_to_memory_which_is_freed_is_refused():
    """Freed values cannot be put back, and a replay would write where nothing is."""
    with megatron_on_cpu():
        x = torch.zeros(4, device="cuda")

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.add_(1)
                x.untyped_storage().resize_(0)

        with pytest.raises(RuntimeError, match=r"tensor of \[4\] was freed while a CUDA graph"):
            capture()
        assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize(
    "autocast",
    [
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16),
        lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16),
    ],
    ids=["position", "keyword", "cuda.amp"],
)
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype:DeprecationWarning")
def test_autocast(autocast):
    a = torch.ones(2, 2)
    with megatron_on_cpu():
        with autocast():
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled(device_type="cuda")
            assert torch.is_autocast_enabled()  # of CUDA too
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_dtype(device_type="cuda") == torch.bfloat16
            assert torch.get_autocast_gpu_dtype() == torch.bfloat16
            assert (a @ a).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_functions_that_are_told_of_autocast(cast_inputs):
    """Backward, outside of autocast, multiplies as forward did; inputs are cast where the function asks for it."""
    taken = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx, x, y):
            taken.append(x.dtype)
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad @ y.t(), x.t() @ grad

    x, y = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, requires_grad=True)
    with megatron_on_cpu():
        with torch.autocast("cuda", torch.bfloat16):
            z = Product.apply(x, y)
        z.float().sum().backward()
    assert taken == [cast_inputs or torch.bfloat16]
    assert z.dtype == (cast_inputs or torch.bfloat16)
    assert torch.equal(y.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_by_torch_draws_the_same_numbers(use_reentrant):
    drawn = []

    def dropped(x):
        drawn.append(torch.nn.functional.dropout(x, 0.5))
        return drawn[-1].sum()

    x = torch.ones(64, requires_grad=True)
    with megatron_on_cpu():
        checkpoint(dropped, x, use_reentrant=use_reentrant).backward()
        after = torch.nn.functional.dropout(x, 0.5)
    assert torch.equal(x.grad, drawn[0])
    assert not torch.equal(after, drawn[0])


def test_pinned_memory_is_a_copy():
    tensor = torch.ones(2)
    with megatron_on_cpu():
        pinned = tensor.pin_memory()
    assert pinned.data_ptr() != tensor.data_ptr()
    assert torch.equal(pinned, tensor)


@pytest.mark.parametrize("location", [None, "cuda", "cuda:1", {"cuda:0": "cuda:1"}, lambda storage, location: storage])
def test_files_load_to_the_cpu(tmp_path, location):
    torch.save({"x": torch.arange(3)}, tmp_path / "file.pt")
    with megatron_on_cpu():
        loaded = torch.load(tmp_path / "file.pt", map_location=location)
    assert torch.equal(loaded["x"], torch.arange(3))


def test_default_device():
    with megatron_on_cpu():
        torch.set_default_device("cuda")
        try:
            assert torch.ones(1).device.type == "cpu"
        finally:
            torch.set_default_device(None)


def test_what_is_not_redirected_says_so():
    with megatron_on_cpu(), pytest.raises(RuntimeError, match=r"megatron_on_cpu\(\).*does not redirect"):
        torch._C._VariableFunctions.zeros(1, device="cuda")
