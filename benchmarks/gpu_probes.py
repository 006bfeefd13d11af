"""`python -m benchmarks.run gpu --only probes`: why dx is slow where it is, and which chunks are quickest.

At case B dx runs at 663 TFLOP/s and dW at 713, so dx is computed in five ways. Log-probabilities without gradient are
computed in chunks of three sizes, and by the fused epilogue. `--only profile` writes a table of one step's kernels.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_run
from benchmarks.cases import Case
from benchmarks.implementations import ours
from benchmarks.measure import drawn, run_once
from megatron_ext import head

CHUNKS = (384, 1024, 2048)
PROFILE = "profile.txt"


def through(library: str, multiply: Callable[[], object]) -> Callable[[], object]:
    """Return `multiply` run with torch's BLAS library `library`."""

    def step() -> object:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return multiply()
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return step


def dx_five_ways(case: Case) -> dict[str, Callable[[], object]]:
    """Return steps that make dx as the head does; by cuBLASLt; with a 16-bit result; in two halves of K; transposed."""
    w_VD = drawn(case).w_VD.detach()
    g_TV = torch.rand(case.tokens, case.columns, device=w_VD.device).to(w_VD.dtype)
    half = case.columns // 2
    first, second = (g_TV[:, :half], w_VD[:half]), (g_TV[:, half:], w_VD[half:])

    def wide() -> Tensor:
        return torch.mm(g_TV, w_VD, out_dtype=torch.float32)

    def halves() -> Tensor:
        total_TD = torch.mm(*first, out_dtype=torch.float32)
        return torch.addmm(total_TD, *second, out_dtype=torch.float32, out=total_TD)

    return {
        "dx: as the head": wide,
        "dx: by cublaslt": through("cublaslt", wide),
        "dx: of 16 bits": lambda: torch.mm(g_TV, w_VD),
        "dx: halves of K": halves,
        "dx: transposed": lambda: torch.mm(w_VD.t(), g_TV.t(), out_dtype=torch.float32),
    }


def log_probs_by_chunks(case: Case) -> dict[str, Callable[[], object]]:
    """Return steps of log-probabilities, forward only, one for each chunk size and one for the fused epilogue."""
    x_TD, w_VD, labels_T = (x.detach() for x in drawn(case))

    def step(**options: Any) -> object:
        with torch.no_grad():
            return head.LmHead(w_VD, **options).read(x_TD, head.LogProbs(labels_T))

    steps = {f"log-probabilities: chunks of {n}": lambda n=n: step(chunk_tokens=n) for n in CHUNKS}
    return steps | {"log-probabilities: fused epilogue": lambda: step(fused_epilogue=True)}


def measure(run: gpu_run.Run, cases: list[Case]) -> None:
    """Measure the steps of which `run` has no rows."""
    for case in cases:
        for probes in (dx_five_ways, log_probs_by_chunks):
            steps = {name: step for name, step in probes(case).items() if not run.measured(case, name)}
            for name, step in steps.items():
                by_turns = partial(gpu_run.by_turns, {"it": step}, run.seconds)
                run.attempt(case, name, lambda by_turns=by_turns: [("time", "ms", by_turns()["it"])])


def profile(run: gpu_run.Run, cases: list[Case]) -> None:
    """Append tables of the kernels of one step at cache 1 and 0, by time, to the file `PROFILE` beside the rows."""
    on_gpu, kinds = cases[0].device == "cuda", torch.profiler.ProfilerActivity
    with run.out.with_name(PROFILE).open("a") as file:
        for case, cache in product(cases, (1, 0)):
            inputs, step = drawn(case), ours(cache).build(case, None)
            run_once(step, inputs)
            with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as found:
                run_once(step, inputs)
            table = found.key_averages().table(sort_by="cuda_time_total" if on_gpu else "cpu_time_total", row_limit=25)
            file.write(f"{case.name}, cache {cache}\n{table}\n")
