"""Cases of the benchmarks: sizes, dtypes, devices. T tokens, D hidden size, V vocabulary, R ranks."""

from dataclasses import dataclass, replace

import torch

MEGATRON = "megatron unfused"  # the head to which ratios are taken


@dataclass(frozen=True)
class Case:
    """Sizes of one forward and backward of a head; `vocab` is the whole vocabulary, in equal shards on `ranks`."""

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
        """Return T V D / R, the multiply-adds of one matmul on one rank."""
        return self.tokens * self.columns * self.width


def cpu_cases() -> list[Case]:
    return [
        Case(f"cpu {name} R{ranks}", 4096, 512, 32768, ranks, dtype)
        for ranks in (1, 2)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]


# One GPU runs one shard of B: the matmuls and passes of a rank, without the two collectives.
GPU_CASES = [
    Case("A", 8192, 4096, 128256, 1, torch.bfloat16, "cuda"),
    Case("B, one shard of 8", 16384, 8192, 152064 // 8, 1, torch.bfloat16, "cuda"),
]

# Costs are counted on fake tensors, for which the head takes its CPU path on a machine without CUDA.
COUNTED_CASE = Case("counted B, one rank of 8", 16384, 8192, 152064, 8, torch.bfloat16)
