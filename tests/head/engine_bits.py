"""Comparison, bit by bit, of the head's log-probabilities with those of inference engines' batch-invariant kernels.

`TRITON_INTERPRET=1 python -m tests.head.engine_bits VLLM_TREE [MEGATRON_TREE]` runs the engines' own kernels beside the
head's, both interpreted, and fails where bits that the page on exactness promises are others.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext import VocabShard, head
from tests.head import engine_kernels
from tests.head.as_on_cuda import rehearsal

SHAPES = [(5, 64, 2048), (70, 100, 2500), (3, 200, 5000)]  # tokens, hidden size, vocabulary
DTYPES = [torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """Options of a head (`ours`), and the same computation on an engine's logits of 16 bits (`theirs`)."""

    name: str
    theirs: Callable[[Tensor], Tensor]
    ours: dict[str, Any]
    same: bool = True  # as promised


def softcapped(z: Tensor) -> Tensor:
    return torch.tanh(z / 30) * 30


CASES = [
    Case("nothing more", Tensor.float, {}),
    Case("a padded vocabulary", lambda z: z.float()[:, :2000], {"vocab": 2000}),
    # By a tensor, as engines divide: of a number torch multiplies by the inverse on CUDA.
    Case("temperature 0.7", lambda z: z.float() / torch.full((), 0.7, device=z.device), {"temperature": 0.7}),
    Case("a softcap of 30, in fp32", lambda z: softcapped(z.float()), {"softcap": 30.0}, False),
    Case("a softcap of 30, in 16 bits", lambda z: softcapped(z).float(), {"softcap": 30.0}, False),
    Case("a scale of 0.3, in 16 bits", lambda z: (z * 0.3).float(), {"logit_scale": 0.3}, False),
    Case('bits="tensor_parallel"', Tensor.float, {"bits": "tensor_parallel"}, False),
    Case('bits="fast"', Tensor.float, {"bits": "fast"}, False),
    Case("logit_dtype=None", Tensor.float, {"logit_dtype": None}, False),
]


def problem(dtype: torch.dtype, tokens: int, width: int, columns: int, device: str = "cpu") -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, width, generator=g), torch.randn(columns, width, generator=g) / 3
    labels = torch.randint(2000, (tokens,), generator=g)
    return [x.to(device) for x in (hidden.to(dtype), weight.to(dtype), labels)]


def theirs(kernels: Any, case: Case, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    z = case.theirs(kernels.matmul_persistent(hidden, weight.t()))
    return kernels.log_softmax(z).gather(1, labels.unsqueeze(1)).squeeze(1)


def ours(case: Case, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = {"bits": "batch", "logit_dtype": hidden.dtype, **case.ours}
    if "vocab" in options:
        options["vocab"] = VocabShard(0, len(weight), options["vocab"])
    return head.LmHead(weight, **options).read(hidden, head.LogProbs(labels))


def compared(kernels: Any) -> Iterator[tuple[Case, int, int, float]]:
    """Each case, how many log-probabilities have the same bits, of how many, and by how much others differ."""
    for case in CASES:
        same, count, most = 0, 0, 0.0
        for dtype in DTYPES:
            for shape in SHAPES:
                given = problem(dtype, *shape)
                with rehearsal():
                    found = ours(case, *given)
                other = theirs(kernels, case, *given)
                same, count = same + int((found == other).sum()), count + len(found)
                most = max(most, float((found - other).abs().max()))
        yield case, same, count, most


def main(trees: list[str]) -> int:
    from benchmarks.interpreter import round_to_bfloat16

    round_to_bfloat16()
    engine_kernels.multiply_sixteen_bits()
    engines = {"vLLM": engine_kernels.vllms(trees[0]), "Megatron-Core": engine_kernels.megatrons(*trees[1:])}
    print("| kernels of | beside the product | same bits | others differ by at most |\n|---|---|---|---|")
    broken = 0
    for name, kernels in engines.items():
        for case, same, count, most in compared(kernels):
            print(f"| {name} | {case.name} | {same} of {count} | {f'{most:.0e}' if most else '-'} |", flush=True)
            broken += case.same and same < count
    return min(broken, 1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("say where vLLM's source is: python -m tests.head.engine_bits VLLM_TREE [MEGATRON_TREE]")
    sys.exit(main(sys.argv[1:]))
