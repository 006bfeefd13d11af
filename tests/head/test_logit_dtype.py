"""`logit_dtype`: logits rounded to the model's 16 bits, on the CPU and on the ways that CUDA tensors take."""

import pytest
import torch

from megatron_ext import head, linear_cross_entropy, linear_log_probs
from megatron_ext.head import LmHead
from megatron_ext.head.readouts.teacher import Teacher
from tests.head.as_on_cuda import cuda_branches, plain
from tests.head.rounded_logits import BENT, BF16, assert_near, computed, problem, reference
from tests.marks import slow
from tests.ranks import ranks


@pytest.mark.parametrize("dtype", [BF16, *slow(torch.float16)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("more", [{}, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("bits", ["fast", "batch", "tensor_parallel"])
def test_on_a_cpu(bits, more, dtype):
    given = problem(dtype=dtype)
    truth = reference(*given, **more)
    assert_near(computed(*given, bits=bits, logit_dtype=dtype, **more), truth)


@pytest.mark.parametrize("cache, chunk", [(1, None), (0.4, None), (0, 32)])
@pytest.mark.parametrize("more", [{}, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("rounds", [True, False], ids=["16 bits", "fp32"])
def test_on_the_way_of_cuda_tensors(rounds, more, cache, chunk):
    given = problem()
    bias = torch.linspace(-1, 1, len(given[1])).to(BF16) if more else None
    truth = reference(*given, bias, rounds=rounds, **more)
    with cuda_branches(plain):
        dtype = BF16 if rounds else torch.float32
        found = computed(*given, bias, cache=cache, chunk_tokens=chunk, logit_dtype=dtype, **more)
    assert_near(found, truth)


def test_the_rounding_shows():
    """Else the tests above would pass without it."""
    given = problem()
    rounded, whole = (reference(*given, rounds=rounds)[0][0] for rounds in (True, False))
    assert (rounded - whole).abs().max() > 1e-3


@pytest.mark.parametrize("cache", [1, 0])
def test_read_outs_of_logits_on_the_way_of_cuda_tensors(cache):
    """Student and teacher round their logits separately."""
    hidden, weight, _, _ = problem()
    other = weight.roll(5, 0)
    z, their_z = ((hidden.double() @ w.double().T).to(BF16).double() for w in (weight, other))
    log_p, log_q = z.log_softmax(-1), their_z.log_softmax(-1)
    with cuda_branches(plain):
        of = LmHead(weight, logit_dtype=BF16, cache=cache)
        found, ids = of.read(hidden, head.TopK(3))
        teacher = Teacher(LmHead(other, logit_dtype=BF16), hidden)
        kl = of.read(hidden.clone().requires_grad_(), head.KL(teacher))
        exact = LmHead(weight, cache=cache).read(hidden, head.TopK(3))[0]
    torch.testing.assert_close(found.double(), log_p.gather(1, ids), rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(kl.detach().double(), (log_q.exp() * (log_q - log_p)).sum(-1), rtol=1e-5, atol=1e-5)
    assert (exact - found).abs().max() > 1e-3


def test_in_every_function():
    hidden, weight, labels, _ = problem()
    (losses, _), _ = reference(hidden, weight, labels, torch.ones(len(labels)))
    with cuda_branches(plain):
        found = linear_cross_entropy(hidden, weight, labels, logit_dtype=BF16)
        log_probs = linear_log_probs(hidden, weight, labels, logit_dtype=BF16)
    torch.testing.assert_close(found.double(), losses, rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(-log_probs.double(), losses, rtol=2e-6, atol=4e-6)


def test_other_dtypes_are_refused():
    hidden, weight, labels, _ = problem()
    with pytest.raises(ValueError, match=r"logit_dtype is torch.float64: it must be None or torch.float32"):
        LmHead(weight, logit_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"logit_dtype is 'bf16'"):
        LmHead(weight, logit_dtype="bf16")
    with pytest.raises(ValueError, match=r"torch.float16 and hidden is multiplied in torch.bfloat16.*bfloat16"):
        LmHead(weight, logit_dtype=torch.float16).read(hidden, head.LogProbs(labels))
    wide = hidden.float(), weight.float()
    with pytest.raises(ValueError, match=r"torch.bfloat16 and hidden is multiplied in torch.float32.*pass None"):
        linear_cross_entropy(*wide, labels, logit_dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        found = linear_cross_entropy(*wide, labels, logit_dtype=BF16)
    assert torch.equal(found, linear_cross_entropy(hidden, weight, labels, logit_dtype=BF16))
    teacher = Teacher(LmHead(wide[1], logit_dtype=BF16), wide[0])
    with pytest.raises(ValueError, match=r"torch.bfloat16 and teacher_hidden is multiplied in torch.float32"):
        LmHead(weight).read(hidden, head.KL(teacher))


@ranks(2)
def test_over_two_ranks():
    rank = torch.distributed.get_rank()
    hidden, weight, labels, slopes = problem()
    group, half = torch.distributed.group.WORLD, len(weight) // 2
    shard = weight[rank * half : (rank + 1) * half]
    (losses, entropies), (dx, dw) = reference(hidden, weight, labels, slopes)
    with cuda_branches(plain):
        found = computed(hidden, shard, labels, slopes, tp_group=group, logit_dtype=BF16)
    assert_near(found, ([losses, entropies], [dx, dw[rank * half : (rank + 1) * half]]))
