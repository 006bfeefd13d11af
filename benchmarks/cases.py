"""Cases of the benchmarks: sizes, dtypes, devices. T tokens, D hidden size, V vocabulary, R ranks."""

from dataclasses import dataclass, replace

import torch

MEGATRON = "megatron unfused"  # what ratios are taken to


@dataclass(frozen=True)
class Case:
    """One forward and backward of a head. `vocab` is the whole vocabulary; each of `ranks` holds an equal shard."""

    name: str
    tokens: int
    width: int
    vocab: int
    ranks: int
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def columns(self) -> int:
        return self.vocab // self.ranks

    @property
    def unsharded(self) -> "Case":
        return replace(self, name="whole", ranks=1)

    @property
    def nvh(self) -> int:
        """T V D / R: the multiply-adds of one matmul on one rank."""
        return self.tokens * self.columns * self.width


def cpu_cases() -> list[Case]:
    return [
        Case(f"cpu {name} R{ranks}", 4096, 512, 32768, ranks, dtype)
        for ranks in (1, 2)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]


# One GPU holds one shard of B: its matmuls and passes, without the two collectives.
GPU_CASES = [
    Case("A", 8192, 4096, 128256, 1, torch.bfloat16, "cuda"),
    Case("B, one shard of 8", 16384, 8192, 152064 // 8, 1, torch.bfloat16, "cuda"),
]

# Counted on fake tensors, which take the CPU's path on a machine without CUDA.
COUNTED_CASE = Case("counted B, one rank of 8", 16384, 8192, 152064, 8, torch.bfloat16)
