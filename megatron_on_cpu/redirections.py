"""Replacements of megatron_on_cpu() in torch: one table, and the few stand-ins that it needs.

Megatron-Core takes a CUDA device for granted. Here the CPU is that device: it has number 0, its memory is the host's,
its random numbers come from a generator of its own (`random_numbers.py`), its one stream is the program itself, and
ranks communicate over gloo, or over a backend that has NCCL's rules.

Functions are replaced, rather than intercepted by a `TorchFunctionMode`. A mode costs every torch call and every
`tensor.shape` about a microsecond (a training step of a small GPT took 13 to 26 % longer under one) and holds for one
thread only. Replacements hold for all threads and cost time only where they are called.
"""

import functools
import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.amp import autocast_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from megatron_on_cpu import cuda_graphs
from megatron_on_cpu.nccl_rules import NcclRules, register
from megatron_on_cpu.nccl_rules.torch_functions import device_was_set
from megatron_on_cpu.random_numbers import DeviceGenerator, on_host

_CPU = torch.device("cpu")
_Group = dist.ProcessGroup
_DEVICE = torch.device  # torch's own class, for which isinstance is faster than for its replacement

# Everything that takes `device=` and makes a tensor.
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm range scalar_tensor tensor tril_indices triu_indices "
    "zeros zeros_like"
)
_TENSOR_FACTORIES = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"


def _answer(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for any arguments."""
    return lambda *args, **kwargs: value


_nothing = _answer(None)


class Event:
    """Stand-in for `torch.cuda.Event`: on a device that never lags behind, an event is a moment."""

    wait = synchronize = _nothing
    query = _answer(True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream:
    """Stand-in for `torch.cuda.Stream`: work is done when the call returns, so there is nothing to wait for."""

    wait_stream = wait_event = synchronize = _nothing
    query = _answer(True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream = _CPU, 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


def cpu_for(device: Any) -> Any:
    """Return the CPU if `device` names a CUDA device (as text, number or torch.device), else `device`."""
    if isinstance(device, _DEVICE):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] == "cuda" else device
    return _CPU if type(device) is int else device


def on_cpu(function: Callable[..., Any], position: int | None = None, keyword: str = "device") -> Callable[..., Any]:
    """Return `function` with CUDA devices replaced by the CPU in the argument `keyword` or at `position`."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if keyword in kwargs:
                kwargs[keyword] = cpu_for(kwargs[keyword])
            kwargs.pop("pin_memory", None)  # pinned memory is memory that a CUDA device reads
        if position is not None and len(args) > position:
            given = args[position]
            if (device := cpu_for(given)) is not given:
                args = (*args[:position], device, *args[position + 1 :])
        return function(*args, **kwargs)

    return redirected


def _making(torchs: type, make: Callable[..., Any]) -> type:
    """Return a class that replaces torch's class `torchs`: its instances are torch's, and `make` makes them.

    The class equals `torchs`, so that dicts keyed by type, as torch has for the annotations of operators, find it.
    """

    class Stand(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __eq__(cls, other: Any) -> bool:
            return other is cls or other is torchs

        def __hash__(cls) -> int:
            return hash(torchs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torchs)

        def __getattr__(cls, name: str) -> Any:
            return getattr(torchs, name)  # callers ask the class for features of torch's generators

    return Stand(torchs.__name__, (), {"__module__": "torch", "__doc__": torchs.__doc__})


def _numbered(device: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.device` with a number alone as a CUDA device's; torch's own then looks for an accelerator."""

    @functools.wraps(device)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        return device("cuda", *given) if len(given) == 1 and type(given[0]) is int else device(*args, **kwargs)

    return redirected


def _over_cpu(create_group: Callable[..., Any], default: str | None, rules: NcclRules | None) -> Callable[..., Any]:
    """Return `create_group` with gloo, or the backend of NCCL's `rules`, in the place of NCCL, and without options that
    only NCCL understands. With rules a `device_id` means eager initialisation, as with NCCL."""
    signature = inspect.signature(create_group)

    @functools.wraps(create_group)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        backend = given.get("backend") or default
        if backend is None or "nccl" in backend:
            given["backend"] = backend and ("gloo" if rules is None else "nccl_rules")
            given.pop("pg_options", None)
            if rules is not None and default is not None:
                given["pg_options"] = replace(rules, eager=rules.eager or given.get("device_id") is not None)
        given.pop("device_id", None)
        return create_group(**given)

    return redirected


def _with_split_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Turn split sizes into lists: NCCL's binding takes tensors too, gloo's does not."""

    @functools.wraps(all_to_all_single)
    def redirected(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        lists = [a.tolist() if isinstance(a, Tensor) else a for a in args]
        named = {k: a.tolist() if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        return all_to_all_single(output, input, *lists, **named)

    return redirected


class _Message:
    """A message under way that may be waited for twice, as with NCCL; gloo hangs at the second wait."""

    def __init__(self, work: Any) -> None:
        self._work, self._done = work, False

    def wait(self, *args: Any) -> bool:
        if not self._done:
            self._work.wait(*args)
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done or self._work.is_completed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _waiting_once(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        work = start(*args, **kwargs)
        return work if work is None else _Message(work)

    return redirected


class _Gathers:
    """Work of several all-gathers under way, waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _gather_one_by_one(group: Any, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> _Gathers:
    """Start an all-gather for each tensor: two coalesced ones of gloo that are under way at once corrupt the heap."""
    return _Gathers([group._allgather_base(out, x, *options) for out, x in zip(outputs, inputs, strict=True)])


class _NcclGroup:
    """Stand-in for `ProcessGroupNCCL`, which torch for CPUs lacks: no group is an instance, its options are ignored."""

    class Options(SimpleNamespace):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(config=SimpleNamespace(), **kwargs)


class _ScaledSum:
    """Stand-in for NCCL's PREMUL_SUM, which gloo lacks: each rank's input is multiplied by `factor`, then summed."""

    def __init__(self, factor: float | Tensor) -> None:
        self.factor = factor


def _scaling_first(reduce: Callable[..., Any], sent: str) -> Callable[..., Any]:
    """Return `reduce` for which `op` may be a `_ScaledSum`: the argument `sent` is multiplied by its factor first."""
    signature = inspect.signature(reduce)

    @functools.wraps(reduce)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not isinstance(given.get("op"), _ScaledSum):
            return reduce(*args, **kwargs)
        factor, given["op"] = given["op"].factor, dist.ReduceOp.SUM
        # An all-reduce works in place; the input of a reduce-scatter must keep its values.
        given[sent] = given[sent].mul_(factor) if sent == "tensor" else given[sent] * factor
        return reduce(**given)

    return redirected


def _loading_to_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def redirected(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, map_location if callable(map_location) else _CPU, *args, **kwargs)

    return redirected


def _type_on_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """Return names such as 'torch.cuda.FloatTensor', by which Megatron's optimizers tell dtypes apart."""

    @functools.wraps(tensor_type)
    def redirected(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # under a TorchFunctionMode this function calls itself once
            return "torch.cuda." + tensor_type(self).removeprefix("torch.").removeprefix("cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    return redirected


def _of_device_type(autocast: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a getter of autocast that answers for the CPU where CUDA, its default, is meant."""
    return lambda device_type="cuda": autocast(cpu_for(device_type))


def _refuse_cuda() -> None:
    raise RuntimeError(
        "CUDA was asked for inside megatron_on_cpu(), by a call that the emulation does not redirect: use "
        "device='cpu' there, or leave the emulation first"
    )


def _device_count() -> int:
    """Return one "device" for each rank of this machine: scripts check that their local rank is below this number."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # set by torchrun


def _host_memory() -> tuple[int, int]:
    """Return the free and the total memory of the host in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=_host_memory()[1], multi_processor_count=os.cpu_count()
    )


class _ForEveryDevice(tuple):
    """A tuple of one generator, returned for any index: each rank is a process with one device, number 0."""

    def __getitem__(self, device: Any) -> Any:
        return super().__getitem__(0)


def _cuda(generator: DeviceGenerator) -> dict[str, Any]:
    """The functions of `torch.cuda`."""
    stream = Stream()
    return {
        # the device: one, ready, of a generation with bf16 and without fp8
        "is_available": _answer(True),
        "is_initialized": _answer(True),  # so that torch.cuda._lazy_call calls at once instead of putting it off
        "_initialized": True,  # so that torch.utils.checkpoint saves the device's random numbers
        "_lazy_init": _refuse_cuda,
        "init": _nothing,
        "_is_in_bad_fork": _answer(False),  # in a fork of a process that looked for GPUs torch seeds no device
        "device_count": _device_count,
        "current_device": _answer(0),
        "set_device": _nothing,
        "device": nullcontext,
        "synchronize": _nothing,
        "get_device_properties": _device_properties,
        "get_device_capability": _answer((8, 0)),
        "get_device_name": _answer("CPU"),
        "is_bf16_supported": _answer(True),
        # random numbers: the device's own (not torch.manual_seed, which itself calls torch.cuda.manual_seed_all)
        "default_generators": _ForEveryDevice([generator]),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        # streams and events
        "Stream": Stream,
        "Event": Event,
        "stream": nullcontext,
        "current_stream": _answer(stream),
        "default_stream": _answer(stream),
        "set_stream": _nothing,
        **cuda_graphs.FUNCTIONS,
        # memory: every figure that torch.cuda derives from its statistics is 0, and its allocator holds nothing
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_snapshot": lambda *args, **kwargs: [],
        "mem_get_info": lambda device=None: _host_memory(),
        "device_memory_used": lambda device=None: _host_memory()[1] - _host_memory()[0],
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
    }


def _torch() -> dict[str, Any]:
    return {
        **{name: on_cpu(getattr(torch, name)) for name in _FACTORIES.split()},
        "Generator": _making(torch.Generator, on_cpu(torch.Generator, position=0)),
        "device": _making(torch.device, _numbered(torch.device)),
        "load": _loading_to_cpu(torch.load),
        **{name: _of_device_type(getattr(torch, name)) for name in ("is_autocast_enabled", "get_autocast_dtype")},
        "get_autocast_gpu_dtype": _of_device_type(torch.get_autocast_dtype),
    }


def _tensor() -> dict[str, Any]:
    """The methods of tensors."""
    return {
        **{name: on_cpu(getattr(Tensor, name)) for name in _TENSOR_FACTORIES.split()},
        "to": on_cpu(Tensor.to, position=1),
        "cuda": lambda self, *args, **kwargs: self,
        "type": _type_on_cuda(Tensor.type),
        "pin_memory": lambda self, device=None: self.clone(),  # a copy, as on CUDA: callers free the original
        "record_stream": _nothing,
    }


def _distributed(rules: NcclRules | None) -> dict[str, Any]:
    """The functions of `torch.distributed`."""
    return {
        "init_process_group": _over_cpu(dist.init_process_group, "nccl", rules),
        "new_group": _over_cpu(dist.new_group, None, rules),  # None: the default group's
        "all_to_all_single": _with_split_lists(dist.all_to_all_single),
        "ProcessGroupNCCL": _NcclGroup,
        "_make_nccl_premul_sum": _ScaledSum,
        "all_reduce": _scaling_first(dist.all_reduce, sent="tensor"),
        "reduce_scatter_tensor": _scaling_first(dist.reduce_scatter_tensor, sent="input"),
    }


def redirections(
    device: DeviceGenerator, host: torch.Generator, rules: NcclRules | None = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (owner, {name: replacement}); the owner is a module or a class.

    `device` and `host` are the generators of the emulated device and of the host. With `rules` ranks communicate over
    the backend that has NCCL's rules instead of gloo.

    Only torch is replaced here, since Megatron may not be imported yet; `megatron_modules.py` replaces in Megatron.
    """
    cuda = _cuda(device)
    if rules is not None:
        register(rules)
        cuda["set_device"] = device_was_set
    yield torch.cuda, cuda
    for name in ("random", "memory", "streams", "graphs"):  # where some of them are defined
        module = getattr(torch.cuda, name)
        yield module, {name: new for name, new in cuda.items() if name in vars(module)}
    yield torch._C, cuda_graphs.BINDINGS
    yield torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing, "mark": _nothing, "range": nullcontext}
    yield torch.accelerator, {"is_available": _answer(False)}  # asked before memory is pinned
    yield torch, _torch()
    yield torch._dynamo.trace_rules, {"clear_lru_cache": _nothing}  # the compiler keeps its list of torch's functions
    yield torch.jit, {"script": lambda function, *args, **kwargs: function}  # scripting cannot read these replacements
    yield torch.autocast, {"__init__": on_cpu(torch.autocast.__init__, position=1, keyword="device_type")}
    yield (
        checkpoint,
        {
            "_infer_device_type": _answer("cuda"),  # the arguments are CPU tensors
            "get_device_states": lambda *args: ([0], [device.get_state()]),
        },
    )
    yield autocast_mode, {"_cast": on_cpu(autocast_mode._cast, position=1)}  # the inputs of a function
    yield DeviceContext, {"__init__": on_cpu(DeviceContext.__init__, position=1)}  # `with torch.device("cuda"):`
    yield Tensor, _tensor()
    yield torch.nn.Module, {"to": on_cpu(torch.nn.Module.to, position=1)}
    yield DeviceMesh, {"__init__": on_cpu(DeviceMesh.__init__, position=1, keyword="device_type")}
    yield dist, _distributed(rules)
    gathers = [n for n in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced") if n in vars(_Group)]
    yield _Group, dict.fromkeys(gathers, _gather_one_by_one)  # a group with NCCL's rules has its own
    yield symmetric_memory, {"set_backend": _nothing}  # asked for before it is known whether any will be allocated
    messages = {name: _waiting_once(getattr(dist, name)) for name in ("isend", "irecv")}
    for module in (dist, dist.distributed_c10d):  # P2POp compares its function with that of distributed_c10d
        yield module, messages
    yield from on_host(host)
