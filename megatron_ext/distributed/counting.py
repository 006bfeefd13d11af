"""Count the collectives that a piece of code sends: what the tests assert and the reports print."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "nccl_rules")  # the last one: megatron_on_cpu.nccl_rules


class _CollectiveCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NAMESPACES:
            name = func._opname.strip("_")
            if name not in ("wait_tensor", "barrier", "monitored_barrier"):
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """`with count_collectives() as counts:` fills `counts`, from c10d's name of a collective to how often it was sent.

    Counts whatever code sends them, ours or Megatron's, forward and backward (on CPU; CUDA's backward runs in a thread
    of its own, which a dispatch mode does not see).
    """
    with _CollectiveCounter() as counter:
        yield counter.counts
