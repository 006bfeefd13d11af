"""`python -m benchmarks.run gpu --only in-a-row`: what a step costs among others like it, in time, joules and clocks.

A short burst of a product runs at a clock that the card cannot hold: here each step runs for `--seconds` without a
pause, first the three products of a head, one after the other, then heads, last with logits of more than size 1, of
which most gradients are 0.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import gpu_run
from benchmarks.cases import Case
from benchmarks.implementations import fused_epilogue, ours
from benchmarks.measure import Inputs, drawn, run_once
from benchmarks.nvml import Nvml, StandIn

LARGE = 8.0  # size of logits


def three_products(inputs: Inputs) -> Callable[[], object]:
    """Those of a head that keeps all: logits chunk by chunk, dx, dW."""
    x_TD, w_VD = inputs.x_TD.detach(), inputs.w_VD.detach()
    g_TV = torch.rand(x_TD.shape[0], w_VD.shape[0], device=x_TD.device).to(x_TD.dtype)

    def step() -> None:
        for x_tD in x_TD.split(1024):
            torch.mm(x_tD, w_VD.t(), out_dtype=torch.float32)
        torch.mm(g_TV, w_VD, out_dtype=torch.float32)
        torch.mm(g_TV.t(), x_TD)

    return step


def in_a_row(machine: gpu_run.Machine, card: Any, step: Callable[[], object], seconds: float) -> list[gpu_run.Row]:
    """Rows of one step, repeated for so long; the clock and what holds it are read while steps run."""
    step()
    machine.synchronize()
    clocks, held, steps = [], [], 0
    joules, began = card.joules(), time.perf_counter()
    while not steps or time.perf_counter() - began < seconds:
        for _ in range(3):
            step()
        clocks.append(card.megahertz())
        held.append("power limit" in card.held_by())
        machine.synchronize()
        steps += 3
    elapsed, spent = time.perf_counter() - began, card.joules() - joules
    return [
        ("time in a row", "ms", [elapsed / steps * 1e3]),
        ("energy of a step", "J", [spent / steps]),
        ("power", "W", [spent / elapsed]),
        ("clock", "MHz", clocks),
        ("held by the power limit", "1", [sum(held) / len(held)]),
    ]


def steps_of(case: Case, size: float) -> dict[str, Callable[[], object]]:
    """What is measured of a case, whose logits are of about this size."""
    inputs = drawn(case, size)
    known = {f"ours, cache {cache}": ours(cache).build(case, None) for cache in (1, 0)}
    fused = [fused_epilogue(cache) for cache in (1, 0)]
    known |= {head.name: head.build(case, None) for head in fused}
    heads = {name: lambda head=head: run_once(head, inputs) for name, head in known.items()}
    if size != 1:
        return {f"{name}, logits of {size:g}": step for name, step in heads.items()}
    return {"three products": three_products(inputs)} | heads


def measure(run: gpu_run.Run, cases: list[Case]) -> None:
    """Rows of each step, as far as `run` lacks them."""
    card = Nvml() if run.machine.device == "cuda" else StandIn()
    for size in (1.0, LARGE):
        for case in cases:
            for name, step in steps_of(case, size).items():
                row = f"in a row: {name}"
                if not run.measured(case, row):
                    run.attempt(case, row, lambda step=step: in_a_row(run.machine, card, step, run.seconds))
