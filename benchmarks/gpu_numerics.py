"""Errors of the head's gradients on a GPU, in bf16: many tokens a column and few, small and large logits.

As in `tests/head/test_precision.py`, which runs on a CPU, an error is the root mean square against fp64, divided by the
error of plain PyTorch in the same dtype. On a GPU dW is one product, rounded before the labels' terms are added to it.
"""

from itertools import product
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.gpu_run import Run
from benchmarks.implementations import ours
from benchmarks.measure import Inputs, baselines, drawn, parity, run_once, truth

SIZES = [(256, 64, 1000), (1024, 32, 300), (64, 128, 4000), (2048, 32, 41), (4096, 512, 32768)]
LOGITS = (0.05, 1.0, 8.0)
CACHES = (1, 0)
REHEARSED = [(8, 16, 40)], (1.0,)


def measure(run: Run, device: str) -> None:
    """Measure "dx, error / plain" and "dW, error / plain" of each case of which `run` has no rows."""
    sizes, of_logits = (SIZES, LOGITS) if device == "cuda" else REHEARSED
    for (tokens, width, vocab), size, likeliest in product(sizes, of_logits, (False, True)):
        name = f"numerics {tokens} x {width} x {vocab}, logits of {size:g}{', likeliest labels' * likeliest}"
        case = Case(name, tokens, width, vocab, 1, torch.bfloat16, device)
        missing = [cache for cache in CACHES if not run.measured(case, ours(cache).name)]
        inputs = with_labels(drawn(case, size), likeliest) if missing else None
        for cache in missing:
            run.attempt(case, ours(cache).name, lambda case=case, x=inputs, c=cache: errors(case, x, c))


def with_labels(inputs: Inputs, likeliest: bool) -> Inputs:
    """Return `inputs`, with `likeliest` labelled by each token's largest logit."""
    if not likeliest:
        return inputs
    return inputs._replace(labels_T=(inputs.x_TD.double() @ inputs.w_VD.double().t()).argmax(-1))


def errors(case: Case, inputs: Inputs, cache: float) -> list[tuple[str, str, list[float]]]:
    true = truth(Inputs(*(x.detach() for x in inputs)))
    known: Any = baselines(case, true, {None}, inputs)[None]
    found = parity(run_once(ours(cache).build(case, None), inputs), true, known)
    return [("dx, error / plain", "1", [found.dx]), ("dW, error / plain", "1", [found.dw])]
