"""Ratios of our cost to another's, measured by turns in one process: `benchmarks.run cpu --only by-turns`.

Two things are measured, forward and backward, by the CPU time of one thread: the head with 16-bit operands as on a
processor without 16-bit products, beside fp32; and a KL divergence from hidden states, beside one from whole logits.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks import loss_cases, losses
from benchmarks.measure import cpu_times
from benchmarks.meter import peak_mib
from benchmarks.record import Found, Rows
from megatron_ext import linear_cross_entropy
from megatron_ext.head import KL, Logits
from megatron_ext.numerics import cpu_products

Step = Callable[[], object]
TOKENS, WIDTH, VOCAB = 2048, 512, 16384
TURNS = 9


def head_steps(cache: float) -> dict[str, Step]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(TOKENS, WIDTH, generator=generator)
    w_VD = torch.randn(VOCAB, WIDTH, generator=generator) / WIDTH**0.5
    labels_T = torch.randint(VOCAB, (TOKENS,), generator=generator)

    def step(dtype: torch.dtype) -> Step:
        leaves = [x.to(dtype).requires_grad_() for x in (x_TD, w_VD)]

        def run() -> None:
            with cpu_products.sixteen_bit_products(False):
                losses_T = linear_cross_entropy(*leaves, labels_T, cache=cache)
                torch.autograd.grad(losses_T.mean(), leaves)

        return run

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {f"{name}, cache={cache}": step(dtype) for name, dtype in dtypes.items()}


def divergence_steps() -> dict[str, Step]:
    given = loss_cases.inputs(losses.SIZES)

    def at_once(given: loss_cases.Inputs) -> torch.Tensor:
        z_BSV = given.hidden_BSD @ given.weight_VD.t()
        with torch.no_grad():
            teacher_BSV = given.other_hidden_BSD @ given.other_weight_VD.t()
        return (Logits(z_BSV).read(KL(Logits(teacher_BSV))) * given.mask_BS).sum() / given.mask_BS.sum()

    ours = next(case.ours for case in loss_cases.CASES if case.name == "Forward KL")
    ways: dict[str, loss_cases.LossOfInputs] = {"logits made at once": at_once, "from hidden states": ours}
    return {name: lambda way=way: losses.run_once(way, given) for name, way in ways.items()}  # type: ignore[misc]


def measured(steps: dict[str, Step], base: str) -> Rows:
    """Return rows of peak MiB, milliseconds, and the ratio of milliseconds to those of `base` in the same turn."""
    peaks: Rows = [(name, "peak", "MiB", [peak_mib(step)]) for name, step in steps.items()]
    return peaks + cpu_times(steps, 0.0, base, "base", least=TURNS)


def measure(seconds: float = 0.0) -> Iterator[Found]:
    torch.set_num_threads(1)
    heads = [measured(head_steps(cache), f"fp32, cache={cache}") for cache in (1, 0)]
    yield "head without 16-bit products", [row for rows in heads for row in rows], []
    yield "forward KL", measured(divergence_steps(), "logits made at once"), []
