"""The head's CUDA branches on the CPU: tensors that say they are on a GPU, and cuBLAS's rounding.

The passes may be the plain ones, Triton's kernels under the interpreter, or Triton's kernels compiled and not run.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.stand_in import ON_CUDA, replaced
from megatron_ext.head.row_passes import passes as row_passes
from megatron_on_cpu import cuda_graphs
from tests.waits import NoWait


def cuda_branches(passes=None):
    """Every tensor says that it is on a GPU. `passes`: what tensors there take, a function as
    `megatron_ext.memory.fake_cuda.kernels` or `plain`; None: the head's own choice."""
    chosen = [(row_passes, "_interpreted", lambda: False), (row_passes, "triton_passes", passes)]
    return replaced(*ON_CUDA, *([] if passes is None else chosen))


def plain():
    """The passes in PyTorch, which compute what Triton's do."""
    return row_passes.PYTORCH


class _Stream:
    def wait_stream(self, other):
        pass


@contextmanager
def _captured(graph):
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(kernel, *args, **kwargs):
        def again():
            with _disable_current_modes():
                run(kernel, *args, **kwargs)

        graph.again.append(again)
        again()

    with cuda_graphs.graph(graph), replaced((InterpretedFunction, "run", launch)):
        yield


class _SyncCheck:
    """`torch.cuda.set_sync_debug_mode`: after "error", what would make the host wait for a GPU raises."""

    def __init__(self):
        self.mode = None

    def __call__(self, mode):
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None
        if mode == "error":
            self.mode = NoWait().__enter__()

    def guarded(self, name):
        """A method of tensors that copies them to the host, which the dispatcher does not see of a tensor there."""
        own = getattr(torch.Tensor, name)

        def method(x, *args, **kwargs):
            assert self.mode is None, f"Tensor.{name} reads values"
            return own(x, *args, **kwargs)

        return torch.Tensor, name, method

    def but_for_kernels(self):
        """The interpreter reads values, a kernel on a GPU makes nobody wait."""
        from triton.runtime.interpreter import InterpretedFunction

        own = InterpretedFunction.run

        def run(kernel, *args, **kwargs):
            mode, self.mode = self.mode, None
            try:
                with nullcontext() if mode is None else _disable_current_modes():
                    return own(kernel, *args, **kwargs)
            finally:
                self.mode = mode

        return InterpretedFunction, "run", run


# As `torch.cuda` has it: a number now, for blocks of every size.
_ALLOCATOR = {name: {"all": {"current": 0}} for name in ("reserved_bytes", "active_bytes", "inactive_split_bytes")}


@contextmanager
def rehearsal(branches=True):
    """A CPU in place of a GPU: CUDA's branches and rounding, Triton's kernels interpreted, stand-ins for streams,
    graphs and memory counters. `branches`: False where torch's compiler looks at the devices itself."""
    check = _SyncCheck()
    cuda = {
        "synchronize": lambda: None,
        "set_sync_debug_mode": check,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": cuda_graphs.CUDAGraph,
        "graph": _captured,
        "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
        "memory_stats_as_nested_dict": lambda device=None: _ALLOCATOR,
    }
    stand_ins = [(torch.cuda, name, what) for name, what in cuda.items()]
    stand_ins += [check.guarded(name) for name in ("tolist", "numpy", "cpu")]
    if not branches:
        with replaced(*stand_ins):
            yield
        return
    # With these the head takes Triton's passes for tensors on a GPU, as it does there.
    choice = [
        (torch.version, "cuda", "12.8"),
        (row_passes, "_interpreted", lambda: False),
        (row_passes, "triton_passes", row_passes.triton_passes.__wrapped__),
    ]
    with cuda_branches(), replaced(*stand_ins, *choice, check.but_for_kernels()):
        yield
