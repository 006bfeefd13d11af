"""`logit_dtype` on CUDA, with Triton's kernels: `pytest -m gpu --rehearse` runs them by the interpreter."""

import pytest
import torch

from tests.devices import GPU
from tests.head import engine_bits, engine_kernels
from tests.head.rounded_logits import BENT, BF16, assert_near, computed, problem, reference
from tests.head.test_fixed_bits import same

pytestmark = [pytest.mark.gpu, pytest.mark.rehearsed]


@pytest.mark.parametrize("cache", [1, 0.4])
@pytest.mark.parametrize("more", [{}, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("bits", ["fast", "batch", "tensor_parallel"])
def test_values_and_gradients(bits, more, cache):
    given = problem(20, 24)
    truth = reference(*given, **more)
    found = computed(*(x.to(GPU) for x in given), bits=bits, cache=cache, logit_dtype=BF16, **more)
    assert_near([[x.cpu() for x in each] for each in found], truth)


@pytest.mark.parametrize("bits", ["batch", "tensor_parallel"])
def test_bits_do_not_depend_on_other_tokens_cache_or_chunk(bits):
    hidden, weight, labels, slopes = (x.to(GPU) for x in problem(20, 24))
    hidden = (hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(GPU)).to(BF16)
    one = computed(hidden, weight, labels, slopes, bits=bits, cache=1, logit_dtype=BF16)
    again = computed(hidden, weight, labels, slopes, bits=bits, cache=0, chunk_tokens=16, logit_dtype=BF16)
    some = [5, 0, 17]
    part = computed(hidden[some], weight, labels[some], slopes[some], bits=bits, logit_dtype=BF16)
    same(one[0] + one[1], again[0] + again[1])
    same([x[some] for x in (*one[0], one[1][0])], [*part[0], part[1][0]])


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_bits_are_those_of_megatrons_batch_invariant_kernels(dtype):
    """Products and log-softmax have these bits; `make test-engines` has more cases, and vLLM's kernels."""
    pytest.importorskip("megatron.core")
    if not torch.cuda.is_available():
        engine_kernels.multiply_sixteen_bits()
    kernels = engine_kernels.megatrons()
    given = [x.to(GPU) for x in engine_bits.problem(dtype, 70, 100, 2500)]
    for case in engine_bits.CASES:
        if case.same:
            assert torch.equal(engine_bits.ours(case, *given), engine_bits.theirs(kernels, case, *given)), case.name
    other = next(case for case in engine_bits.CASES if "tensor_parallel" in case.name)
    assert not torch.equal(engine_bits.ours(other, *given), engine_bits.theirs(kernels, other, *given))
