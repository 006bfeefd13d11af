"""`python -m benchmarks.run gpu --only in-a-row`: what a step costs among others like it, in time, joules and clocks.

A short burst of a product runs at a clock that the card cannot sustain, so each step runs for `--seconds` without a
pause: the three products of a head, one after the other; heads; a mean loss of so many tokens that forward makes its
gradient; and last a head whose logits have size 8, so that most gradients are 0.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import gpu_run
from benchmarks.cases import Case
from benchmarks.implementations import MEAN, fused_epilogue, kept_by_default, ours
from benchmarks.measure import Inputs, drawn, run_once
from benchmarks.nvml import STAND_IN, Nvml

LARGE = 8.0  # size of logits
# A case with so many tokens that the default does not cache all exponentials, and its tokens in a rehearsal.
LONG = Case("32768 x 4096 x 128256", 32768, 4096, 128256, 1, torch.bfloat16, "cuda")
REHEARSED_TOKENS = 200


def three_products(inputs: Inputs) -> Callable[[], object]:
    """Return a step of the three products of a head that caches all exponentials: logits by chunks, dx, dW."""
    x_TD, w_VD = inputs.x_TD.detach(), inputs.w_VD.detach()
    g_TV = torch.rand(x_TD.shape[0], w_VD.shape[0], device=x_TD.device).to(x_TD.dtype)

    def step() -> None:
        for x_tD in x_TD.split(1024):
            torch.mm(x_tD, w_VD.t(), out_dtype=torch.float32)
        torch.mm(g_TV, w_VD, out_dtype=torch.float32)
        torch.mm(g_TV.t(), x_TD)

    return step


def in_a_row(card: Any, step: Callable[[], object], seconds: float) -> list[gpu_run.Row]:
    """Return rows of one step, repeated for `seconds`: its costs, the clock, and the share of readings in which each
    reason held the clock back (of the power limit even if it is 0)."""
    step()
    torch.cuda.synchronize()
    clocks, held, steps = [], {"power limit": 0}, 0
    joules, began = card.joules(), time.perf_counter()
    while not steps or time.perf_counter() - began < seconds:
        for _ in range(3):
            step()
        clocks.append(card.megahertz())
        for reason in card.held_by():
            held[reason] = held.get(reason, 0) + 1
        torch.cuda.synchronize()
        steps += 3
    elapsed, spent = time.perf_counter() - began, card.joules() - joules
    return [
        ("time in a row", "ms", [elapsed / steps * 1e3]),
        ("energy of a step", "J", [spent / steps]),
        ("power", "W", [spent / elapsed]),
        ("clock", "MHz", clocks),
        *((f"held by the {reason}", "1", [times / len(clocks)]) for reason, times in held.items()),
    ]


def steps_of(case: Case, size: float) -> dict[str, Callable[[], object]]:
    """Return the steps that are measured of a case, whose logits have about the size `size`."""
    inputs = drawn(case, size)
    measured, products = [ours(1), ours(0), fused_epilogue(1), fused_epilogue(0)], True
    if size != 1:
        measured, products = [ours(1)], False
    elif kept_by_default(case) < 1:
        measured, products = [ours(None), MEAN], False
    suffix = "" if size == 1 else f", logits of {size:g}"
    known = {f"{implementation.name}{suffix}": implementation.build(case, None) for implementation in measured}
    heads = {name: lambda head=head: run_once(head, inputs) for name, head in known.items()}
    return ({"three products": three_products(inputs)} if products else {}) | heads


def measured_of(cases: list[Case]) -> list[tuple[Case, float]]:
    """Return (case, size of its logits) in order: the given cases, a long one, the given cases with large logits."""
    long = LONG
    if cases[0].device != LONG.device:
        long = replace(cases[0], name=f"{cases[0].name}, long", tokens=REHEARSED_TOKENS)
    return [*((case, 1.0) for case in [*cases, long]), *((case, LARGE) for case in cases)]


def measure(run: gpu_run.Run, cases: list[Case]) -> None:
    """Measure each step of which `run` has no rows."""
    card = Nvml() if cases[0].device == "cuda" else STAND_IN
    for case, size in measured_of(cases):
        for name, step in steps_of(case, size).items():
            row = f"in a row: {name}"
            if not run.measured(case, row):
                run.attempt(case, row, lambda step=step: in_a_row(card, step, run.seconds))
