"""`bits="batch"` and "tensor_parallel" on CUDA: the same bits for other tokens, chunks and caches, and true values.

`pytest -m gpu --rehearse` runs the same lines on the CPU, with Triton's interpreter.
"""

from functools import partial

import pytest
import torch

from megatron_ext import VocabShard, head
from megatron_ext.head import LmHead
from megatron_ext.numerics.batch_invariance import product
from tests.batch_invariant_mode import switch
from tests.devices import GPU
from tests.head import test_fixed_bits, test_fixed_bits_of_read_outs
from tests.head.test_fixed_bits import assert_as_near, same

pytestmark = [pytest.mark.gpu, pytest.mark.rehearsed]

TOKENS, WIDTH = 33, 40
VOCAB = {"batch": 150, "tensor_parallel": 544}  # leaves of two steps of a product or one, and a part of the next
MODES = ["batch", "tensor_parallel"]
computed = partial(test_fixed_bits.computed, entropy=False)
OPTIONS = [{}, {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}]


def problem(dtype, bits):
    g, columns = torch.Generator().manual_seed(0), VOCAB[bits]
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=g), torch.randn(columns, WIDTH, generator=g) / 3
    labels, slopes = torch.randint(columns, (TOKENS,), generator=g), torch.randn(TOKENS, generator=g)
    labels[7], labels[20:30:3] = -100, 5  # a label of several tokens
    bias = torch.randn(columns, generator=g)
    return [x.to(GPU) for x in (hidden.to(dtype), weight.to(dtype), labels, slopes, bias.to(dtype))]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_of_layers(dtype, biased):
    """`batch_invariant_mode` without Megatron's switch rounds layers' products once, after the bias is added."""
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=g).to(GPU, dtype) for shape in ((150, 70), (20, 70), (20,)))
    bias = b if biased else None
    with switch(False):
        whole = product(x, w.t(), bias)
        for rows in (slice(140, 141), slice(3, 80)):
            assert torch.equal(product(x[rows], w.t(), bias), whole[rows])
    exact = x.double() @ w.double().t() + (b.double() if biased else 0)
    assert whole.dtype == dtype
    close = {"rtol": 2**-8, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(whole.double(), exact, **close)


@pytest.mark.parametrize("more", OPTIONS, ids=["plain", "bent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bits", MODES)
def test_the_same_bits_for_other_tokens_chunks_and_caches(bits, dtype, more):
    hidden, weight, labels, slopes, bias = problem(dtype, bits)
    options = {"bias": bias, "entropy": True, **more} if more else {}
    given = (hidden, weight, labels, slopes)
    results, grads = computed(bits, *given, cache=1, **options)
    for cache, chunk in ((0, None), (0.9, 16)):
        again = computed(bits, *given, cache=cache, chunk_tokens=chunk, **options)
        same(results + grads, again[0] + again[1])
    some = torch.tensor([30, 2, 11], device=GPU)
    others, (dx, *_) = computed(bits, hidden[some], weight, labels[some], slopes[some], **options)
    same([x[some] for x in (*results, grads[0])], [*others, dx])


@pytest.mark.parametrize("bits", MODES)
def test_dw_is_the_same_with_tokens_behind_that_do_not_count(bits):
    hidden, weight, labels, _, _ = problem(torch.bfloat16, bits)

    def dw(x, y):
        w = weight.clone().requires_grad_()
        LmHead(w, bits=bits).read(x, head.LogProbs(y)).sum().backward()
        return w.grad

    more = torch.cat([hidden, hidden[:20]]), torch.cat([labels, torch.full((20,), -100, device=GPU)])
    assert torch.equal(dw(hidden, labels), dw(*more))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("bits", MODES)
def test_values_are_as_near_the_truth_as_fast_ones(bits, dtype):
    hidden, weight, labels, slopes, bias = problem(dtype, bits)
    wide = [x.double() for x in (hidden, weight)]
    for options in ({"cache": 1}, {"softcap": 5.0, "entropy": True}):
        truth = computed("fast", *wide, labels, slopes.double(), bias.double(), **options)
        found, fast = (computed(mode, hidden, weight, labels, slopes, bias, **options) for mode in (bits, "fast"))
        floor = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 2e-4}[dtype]
        assert_as_near(*(results + grads for results, grads in (found, fast, truth)), 1.1, floor)


@pytest.mark.parametrize("bits", MODES)
def test_the_gradient_is_added_to_main_grad(bits):
    hidden, weight, labels, slopes, _ = problem(torch.bfloat16, bits)
    wide = [x.double() for x in (hidden, weight)]
    truth = computed("fast", *wide, labels, slopes.double())[1][1]
    w = weight.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
    of = LmHead(w, bits=bits, gradient_accumulation_fusion=True)
    loss = of.read(hidden, head.CrossEntropy(labels, label_smoothing=0.1, z_loss=0.01))
    (loss * slopes).sum().backward()
    assert (w.main_grad - 1 - truth).norm() < 0.004 * truth.norm()


def test_a_vocabulary_that_ends_inside_a_leaf():
    hidden, weight, labels, slopes, _ = problem(torch.bfloat16, "tensor_parallel")
    labels = labels.clamp(max=540)
    padded = computed("tensor_parallel", hidden, weight, labels, slopes, vocab=VocabShard(0, 544, 541))
    cut = computed("tensor_parallel", hidden, weight[:541], labels, slopes, vocab=VocabShard(0, 541, 541))
    same(padded[0] + [padded[1][0], padded[1][1][:541]], cut[0] + cut[1])
    assert not padded[1][1][541:].any()


READ_OUTS = test_fixed_bits_of_read_outs.NAMES


@pytest.fixture
def small(monkeypatch):
    """A problem that the interpreter computes in seconds."""
    monkeypatch.setattr(test_fixed_bits_of_read_outs, "TOKENS", 20)
    return partial(test_fixed_bits_of_read_outs.Problem, tokens=20, device=GPU)


@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("name", READ_OUTS)
def test_read_outs_have_the_same_bits(name, bits, small):
    given, options = small(torch.bfloat16), {**test_fixed_bits_of_read_outs.BENT, "biased": True}
    found, of_weights = given.read(name, bits, **options)
    with_chunks = partial(given.read, name, bits, chunk_tokens=256, **options)
    for some in ([19, 3, 11], [5]):
        some = torch.tensor(some, device=GPU)
        same([x[some] for x in found], with_chunks(some)[0])
    truth = [x for each in given.read(name, "fast", dtype=torch.float64, **options) for x in each]
    fast = [x for each in given.read(name, "fast", **options) for x in each]
    assert_as_near([*found, *of_weights], fast, truth, 1.2, 2e-3)


@pytest.mark.parametrize("bits", MODES)
def test_chunks_and_lora_do_not_change_read_outs_bits(bits, monkeypatch):
    """Tokens are more than a chunk has, and head and teacher have a low rank beside their weights."""
    from megatron_ext.numerics import fixed_order

    monkeypatch.setattr(fixed_order, "TOKENS", 64)
    monkeypatch.setattr(test_fixed_bits_of_read_outs, "TOKENS", 80)
    given = test_fixed_bits_of_read_outs.Problem(torch.bfloat16, 80, GPU)

    read = partial(given.read, "all at once", bits, adapted=True)
    found, of_weights = read()
    again, of_weights_again = read(chunk_tokens=64)
    same([*found, *of_weights], [*again, *of_weights_again])
    some = torch.tensor([70, 3], device=GPU)
    same([x[some] for x in found], read(some)[0])


@pytest.mark.parametrize("bits", MODES)
def test_a_loss_has_the_same_bits_beside_others(bits, small):
    """The loss of rounded logits is summed in an engine's order, whatever is read beside it."""
    given = small(torch.bfloat16)
    of, loss = LmHead(given.weight, bits=bits, logit_dtype=torch.bfloat16), head.LogProbs(given.labels)
    alone = of.read(given.hidden, loss)
    beside, _ = of.read(given.hidden, loss, head.SumOfSquares())
    same([alone], [beside])
