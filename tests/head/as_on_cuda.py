"""The head's CUDA branches on the CPU: tensors that say they are on a GPU, and cuBLAS's rounding.

The passes may be the plain ones, Triton's kernels under the interpreter, or Triton's kernels compiled and not run.
"""

import importlib
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.stand_in import addmm, mm
from megatron_ext.emulation import cuda_graphs
from megatron_ext.head.row_passes import dispatch
from tests.waits import NoWait


def twin_of(plain):
    """The module of Triton's kernels for one of plain passes."""
    return importlib.import_module(plain.__name__.replace(".row_passes.", ".kernels."))


@contextmanager
def _all_replaced(*replaced):
    with ExitStack() as stack:
        for where, name, what in replaced:
            stack.enter_context(mock.patch.object(where, name, what))
        yield


@contextmanager
def cuda_branches(side=None):
    """Every tensor says that it is on a GPU. `side`: gives the passes for a plain module; None: the head chooses."""
    replaced = [(torch, "mm", mm), (torch, "addmm", addmm), (torch.Tensor, "is_cuda", True)]
    if side is not None:
        replaced.append((dispatch, "_side", lambda x, plain: side(plain)))
    with _all_replaced(*replaced):
        yield


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

    with cuda_graphs.graph(graph), _all_replaced((InterpretedFunction, "run", launch)):
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
    replaced = [(torch.cuda, name, what) for name, what in cuda.items()]
    replaced += [check.guarded(name) for name in ("tolist", "numpy", "cpu")]
    if not branches:
        with _all_replaced(*replaced):
            yield
        return
    # With these the head takes Triton's passes for tensors on a GPU, as it does there.
    choice = [
        (torch.version, "cuda", "12.8"),
        (dispatch, "_interpreted", lambda: False),
        (dispatch, "_twin", dispatch._twin.__wrapped__),
    ]
    with cuda_branches(), _all_replaced(*replaced, *choice, check.but_for_kernels()):
        yield
