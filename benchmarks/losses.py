"""`python -m benchmarks.losses`: GRPO's loss from hidden states, forward and backward, beside `linear_log_probs` alone.

Both run in one process and by turns, the loss with the least memory too, and Liger's fused loss where it is installed;
what is compared is the CPU time of the process. A way whose loss or gradients are wrong gets no time.

Legend: B rows, S positions, D hidden size, V vocabulary.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.measure import ratios
from benchmarks.meter import measure
from megatron_ext import linear_log_probs, reference
from megatron_ext.losses import GRPOLoss

HEAD, OURS, LIGER = "linear_log_probs", "GRPO loss", "Liger GRPO loss"
SMALL = "GRPO loss, cache=0, 256 tokens at a time"
CASE = "GRPO loss fp32, 8 rows of 256, D 256, V 16384"
SIZES = (8, 256, 256, 16384)
SECONDS = 10.0
ERROR_LIMIT = 1e-4  # relative, of norms, against fp64
BETA = 0.04


class Inputs(NamedTuple):
    """Leaves, and what the loss reads of each token."""

    hidden_BSD: Tensor
    weight_VD: Tensor
    labels_BS: Tensor
    mask_BS: Tensor
    advantages_B: Tensor
    old_BS: Tensor
    ref_BS: Tensor


Way = Callable[[Inputs], Tensor]


def inputs(sizes: tuple[int, int, int, int] = SIZES) -> Inputs:
    rows, positions, width, vocab = sizes
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = randn(rows, positions, width), randn(vocab, width) / width**0.5
    labels = torch.randint(vocab, (rows, positions), generator=generator)
    mask = (torch.rand(rows, positions, generator=generator) < 0.9).float()
    own = linear_log_probs(hidden, weight, labels)
    assert isinstance(own, Tensor)
    old, ref = own + 0.2 * randn(rows, positions), own + 0.2 * randn(rows, positions)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), labels, mask, randn(rows), old, ref)


def log_probs_alone(given: Inputs) -> Tensor:
    """What a loss cannot do without: the log-probabilities, and a gradient for each."""
    found = linear_log_probs(given.hidden_BSD, given.weight_VD, given.labels_BS)
    assert isinstance(found, Tensor)
    return (found * given.mask_BS).sum()


def grpo(given: Inputs, **options: Any) -> Tensor:
    loss, _ = GRPOLoss(beta=BETA, **options)(
        given.hidden_BSD,
        given.weight_VD,
        given.labels_BS,
        given.advantages_B,
        mask=given.mask_BS,
        old_log_probs=given.old_BS,
        reference_log_probs=given.ref_BS,
    )
    return loss


def liger_grpo() -> Way | None:
    """Liger's, with its own chunks, not compiled; None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=BETA, loss_type="dapo", compiled=False, use_ref_model=True)

    def way(given: Inputs) -> Tensor:
        head: tuple[Any, ...] = (given.hidden_BSD, given.weight_VD, given.labels_BS, given.mask_BS, given.advantages_B)
        return loss(*head, ref_per_token_logps=given.ref_BS, old_per_token_logps=given.old_BS)[0]

    return way


def default_ways() -> dict[str, Way | None]:
    return {OURS: grpo, SMALL: functools.partial(grpo, cache=0, chunk_tokens=256), LIGER: liger_grpo()}


def true_loss(given: Inputs) -> Tensor:
    """The formula with the whole logits."""
    log_probs = reference.log_probs(reference.logits(given.hidden_BSD, given.weight_VD), given.labels_BS)
    ratio, advantages = (log_probs - given.old_BS).exp(), given.advantages_B.unsqueeze(1)
    apart = given.ref_BS - log_probs
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + BETA * (apart.exp() - apart - 1)
    return (loss * given.mask_BS).sum() / given.mask_BS.sum()


def run_once(way: Way, given: Inputs) -> tuple[Tensor, ...]:
    """The loss and both gradients."""
    leaves = given.hidden_BSD, given.weight_VD
    for leaf in leaves:
        leaf.grad = None
    loss = way(given)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def worst_error(way: Way, given: Inputs, true: tuple[Tensor, ...]) -> float:
    """Relative, of loss and gradients."""
    errors = [(x.double() - want).norm() / want.norm() for x, want in zip(run_once(way, given), true, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is


def measure_losses(
    budget_s: float, sizes: tuple[int, int, int, int] = SIZES, known: dict[str, Way | None] | None = None
) -> tuple[list[tuple[str, str, str, list[float]]], list[str]]:
    """Rows (impl, metric, unit, values), and a line for each way that is wrong or missing."""
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    given = inputs(sizes)
    doubles = Inputs(*(x.detach().double() if x.is_floating_point() else x for x in given))
    leaves = doubles._replace(hidden_BSD=doubles[0].requires_grad_(), weight_VD=doubles[1].requires_grad_())
    true = run_once(true_loss, leaves)
    ways: dict[str, Way] = {HEAD: log_probs_alone}
    rows: list[tuple[str, str, str, list[float]]] = []
    remarks = []
    for name, way in (default_ways() if known is None else known).items():
        if way is None:
            remarks.append(f"{name}: not installed")
            continue
        error = worst_error(way, given, true)
        rows.append((name, "error", "1", [error]))
        if error <= ERROR_LIMIT:  # NaN is wrong
            ways[name] = way
        else:
            remarks.append(f"{name}: its error is {error:.3g}, so its time does not count")
    for name, way in ways.items():
        with measure() as costs:
            run_once(way, given)
        rows.append((name, "peak", "MiB", [costs.peak_bytes / 2**20]))
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + budget_s
    while len(times[HEAD]) < 5 or time.perf_counter() < end:
        for name, way in ways.items():
            start = time.process_time()
            run_once(way, given)
            times[name].append((time.process_time() - start) * 1e3)
    rows += [(name, "CPU time", "ms", found) for name, found in times.items()]
    rows += [(name, "CPU time / head", "1", found) for name, found in ratios(times, to=HEAD).items()]
    return rows, remarks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the times (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu.csv", help="the CSV (default: %(default)s)")
    options = parser.parse_args()
    origin = record.Origin.here("cpu")
    found, remarks = measure_losses(options.seconds)
    rows = [origin.row(CASE, *row) for row in found]
    record.write(options.out, rows)
    print(record.table(rows))
    print("\n".join(remarks))


if __name__ == "__main__":
    main()
