"""Losses from hidden states, beside Liger's fused ones: `python -m benchmarks.run cpu --only losses`.

Each loss runs forward and backward by default, with the largest cache, with the least memory, and by Liger where it is
installed, all in one process; losses of log-probabilities run beside `linear_log_probs` alone, at `cache=1`. The rows
of each way are its error (loss and both gradients, relative, by norms, against the loss of whole logits in fp64), its
peak of bytes beside its arguments, and its CPU time, by turns. A way whose loss or gradients are wrong has the error
only.
"""

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.loss_cases import CASES, Inputs, LossCase, LossOfInputs, inputs
from benchmarks.measure import cpu_times
from benchmarks.meter import peak_mib
from benchmarks.record import Found, Rows

HEAD = "linear_log_probs, cache=1"
SIZES = (8, 256, 256, 16384)
TURNS = 5  # the least number of turns; `interleaved` has the largest
ERROR_LIMIT = 1e-4


def known_ways(case: LossCase) -> dict[str, LossOfInputs | None]:
    """Return our and Liger's losses by name; None for Liger's where it is not installed."""
    found: dict[str, LossOfInputs | None] = {f"{case.name} loss": case.ours}
    for called, options in case.options.items():
        found[f"{case.name} loss, {called}"] = functools.partial(case.ours, **options)
    if importlib.util.find_spec("liger_kernel") is None:
        return found | {f"Liger {case.name} loss": None}
    from liger_kernel import chunked_loss

    return found | {f"Liger {case.name} loss{ending}": way for ending, way in case.liger(chunked_loss).items()}


def run_once(way: LossOfInputs, given: Inputs) -> tuple[Tensor, ...]:
    """Return the loss and both gradients."""
    leaves = given.hidden_BSD, given.weight_VD
    for leaf in leaves:
        leaf.grad = None
    loss = way(given)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def worst_error(way: LossOfInputs, given: Inputs, true: tuple[Tensor, ...]) -> float:
    """Return the largest relative error, by norms, of loss and gradients."""
    errors = [(x.double() - want).norm() / want.norm() for x, want in zip(run_once(way, given), true, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is


def true_results(case: LossCase, given: Inputs) -> tuple[Tensor, ...]:
    doubles = Inputs(*(x.detach().double() if x.is_floating_point() else x for x in given))
    leaves = doubles._replace(hidden_BSD=doubles[0].requires_grad_(), weight_VD=doubles[1].requires_grad_())
    return run_once(case.true, leaves)


def measure_losses(
    case: LossCase,
    budget_s: float,
    sizes: tuple[int, int, int, int] = SIZES,
    known: dict[str, LossOfInputs | None] | None = None,
) -> tuple[Rows, list[str]]:
    """Return rows (impl, metric, unit, values), and a line for each way that is wrong or missing."""
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    given = inputs(sizes)
    true = true_results(case, given)
    ways: dict[str, LossOfInputs] = {} if case.base is None else {HEAD: case.base}
    rows: Rows = []
    remarks = []
    for name, way in (known_ways(case) if known is None else known).items():
        if way is None:
            remarks.append(f"{name}: not installed")
            continue
        error = worst_error(way, given, true)
        rows.append((name, "error", "1", [error]))
        if error <= ERROR_LIMIT:  # NaN is wrong
            ways[name] = way
        else:
            remarks.append(f"{name}: its error is {error:.3g}, so its time does not count")
    steps = {name: functools.partial(run_once, way, given) for name, way in ways.items()}
    rows += [(name, "peak", "MiB", [peak_mib(step)]) for name, step in steps.items()]
    return rows + cpu_times(steps, budget_s, HEAD, "head", least=TURNS), remarks


def measure(seconds: float = 10.0) -> Iterator[Found]:
    for case in CASES:
        name = f"{case.name} loss fp32, {SIZES[0]} rows of {SIZES[1]}, D {SIZES[2]}, V {SIZES[3]}"
        yield name, *measure_losses(case, seconds)
