"""Count the collectives that a piece of code sends, for tests and reports."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "nccl_rules")  # the last one: megatron_on_cpu.nccl_rules


class count_collectives(TorchDispatchMode):
    """`with count_collectives() as counts:` fills `counts`, from c10d's name of a collective to how often it was sent.

    Counts whatever code sends them, ours or Megatron's, forward and backward (on CPU; CUDA's backward runs in a thread
    of its own, which a dispatch mode does not see).
    """

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        super().__enter__()
        return self.counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NAMESPACES:
            name = func._opname.strip("_")
            if name not in ("wait_tensor", "barrier", "monitored_barrier"):
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))
