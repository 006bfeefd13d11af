"""The numbers of the head on CUDA, computed on the CPU: matmuls return fp32 there, so rounding happens elsewhere."""

import pytest
import torch

from tests.head.as_on_cuda import cuda_branches, plain
from tests.head.problems import OPTIONS, Problem, error
from tests.marks import slow


@pytest.fixture(autouse=True)
def _as_on_cuda():
    with cuda_branches(plain):  # Triton's passes compute what these do
        yield


# From a softcap of 16 on exponentials are kept, not logits.
LARGE_SOFTCAP = {"large softcap": {"softcap": 20.0, "temperature": 0.7}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("options", OPTIONS | LARGE_SOFTCAP)
def test_values_and_gradients(options, dtype):
    """Errors have the bounds of tests/head/test_gpu.py."""
    problem = Problem((12, 16), 32, 301, dtype, options=(OPTIONS | LARGE_SOFTCAP)[options])
    for what in ("loss", "log_probs"):
        for cache, chunk_tokens in ((0, None), (0.5, 50), (1, None)):
            for ours, truth, theirs in problem.beside_plain(what, None, cache=cache, chunk_tokens=chunk_tokens):
                assert error(ours, truth) <= 1.1 * error(theirs, truth) + 8 * torch.finfo(torch.float32).eps, cache
