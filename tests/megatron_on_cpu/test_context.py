"""Entering and leaving the emulation, and what `torch` answers inside it."""

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import MutableMapping
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._dynamo import trace_rules
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._device import DeviceContext

from megatron_on_cpu import context, megatron_on_cpu, random_numbers, redirections
from tests.ranks import TIMEOUT_S

OWNERS = [torch, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.nvtx, torch.jit]
OWNERS += [
    torch.random,
    torch.utils.data.dataset,
    trace_rules,
    torch.accelerator,
    torch.autocast,
    DeviceContext,
    Tensor,
    torch.nn.Module,
    dist,
]
OWNERS += [DeviceMesh, dist.distributed_c10d, os.environ, sys.modules, torch.cuda.graphs, torch._C, symmetric_memory]


def snapshot():
    """Every attribute of everything that the emulation touches, whether it replaces it or not."""
    return [dict(owner) if isinstance(owner, MutableMapping) else dict(vars(owner)) for owner in OWNERS]


def assert_same_objects(before, after):
    for owner, was, now in zip(OWNERS, before, after, strict=True):
        where = getattr(owner, "__name__", type(owner).__name__)
        if owner is sys.modules:  # others may import; what was there stays
            now = {name: module for name, module in now.items() if name in was or "megatron.legacy" in name}
        if owner is os.environ:
            was, now = (
                {k: sys.intern(v) for k, v in seen.items() if k != "PYTEST_CURRENT_TEST"} for seen in (was, now)
            )
        assert was.keys() == now.keys(), f"{where}: {was.keys() ^ now.keys()}"
        changed = [name for name in was if was[name] is not now[name]]
        assert not changed, f"{where}: {changed}"


@pytest.fixture
def untouched():
    """Fails a test that leaves one attribute another object than it was."""
    with megatron_on_cpu():  # what torch sets up at first use, among it attributes of its own, is set up before we look
        pass
    before = snapshot()
    yield
    assert_same_objects(before, snapshot())


def test_owners_are_all_that_is_replaced():
    rows = redirections.redirections(random_numbers.DeviceGenerator(), torch.Generator())
    assert {id(owner) for owner, _ in rows} <= {id(owner) for owner in OWNERS}


def test_megatron_fsdp_compares_streams(monkeypatch):
    """Its buffers on main: they ask for NCCL's symmetric memory, and keep a stream where a tensor is on CUDA."""
    module = ModuleType("megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer")

    class DBuffer:
        def __init__(self, size):
            self.local_buffer = torch.empty(size, device="cuda")
            self.allocation_stream = torch.cuda.current_stream() if self.local_buffer.is_cuda else None

    module.DBuffer, make = DBuffer, DBuffer.__init__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with megatron_on_cpu():
        symmetric_memory.set_backend("NCCL")
        buffer = DBuffer(3)
        assert buffer.local_buffer.shape == (3,)
        assert buffer.allocation_stream is torch.cuda.current_stream(buffer.local_buffer.device)
    assert DBuffer.__init__ is make


@pytest.mark.essential
@pytest.mark.usefixtures("untouched")
def test_restores_every_attribute():
    before = snapshot()
    with megatron_on_cpu():
        replaced = sum(was != now for was, now in zip(before, snapshot(), strict=True))
        assert replaced >= 10, "the snapshot does not see the replacements"


@pytest.mark.parametrize("value", [None, "1", "8"])
def test_environment_variables_are_the_users(monkeypatch, value):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with megatron_on_cpu():
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@pytest.mark.usefixtures("untouched")
def test_restores_after_an_exception():
    with pytest.raises(ZeroDivisionError), megatron_on_cpu():
        1 / torch.zeros(1, device="cuda").item()


@pytest.mark.usefixtures("untouched")
def test_restores_what_a_failed_entry_had_replaced(monkeypatch):
    def broken(device, host, rules):
        yield torch.cuda, {"is_available": lambda: True}
        raise OSError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(context, "redirections", broken)
        with pytest.raises(OSError, match="no such thing"), megatron_on_cpu():
            pass
    with megatron_on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"


@pytest.mark.usefixtures("untouched")
def test_nests():
    outside = torch.zeros
    with megatron_on_cpu():
        inside = torch.zeros
        with megatron_on_cpu():
            assert torch.zeros is inside
        assert torch.zeros is inside
        with pytest.raises(ZeroDivisionError), megatron_on_cpu():
            raise ZeroDivisionError
        assert torch.zeros is inside
    assert torch.zeros is outside


@pytest.mark.usefixtures("untouched")
def test_may_be_entered_again_and_decorate():
    @megatron_on_cpu()
    def run():
        return torch.ones(2, device="cuda").device

    assert [run(), run()] == [torch.device("cpu")] * 2


def test_refuses_after_cuda_was_initialised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    before = snapshot()
    with pytest.raises(RuntimeError, match="after CUDA was initialised.*enter the emulation before"), megatron_on_cpu():
        pass
    assert_same_objects(before, snapshot())


def test_holds_in_every_thread():
    devices = []
    with megatron_on_cpu():
        thread = threading.Thread(target=lambda: devices.append(torch.zeros(1, device="cuda").device.type))
        thread.start()
        thread.join()
    assert devices == ["cpu"]


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
    """As `torch.cuda.current_device()` gives it; a device is torch's own all the same, and its pickle too."""
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
    """As CUDA graphs want them: the device draws from whichever state it was given, and that one moves."""
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
    """What was there cannot be put back, and a replay would write where nothing is."""
    with megatron_on_cpu():
        x = torch.zeros(4, device="cuda")

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.add_(1)
                x.untyped_storage().resize_(0)

        with pytest.raises(RuntimeError, match=r"tensor of \[4\] was freed while a CUDA graph"):
            capture()
        assert not torch.cuda.is_current_stream_capturing()


def test_autocast():
    a = torch.ones(2, 2)
    with megatron_on_cpu():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            assert (a @ a).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


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


def test_nothing_is_compiled_inside_and_everything_outside():
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    def body(x):
        return torch.zeros(2) + x.to(torch.float64)

    class Module(torch.nn.Module):
        def forward(self, x):
            return body(x)

    settings = {"backend": backend, "fullgraph": True}
    before = torch.compile(body, **settings)
    with megatron_on_cpu():

        @torch.compile(**settings)
        def decorated(x):
            return body(x)

        functions = [before, decorated, torch.compile(Module(), **settings)]
        for function in [*functions, torch.jit.script(body)]:
            assert torch.equal(function(torch.ones(2)), torch.ones(2).double())
        assert traced == []
    for count, function in enumerate(functions, start=1):
        torch._dynamo.reset()  # they share the code of `body`
        assert torch.equal(function(torch.ones(2)), torch.ones(2).double())
        assert len(traced) == count


FIRST_USE = """
import sys
import torch
import torch.distributed as dist
from megatron_on_cpu import megatron_on_cpu

def body(x):
    if torch.cuda.is_available() and torch.cuda.current_device() > 1000:
        return x
    return torch.zeros(2) + torch.empty(2, device=x.device).fill_(1) + x.to(torch.float32)

def init(backend):  # which has the compiler forget its lists
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

import torch._dynamo
init("gloo")
dist.destroy_process_group()

with megatron_on_cpu():  # whatever torch sets up at first use, it sets up here
    with torch.device("cuda"):
        torch.empty(1)
    init("nccl")
    compiled = torch.compile(body, fullgraph=True, backend="eager")
    compiled(torch.ones(2))
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).zero_grad()
with torch.device("meta"):
    assert torch.empty(1).is_meta
assert compiled(torch.ones(2)).tolist() == [2, 2]
dist.destroy_process_group()
assert torch.cuda.is_initialized() is False
"""


@pytest.mark.slow
def test_nothing_that_torch_remembers_is_left_behind():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_USE], check=True, timeout=TIMEOUT_S)


FIRST_IMPORT = """
import sys
from megatron_on_cpu import megatron_on_cpu

with megatron_on_cpu():
    import torch
    import megatron.core.distributed.param_and_grad_buffer as buffers
    assert buffers.dist_reduce_scatter_func is torch.distributed.reduce_scatter_tensor
assert buffers.dist_reduce_scatter_func is torch.distributed.reduce_scatter_tensor
modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
left = [value for module in modules for value in vars(module).values() if hasattr(value, "__globals__")]
assert not [value for value in left if value.__globals__["__name__"].startswith("megatron_on_cpu")]
"""


@pytest.mark.slow
def test_modules_imported_inside_hold_originals_outside():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_IMPORT], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("entered", ["before", "after"])
def test_megatron_lm_builds_no_kernels(tmp_path, monkeypatch, entered):
    """Before or after Megatron-LM's module is imported; `megatron` is a namespace, so a folder of ours can hold it."""
    package = tmp_path / "megatron" / "legacy" / "fused_kernels"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def load(args):\n    raise OSError('no nvcc')\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "megatron.legacy.fused_kernels"
    try:
        if entered == "after":
            importlib.import_module(name)
        with megatron_on_cpu():
            from megatron.legacy import fused_kernels

            fused_kernels.load("arguments")
        with pytest.raises(OSError, match="no nvcc"):
            importlib.import_module(name).load("arguments")
    finally:
        for module in ("megatron.legacy", name):
            sys.modules.pop(module, None)
        vars(sys.modules["megatron"]).pop("legacy", None)


ON_A_GPU = """
import torch
from megatron_on_cpu import megatron_on_cpu

with megatron_on_cpu():
    assert torch.zeros(2, device="cuda").cuda().to("cuda").device.type == "cpu"
    torch.cuda.manual_seed(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.nn.Linear(2, 2, device="cuda")(torch.ones(2)).sum().backward()
    assert torch.cuda.memory_allocated() == 0
assert not torch.cuda.is_initialized()
assert torch.zeros(2, device="cuda").is_cuda
torch.cuda.Stream().synchronize()
try:
    with megatron_on_cpu():
        pass
except RuntimeError as refusal:
    assert "after CUDA was initialised" in str(refusal)
else:
    raise AssertionError("not refused")
"""


@pytest.mark.gpu
def test_a_gpu_is_neither_used_inside_nor_lost_outside():
    subprocess.run([sys.executable, "-c", ON_A_GPU], check=True, timeout=TIMEOUT_S)


def test_seeds_reach_the_device_in_forked_processes(monkeypatch):
    """Where their parent has looked for GPUs, torch built for CUDA does not seed these."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    drawn = []
    with megatron_on_cpu():
        for _ in range(2):
            torch.manual_seed(5)
            drawn.append(torch.rand(3, device="cuda"))
    assert torch.equal(*drawn)
