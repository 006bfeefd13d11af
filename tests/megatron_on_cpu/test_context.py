"""Entering and leaving the emulation, and what is left behind."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack
from types import ModuleType

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megatron_on_cpu import context, megatron_on_cpu, random_numbers, redirections
from megatron_on_cpu.nccl_rules import NcclRules
from tests.ranks import TIMEOUT_S

# All that the emulation replaces something in, the environment and the modules.
ROWS = redirections.redirections(random_numbers.DeviceGenerator(), torch.Generator())
OWNERS = [*{id(owner): owner for owner, _ in ROWS}.values(), os.environ, sys.modules]


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


def test_megatron_fsdp_compares_streams(monkeypatch):
    """Buffers of Megatron's main branch ask for NCCL's symmetric memory, and keep a stream for a tensor on CUDA."""
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


@pytest.mark.parametrize("outer", [None, NcclRules(eager=True)], ids=["gloo", "eager"])
def test_rules_of_nccl_are_those_of_the_outermost(monkeypatch, outer):
    monkeypatch.setattr(context, "_enter", lambda *options: ExitStack())
    with megatron_on_cpu(nccl_rules=outer):
        with megatron_on_cpu(), megatron_on_cpu(nccl_rules=outer):
            pass
        with pytest.raises(RuntimeError, match=r"nccl_rules=NcclRules\(eager=False.*outermost"):
            megatron_on_cpu(nccl_rules=NcclRules()).__enter__()


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
@pytest.mark.parametrize(
    "program", [FIRST_USE, FIRST_IMPORT], ids=["torch remembers nothing", "modules hold originals"]
)
def test_nothing_is_left_behind_in_a_new_process(program):
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("entered", ["before", "after"])
def test_megatron_lm_builds_no_kernels(tmp_path, monkeypatch, entered):
    """The emulation may be entered before or after Megatron-LM's module is imported; `megatron` is a namespace, so a
    folder of ours can hold that module."""
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
    """Torch built for CUDA does not seed forked processes whose parent has looked for GPUs."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    drawn = []
    with megatron_on_cpu():
        for _ in range(2):
            torch.manual_seed(5)
            drawn.append(torch.rand(3, device="cuda"))
    assert torch.equal(*drawn)
