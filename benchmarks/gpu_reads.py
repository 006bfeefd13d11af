"""Read-outs from hidden states on a GPU, forward, by turns with PyTorch's operators on logits of 1024 tokens at a time.

The read-outs are log-probabilities of labels with the entropy, the likeliest ids, and log-probabilities under top-k and
top-p, for which PyTorch sorts. Legend: T tokens, D hidden size, V columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.gpu_run import Run, by_turns
from benchmarks.measure import drawn
from benchmarks.meter import MIB
from megatron_ext import head

CHUNK, K, TOP_K, TOP_P = 1024, 64, 50, 0.9


def label_and_entropy(z_tV: Tensor, labels_t: Tensor) -> Tensor:
    log_probs = z_tV.log_softmax(-1)
    entropy_t = -(log_probs.exp() * log_probs).sum(-1)
    return torch.stack([log_probs.gather(-1, labels_t.unsqueeze(-1)).squeeze(-1), entropy_t])


def likeliest(z_tV: Tensor, labels_t: Tensor) -> Tensor:
    return z_tV.log_softmax(-1).topk(min(K, z_tV.shape[-1]), -1).values.t()


def under_top_k(z_tV: Tensor, labels_t: Tensor) -> Tensor:
    least_t1 = z_tV.topk(min(TOP_K, z_tV.shape[-1]), -1).values[:, -1:]
    kept = z_tV.masked_fill(z_tV < least_t1, -torch.inf)
    return kept.log_softmax(-1).gather(-1, labels_t.unsqueeze(-1)).t()


def under_top_p(z_tV: Tensor, labels_t: Tensor) -> Tensor:
    falling, ids = z_tV.sort(-1, descending=True)
    probs = falling.softmax(-1)
    inside = probs.cumsum(-1) - probs < TOP_P
    kept = torch.empty_like(z_tV).scatter_(-1, ids, falling.where(inside, -torch.inf))
    return kept.log_softmax(-1).gather(-1, labels_t.unsqueeze(-1)).t()


# By name: (our read-outs, PyTorch's function of a chunk's logits and labels).
MakeReadOuts = Callable[[Tensor], list[Any]]
READS: dict[str, tuple[MakeReadOuts, Callable[[Tensor, Tensor], Tensor]]] = {
    "log-probabilities and entropy": (lambda y: [head.LogProbs(y), head.Entropy()], label_and_entropy),
    f"{K} likeliest": (lambda y: [head.TopK(K)], likeliest),
    f"under top-k {TOP_K}": (lambda y: [head.Sampled(y, top_k=TOP_K)], under_top_k),
    f"under top-p {TOP_P}": (lambda y: [head.Sampled(y, top_p=TOP_P)], under_top_p),
}


def measure(run: Run, case: Case) -> None:
    """Measure each read-out of which `run` has no rows."""
    missing = {row: of for name, of in READS.items() if not run.measured(case, row := f"read: {name}")}
    if not missing:
        return
    x_TD, w_VD, labels_T = (x.detach() for x in drawn(case))
    for row, (asked, by_torch) in missing.items():

        def ours(asked: MakeReadOuts = asked) -> Any:
            return head.LmHead(w_VD).read(x_TD, *asked(labels_T))

        def theirs(by_torch: Callable[[Tensor, Tensor], Tensor] = by_torch) -> Tensor:
            parts = zip(x_TD.split(CHUNK), labels_T.split(CHUNK), strict=True)
            return torch.cat([by_torch(torch.mm(x, w_VD.t(), out_dtype=torch.float32), y) for x, y in parts], -1)

        run.attempt(case, row, lambda ours=ours, theirs=theirs: _rows(run, ours, theirs))


def _rows(run: Run, ours: Callable[[], Any], theirs: Callable[[], Tensor]) -> list[tuple[str, str, list[float]]]:
    with torch.no_grad():
        for step in (ours, theirs):
            step()
        results, peaks = zip(*(run.allocated(step) for step in (ours, theirs)), strict=True)
        found = results[0] if isinstance(results[0], Tensor) else results[0][0]
        found = found if isinstance(found, Tensor) else found[0]
        error = _difference(found if found.dim() == 1 else found.t(), results[1])
        del results, found
        times = by_turns({"ours": ours, "theirs": theirs}, run.seconds)
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    return [
        ("time", "ms", times["ours"]),
        ("time of PyTorch's / ours, by turns", "1", ratios),
        ("peak of the allocator", "MiB", [peaks[0] / MIB]),
        ("peak of PyTorch's", "MiB", [peaks[1] / MIB]),
        ("largest difference from PyTorch's", "1", [error]),
    ]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of the first result, where PyTorch's is finite."""
    theirs = theirs[: ours.shape[0]] if ours.dim() == 2 else theirs[0]
    both = ours.isfinite() & theirs.isfinite()
    return float((ours - theirs).where(both, 0.0).abs().max())
