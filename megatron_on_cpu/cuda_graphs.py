"""CUDA graphs of the emulated device: a replay runs the captured operators again, on the same memory.

While a graph is captured its program runs, and every torch operator, collectives among them, is recorded with its
input and output tensors. After the capture the tensors that were written to get their former values back, since
capturing computes nothing on a GPU. A replay calls the operators in order and copies their results into the recorded
outputs. Other Python code is not repeated, as on a GPU. Where a GPU would refuse to hand a value to the host, the host
gets the present value.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_here = threading.local()


class CUDAGraph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.again: list[Callable[[], None]] = []
        self.generators: list[torch.Generator] = []

    def replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for run in self.again:
                run()

    def reset(self) -> None:
        self.again.clear()

    def pool(self) -> tuple[int, int]:
        return graph_pool_handle()

    def register_generator_state(self, state: torch.Generator) -> None:
        """Restore the generator's state after the capture; replays draw from the generator and advance it."""
        self.generators.append(state)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._again = graph.again
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}  # written tensors with their former values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            place = written.data_ptr(), written.shape, written.stride()
            if place not in self._before:
                self._before[place] = written.detach(), written.detach().clone()
        call = _as_it_draws_now(func)
        out = _finished(call(*args, **kwargs))
        # Record detached tensors: a program frees memory by giving the tensors it has captured another storage.
        kept, taken, named = tree_map_only(Tensor, Tensor.detach, (out, args, kwargs))

        def again() -> None:
            for old, new in zip(tree_iter(kept), tree_iter(_finished(call(*taken, **named))), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    if old.shape != new.shape:
                        raise RuntimeError(
                            f"{func} gave a tensor of {list(old.shape)} when the CUDA graph was captured and of "
                            f"{list(new.shape)} now: a size that depends on values cannot be replayed; leave this "
                            "operation out of the graph, or train without graphs (cuda_graph_impl='none')"
                        )
                    old.copy_(new)

        self._again.append(again)
        return out

    def put_back(self) -> None:
        """Restore the written tensors, the last first, since they may overlap."""
        for tensor, value in reversed(self._before.values()):
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise RuntimeError(
                    f"memory of a tensor of {list(tensor.shape)} was freed while a CUDA graph that writes to it was "
                    "captured, as Megatron-FSDP's second version frees gathered parameters: the CPU emulation cannot "
                    "replay such a graph; train without it (cuda_graph_impl='none')"
                )
            tensor.copy_(value)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to, as its schema marks them; all tensors of a collective."""
    named = zip(func._schema.arguments, args, strict=False)
    for argument, value in [*named, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]:
        if func.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (one for one in tree_iter(value) if isinstance(one, Tensor))


def _as_it_draws_now(func: Any) -> Callable[..., Any]:
    """Return `func`, drawing at each call from the state to which the device's generator refers now."""
    generators = torch.cuda.default_generators
    if torch.Tag.nondeterministic_seeded not in func.tags or not generators:
        return func
    generator, own = generators[0], generators[0].graphsafe_get_state()

    def draw(*args: Any, **kwargs: Any) -> Any:
        now = generator.graphsafe_get_state()
        generator.graphsafe_set_state(own)
        try:
            return func(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(now)

    return draw


def _finished(out: Any) -> Any:
    """Wait for an operator's collective and return its results: gloo makes some tensors only when it is waited for."""

    def finish(work: torch.ScriptObject) -> Any:
        if not hasattr(work, "wait"):
            return work
        work.wait()
        return FakeWork().boxed()

    return tree_map_only(torch.ScriptObject, finish, out)


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Stand-in for `torch.cuda.graph`, the context in which a graph is captured."""
    before, _here.capturing, _here.graph = is_current_stream_capturing(), True, cuda_graph
    generators = [*torch.cuda.default_generators, *cuda_graph.generators]
    states = [generator.get_state() for generator in generators]
    recorder = _Recorder(cuda_graph)
    try:
        with recorder:
            yield
    finally:
        _here.capturing = before
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        recorder.put_back()


def is_current_stream_capturing() -> bool:
    """Tell whether this thread captures a graph."""
    return getattr(_here, "capturing", False)


def read_by_the_host(values: Tensor, name: str) -> list[int]:
    """Return `values` as a list, where a GPU kernel would read them on the device; replays with other values raise."""
    captured = values.tolist()

    def check() -> None:
        now = values.tolist()
        if now != captured:
            raise RuntimeError(
                f"{name} was {captured} when the CUDA graph was captured and is {now} now: the CPU emulation replays "
                "the numbers that were captured; train without CUDA graphs (cuda_graph_impl='none')"
            )

    if is_current_stream_capturing():
        _here.graph.again.append(check)
    return captured


def graph_pool_handle() -> tuple[int, int]:
    """Return the one memory pool of the emulated device, which is the host's memory."""
    return 0, 0


FUNCTIONS = {
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "is_current_stream_capturing": is_current_stream_capturing,
    "graph_pool_handle": graph_pool_handle,
}
# torch's bindings that put a tensor into the memory pool of a graph.
BINDINGS = {
    "_graph_pool_handle": graph_pool_handle,
    **dict.fromkeys(("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"), lambda *args: None),
}
