"""`python -m benchmarks.run cpu --only log-probs`: log-probabilities of labels from vocabulary-parallel logits.

Our functions run beside the usual way, which makes fp32 copies in chunks of tokens and three all-reduces for a chunk,
and all of it again in backward. Both run in the same processes, by turns, and the CPU times of each rank are compared,
which other processes disturb less than wall-clock times. A way whose values or gradients are wrong gets no time.

Legend: T tokens, N tokens of a chunk, V columns of this rank's vocabulary shard.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.measure import any_rank, cpu_times
from benchmarks.peers import own_target, sharded_log_softmax
from benchmarks.record import Found, Rows
from benchmarks.worlds import run_world
from megatron_ext import reference, token_log_probs
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head import sampled_log_probs

USUAL, OURS, SAMPLED = "usual way", "ours", "ours, top-k 50"
TOP_K = 50
ERROR_LIMIT = 1.25  # as a multiple of the error of plain PyTorch in the same dtype
LogProbFunction = Callable[[Tensor, Tensor], Tensor]  # (logits_TV, labels_T) -> log-probabilities [T]
FORMULAS: dict[str, LogProbFunction] = {
    USUAL: reference.log_probs,
    OURS: reference.log_probs,
    SAMPLED: lambda z_TV, labels_T: reference.sampled_log_probs(z_TV, labels_T, TOP_K),
}


class UsualWay(torch.autograd.Function):
    """The usual way of policy training, written anew with the same order of casts, passes and collectives."""

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, start: int, group: Group) -> Tensor:
        ctx.save_for_backward(logits_TV, labels_T)
        ctx.start, ctx.group = start, group
        target_T, own_T = own_target(labels_T, start, logits_TV.shape[1])
        found = []
        for z_NV, target_N, own_N in UsualWay.chunks(logits_TV, target_T, own_T):
            picked_N = sharded_log_softmax(z_NV, group).gather(1, target_N[:, None]).squeeze(1) * own_N
            found.append(collectives.all_reduce(picked_N, group))
        return torch.cat(found)

    @staticmethod
    def chunks(*tensors: Tensor) -> zip:
        return zip(*(tensor.split(UsualWay.CHUNK) for tensor in tensors), strict=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        logits_TV, labels_T = ctx.saved_tensors
        target_T, own_T = own_target(labels_T, ctx.start, logits_TV.shape[1])
        found = []
        for z_NV, target_N, own_N, g_N in UsualWay.chunks(logits_TV, target_T, own_T, grads[0]):
            dz_NV = sharded_log_softmax(z_NV, ctx.group).exp_().neg_()
            dz_NV.scatter_add_(1, target_N[:, None], own_N[:, None].float())
            found.append(dz_NV.mul_(g_N[:, None]).to(logits_TV.dtype))
        return torch.cat(found), None, None, None


def cases() -> list[Case]:
    """Return the cases; their width is 0, since there are no hidden states."""
    return [
        Case(f"log-probs {name} TP{ranks}", 2048, 0, 32768, ranks, dtype)
        for ranks in (1, 2)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]


def ways(case: Case, group: Group) -> dict[str, LogProbFunction]:
    start = case.columns * (0 if group is None else dist.get_rank(group))
    return {
        USUAL: lambda z_TV, labels_T: UsualWay.apply(z_TV, labels_T, start, group),
        OURS: lambda z_TV, labels_T: token_log_probs(z_TV, labels_T, group),
        SAMPLED: lambda z_TV, labels_T: sampled_log_probs(z_TV, labels_T, top_k=TOP_K, tp_group=group),
    }


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of the whole vocabulary, labels that top-k keeps, upstream gradients `[T]`, alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(case.tokens, case.vocab, generator=generator).mul_(2).to(case.dtype)
    rank_T = torch.randint(TOP_K // 2, (case.tokens, 1), generator=generator)
    labels_T = logits_TV.topk(TOP_K // 2).indices.gather(1, rank_T).squeeze(1)
    return logits_TV, labels_T, torch.randn(case.tokens, generator=generator)


def run_once(way: LogProbFunction, logits_TV: Tensor, labels_T: Tensor, g_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and the gradient of the logits, a new tensor."""
    logits_TV.grad = None
    values_T = way(logits_TV, labels_T)
    values_T.backward(g_T)
    assert logits_TV.grad is not None
    return values_T.detach(), logits_TV.grad


def rms_errors(found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor]) -> tuple[float, ...]:
    """Return the root mean square errors of the values and of the gradient."""
    return tuple(float((x.double() - want).square().mean().sqrt()) for x, want in zip(found, true, strict=True))


def worst_errors(case: Case, rank: int, known: dict[str, LogProbFunction]) -> dict[str, float]:
    """Return each way's error against `reference.py` in fp64, as a multiple of the error of the same formula in fp32.

    Every 7th token is compared: tokens do not depend on each other, and a step of 7 meets every place in a chunk.
    """
    logits_TV, labels_T, g_T = inputs(case)
    own, some = slice(rank * case.columns, (rank + 1) * case.columns), slice(None, None, 7)
    mine_TV = logits_TV[:, own].clone().requires_grad_()

    def by_reference(formula: LogProbFunction, dtype: torch.dtype, leaf: torch.dtype) -> tuple[Tensor, Tensor]:
        values, dz = run_once(
            lambda z, y: formula(z.to(dtype), y),
            logits_TV[some].to(leaf).requires_grad_(),
            labels_T[some],
            g_T[some].to(dtype),
        )
        return values, dz[:, own]

    scales = {}
    for name, formula in FORMULAS.items():
        true = by_reference(formula, torch.float64, torch.float64)
        scales[name] = true, rms_errors(by_reference(formula, torch.float32, case.dtype), true)
    worst = {}
    for name, way in known.items():
        values_T, dz_TV = run_once(way, mine_TV, labels_T, g_T)
        true, plain = scales[name]
        found = rms_errors((values_T[some], dz_TV[some]), true)
        worst[name] = (torch.tensor(found) / torch.tensor(plain)).max().item()  # NaN if any is
    return worst


def measure_ways(
    case: Case, budget_s: float, known: dict[str, LogProbFunction] | None = None
) -> tuple[Rows, list[str]]:
    """Return on every rank its rows (impl, metric, unit, values), and a line for each way that is wrong."""
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    group, rank = (dist.group.WORLD, dist.get_rank()) if case.ranks > 1 else (None, 0)
    known = ways(case, group) if known is None else known
    rows, refused, right = [], [], []
    for name, error in worst_errors(case, rank, known).items():
        rows.append((name, "error / plain", "1", [error]))
        if any_rank(not error <= ERROR_LIMIT):  # NaN is wrong
            refused.append(f"{name}: its error is {error:.3g} x that of plain PyTorch, so its time does not count")
        else:
            right.append(name)
    logits_TV, labels_T, g_T = inputs(case)
    mine_TV = logits_TV[:, rank * case.columns : (rank + 1) * case.columns].clone().requires_grad_()
    del logits_TV
    steps = {name: partial(run_once, known[name], mine_TV, labels_T, g_T) for name in right}
    return rows + cpu_times(steps, budget_s, USUAL, "usual"), refused


def measure(seconds: float = 3.0) -> Iterator[Found]:
    for case in cases():
        yield case.name, *run_world(case.ranks, measure_ways, case, seconds)
