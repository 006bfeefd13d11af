"""Log-probabilities under the distribution that tokens were sampled from: top-k, top-p, both, with temperature."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, head, reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from megatron_ext.head.readouts import top_k_filter, top_p_filter
from megatron_ext.head.row_passes import selection
from tests.head.problems import error
from tests.head.test_costs import costs, costs_on_logits
from tests.marks import slow
from tests.ranks import ranks

FILTERS = [(5, 1.0), (5, 0.6), (40, 0.9), (1, 1.0), (None, 0.6), (-1, 0.97), (None, 1e-6), (None, 1.0)]
TEMPERATURE = 0.7


def drawn(dtype=torch.float64, columns=40, size=40, tied=False):
    """Logits `[5, 3, V]`, some -inf, and labels that filters keep, do not keep, and that are ignored."""
    z = 2 * torch.randn(5, 3, columns, dtype=torch.float64)
    if tied:
        z = z.round()
    z[0, :, 1::2] = -torch.inf
    labels = torch.randint(size, (5, 3))
    labels[0] -= labels[0] % 2  # without a filter a label at -inf has the gradient of log_softmax
    labels[:, 0] = z[..., :size].argmax(-1)[:, 0]
    labels[2, 2] = -100
    return z.to(dtype), labels


def own_columns(columns):
    shard = VocabShard.split(columns, dist.group.WORLD)
    return slice(shard.start, shard.stop)


def truth(z, labels, top_k, top_p, upstream, size=None):
    """Values, and the gradient; 0 for a label outside, of whose -inf plain autograd makes NaN."""
    z = z.double().requires_grad_()
    value = reference.sampled_log_probs(z / TEMPERATURE, labels, top_k, top_p, size)
    (grad,) = torch.autograd.grad(value.where(value > -torch.inf, 0.0), z, upstream.double())
    return value, grad.nan_to_num(0.0)


@ranks(1, 2, 4)
@pytest.mark.parametrize("tied", [False, *slow(True)])
def test_from_logits(tied):
    group, own = dist.group.WORLD, own_columns(40)
    upstream = torch.randn(5, 3)
    for size in (40, 37):
        z, labels = drawn(size=size, tied=tied)
        mine = z[..., own].clone().requires_grad_()
        for top_k, top_p in FILTERS:
            top_k = top_k if top_k != 40 else size
            want, want_grad = truth(z, labels, top_k, top_p, upstream, size)
            alone = top_k in (None, -1) and top_p < 1
            for chunk_tokens, few, chunks in ((None, 1000, 1), (4, 1000, 4), (None, 0, 2)):
                with count_collectives() as counts, mock.patch.object(top_p_filter, "_TOO_FEW_TO_SHARE", few):
                    found = head.sampled_log_probs(
                        mine,
                        labels,
                        top_k,
                        top_p,
                        TEMPERATURE,
                        group,
                        VocabShard(own.start, own.stop, size),
                        chunk_tokens=chunk_tokens,
                    )
                sent = 1 if not alone else 2 if chunks == 1 else chunks + 2
                assert counts.total() == (0 if group_size(group) == 1 else sent)
                torch.testing.assert_close(found, want)
                with count_collectives() as counts:
                    (grad,) = torch.autograd.grad(found, mine, upstream.double())
                assert not counts
                torch.testing.assert_close(grad, want_grad[..., own])


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ties_of_narrow_logits(dtype):
    """bf16 logits tie of themselves: all that equal the last are kept, of the logits' own values."""
    group, own = dist.group.WORLD, own_columns(40)
    z, labels = drawn(dtype, tied=True)
    upstream = torch.randn(5, 3)
    mine = z[..., own].clone().requires_grad_()
    for top_k, top_p in ((5, 1.0), (9, 0.77), (None, 0.77)):
        want, want_grad = truth(z, labels, top_k, top_p, upstream)
        found = head.sampled_log_probs(mine, labels, top_k, top_p, TEMPERATURE, group)
        assert torch.equal(found > -torch.inf, want > -torch.inf)
        torch.testing.assert_close(found, want.float(), rtol=2e-6, atol=2e-6)
        (grad,) = torch.autograd.grad(found, mine, upstream)
        assert grad.dtype == dtype
        assert error(grad, want_grad[..., own]) < 4 * torch.finfo(dtype).eps


@ranks(1, 2, 4)
@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
def test_more_equals_than_k(device):
    """Far more columns than k equal the k-th, on some ranks or all: each is kept and has its share of the gradient."""
    looks = {"on_host": mock.Mock(return_value=device == "cpu")}
    with mock.patch.multiple(top_k_filter, **looks), mock.patch.multiple(selection, **looks):
        check_more_equals_than_k()


def check_more_equals_than_k():
    group, own = dist.group.WORLD, own_columns(40)
    z = torch.randn(6, 40, dtype=torch.float64).clamp(max=0)  # about half are 0
    z[1] = 1.5
    z[2, :11], z[3, 20:] = 2.0, -torch.inf
    z[4, 7], z[5, 3::10] = 3.0, 4.0
    labels = torch.stack([row.argmax() if n != 4 else (row == 0).nonzero()[-1, 0] for n, row in enumerate(z)])
    labels[1], labels[2] = 39, 10  # not among any rank's first k
    upstream = torch.randn(6)
    weight = z[:, own].t().clone().nan_to_num(neginf=-1e308).requires_grad_()
    mine, eye = z[:, own].clone().requires_grad_(), torch.eye(6, dtype=torch.float64)
    for top_k, top_p in ((2, 1.0), (5, 0.4), (5, 0.95), (1, 1.0), (None, 0.3), (None, 0.9)):
        want, want_grad = truth(z, labels, top_k, top_p, upstream)
        assert want.isfinite().any()
        for chunk_tokens in (None, 4):
            found = head.sampled_log_probs(mine, labels, top_k, top_p, TEMPERATURE, group, chunk_tokens=chunk_tokens)
            torch.testing.assert_close(found, want)
            torch.testing.assert_close(torch.autograd.grad(found, mine, upstream.double())[0], want_grad[:, own])
        finite = want_grad.isfinite() & (z > -torch.inf).all(1, keepdim=True)
        with count_collectives() as counts:
            found = head.linear_sampled_log_probs(eye, weight, labels, top_k, top_p, TEMPERATURE, group)
        assert top_k is None or counts.total() == (dist.get_world_size() > 1)
        torch.testing.assert_close(found, want)
        (grad,) = torch.autograd.grad(found, weight, upstream.double())
        torch.testing.assert_close(grad.t().where(finite[:, own], 0.0), want_grad[:, own].where(finite[:, own], 0.0))


@ranks(1, 2)
@pytest.mark.parametrize("top_k", [41, 5000])
def test_k_above_the_vocabulary_keeps_all_of_it(top_k):
    """Ranks first tell each other their size for a large k: one that refuses is heard there."""
    group, rank, own = dist.group.WORLD, dist.get_rank(), own_columns(40)
    z, labels = drawn()
    labels[0, 1] = 1  # at -inf
    mine, upstream = z[..., own].clone().requires_grad_(), torch.randn(5, 3)
    for top_p in (1.0, 0.8):
        want, want_grad = truth(z, labels, None, top_p, upstream)
        with count_collectives() as counts:
            found = head.sampled_log_probs(mine, labels, top_k, top_p, TEMPERATURE, group)
        assert counts.total() == (0 if group_size(group) == 1 else 1 + (top_k == 5000))
        torch.testing.assert_close(found, want)
        (grad,) = torch.autograd.grad(found, mine, upstream.double())
        outside = want.isneginf().unsqueeze(-1)
        torch.testing.assert_close(grad, want_grad[..., own].where(~outside, 0.0))
    if group_size(group) == 2:
        wrong = VocabShard(own.start, own.stop, 40 + rank)
        with pytest.raises(ValueError, match="vocab"):
            head.sampled_log_probs(mine, labels, top_k, 1.0, 1.0, group, wrong)
        with pytest.raises(ValueError, match="outside" if rank else "another rank of tp_group refused"):
            head.sampled_log_probs(mine, labels.clamp(min=0) + 99 * rank, top_k, 1.0, 1.0, group)


@pytest.mark.slow
def test_bytes():
    """Beyond logits and gradient at most a tenth of the logits, in chunks. Each filter alone: tests/model_utils."""
    tokens, columns = 512, 32768
    call = partial(head.sampled_log_probs, top_k=50, top_p=0.9, temperature=0.7, chunk_tokens=8)
    forward, backward = costs_on_logits(call, tokens, columns, 1)
    assert forward.peak_bytes <= 0.1 * 2 * tokens * columns
    assert backward.peak_bytes <= 1.1 * 2 * tokens * columns


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [50, None])
def test_from_hidden_states_only_a_chunk_of_logits(top_k):
    """Nothing waits to see whether logits tie, as on a GPU."""
    tokens, width, columns = 1024, 256, 8192

    def call(hidden, weight, labels, group, layout):
        return head.linear_sampled_log_probs(hidden, weight, labels, top_k, 0.9, 1.0, group, chunk_tokens=32)

    found = costs(call, sizes=(tokens, width, 2 * columns, 2))
    assert found.flops == 8 * tokens * width * columns
    gradients = 2 * tokens * width + 2 * columns * width + 4 * columns * width  # dx, dW, and dW's sum in fp32
    assert found.peak_bytes <= gradients + 0.35 * 2 * tokens * columns


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"top_k": 0}, "top_k is 0: it must be an int of at least 1; None or -1 turns it off"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, r"top_p is 0.0: it must be a number in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": 3, "temperature": 0.0}, "temperature is 0.0: it must be a number above 0"),
        ({"top_p": 0.5, "temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 3, "labels": torch.full((4,), 10)}, r"labels holds \[10\], outside \[0, 10\)"),
        ({"top_k": 3, "labels": torch.zeros(5).long()}, r"\(5,\)"),
        ({"top_p": 0.5, "labels": torch.zeros(4)}, "labels is torch.float32"),
    ],
    ids=str,
)
def test_bad_input(changed, message):
    labels = {"labels": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=message):
        head.sampled_log_probs(torch.zeros(4, 10), **(labels | changed))
    with pytest.raises(ValueError, match=message):
        head.linear_sampled_log_probs(torch.zeros(4, 3), torch.zeros(10, 3), **(labels | changed))


@ranks(4)
def test_top_p_of_four_shards_that_are_not_equal():
    group, rank, labels = dist.group.WORLD, dist.get_rank(), torch.zeros(4).long()
    middle = VocabShard(10 * rank + (rank > 1), 10 * rank + 10 + (rank > 0), 41)
    first = VocabShard(0 if rank == 0 else 41, 41, 41)
    for uneven in (VocabShard.split(41, group), middle, first):  # 11, 10, 10, 10 columns; 10, 11, 10, 10; 41, 0, 0, 0
        with pytest.raises(ValueError, match="needs shards of equal width"):
            head.sampled_log_probs(torch.zeros(4, uneven.columns), labels, None, 0.5, 1.0, group, uneven)
    found = head.sampled_log_probs(torch.zeros(4, 10), labels, 2, 1.0, 1.0, group)
    torch.testing.assert_close(found, torch.full((4,), 1 / 40).log())  # all are still in step; all logits are equal


@ranks(2)
@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_top_p_of_shards_that_are_not_equal(chunk_tokens):
    """The pieces that ranks send each other would differ in size: nothing is sent but who has which columns."""
    group, rank = dist.group.WORLD, dist.get_rank()
    labels = torch.zeros(4).long()

    def call(columns, vocab):
        rest = {"tp_group": group, "vocab": vocab, "chunk_tokens": chunk_tokens}
        with count_collectives() as counts:
            with pytest.raises(ValueError, match="vocab: ") as of_logits:
                head.sampled_log_probs(torch.zeros(4, columns), labels, None, 0.5, **rest)
            with pytest.raises(ValueError, match="vocab: ") as of_hidden:
                head.linear_sampled_log_probs(torch.zeros(4, 3), torch.zeros(columns, 3), labels, None, 0.5, **rest)
        assert counts.total() == 2
        assert str(of_logits.value) == str(of_hidden.value)
        return str(of_logits.value)

    assert "agree on the vocabulary's size" in call(10 - rank, None)
    for shards, said in (
        ([(0, 10, 19), (10, 19, 20)], "agree on the vocabulary's size"),
        ([(0, 10, 22), (10, 22, 22)], "shards of equal width"),  # the second is wider
        ([(10, 20, 20), (0, 10, 20)], "in rank order"),
        ([(0, 10, 20), (0, 10, 20)], "in rank order"),
        ([(0, 10, 30), (10, 20, 30)], "cover the vocabulary"),
    ):
        vocab = VocabShard(*shards[rank])
        assert said in call(vocab.columns, vocab)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_refusal_is_of_the_dtype_that_others_wait_for(dtype):
    """Autocast computes in another dtype than that of the hidden states."""
    group, rank = dist.group.WORLD, dist.get_rank()
    labels = torch.zeros(4).long()
    weight = torch.ones(10, 3 + rank, dtype=dtype)  # the second rank's does not fit
    message = r"weight has shape \(10, 4\)" if rank else "another rank of tp_group refused"
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for layout, tokens in (("replicated", 4), ("sequence", 2)):
                hidden = torch.ones(tokens, 3, dtype=dtype)
                for top_k, top_p in ((None, 0.5), (2, 0.5), (None, 1.0)):
                    with pytest.raises(ValueError, match=message):
                        head.linear_sampled_log_probs(hidden, weight, labels, top_k, top_p, 1.0, group, layout)


@ranks(1, 2)
def test_a_row_of_minus_infinity():
    """No id has any probability there: -inf whatever the filter, the entropy 0, and no NaN flows back."""
    group, own = dist.group.WORLD, own_columns(10)
    whole = torch.randn(4, 10).double()
    whole[1:3] = -torch.inf
    labels = torch.tensor([3, 0, -100, 7])
    z, hidden = whole[:, own].clone().requires_grad_(), torch.eye(4).double()
    for top_k, top_p in ((None, 1.0), (3, 1.0), (3, 0.5), (10, 0.9), (None, 0.5)):
        for chunk_tokens in (None, 1):
            from_logits = head.sampled_log_probs(z, labels, top_k, top_p, 1.0, group, chunk_tokens=chunk_tokens)
            weight = whole[:, own].t().nan_to_num(neginf=-1e308).requires_grad_()  # times 4 it is -inf
            x = 4 * hidden[1:3]
            from_hidden = head.linear_sampled_log_probs(x, weight, labels[1:3], top_k, top_p, 1.0, group)
            assert from_logits[1].item() == from_hidden[0].item() == -torch.inf
            assert from_logits[2].item() == from_hidden[1].item() == 0
            (grad,) = torch.autograd.grad(from_logits.sum(), z)
            assert grad.isfinite().all()
            assert not grad[2].any()
            assert not grad[1].any() or (top_k, top_p) == (None, 1.0)  # there a label at -inf has log_softmax's
            if grad[0].any():
                assert from_logits[0].isfinite()
    assert head.token_entropy(z, group)[1].item() == 0
    picked = head.gather_log_probs(z, labels.clamp(min=0).unsqueeze(1), group)
    assert picked[1].item() == -torch.inf
    assert torch.autograd.grad(picked[:2].sum(), z)[0].isfinite().all()
    assert head.vocab_parallel_log_softmax(z, group)[1].isneginf().all()


@pytest.mark.parametrize("top_k", [None, 4, 5])
def test_a_prefix_of_exactly_top_p_is_enough(top_k):
    """Probabilities of 1/2, 1/4, 1/8 and 1/8."""
    z, labels = torch.tensor([0.0, -1, -2, -2, -torch.inf], dtype=torch.float64).expand(4, 5), torch.arange(4)
    found = head.sampled_log_probs(z, labels, top_k, 0.75, 1 / math.log(2))
    torch.testing.assert_close(found.exp(), torch.tensor([2 / 3, 1 / 3, 0, 0], dtype=torch.float64))


def test_top_p_beside_another_read_out_writes_no_padding_column():
    """Columns that pad the vocabulary get no gradient, whatever was in the memory that the pass over rows fills."""
    g = torch.Generator().manual_seed(7)
    hidden, weight = torch.randn(6, 4, generator=g), torch.randn(33, 4, generator=g)
    labels, vocab = torch.randint(0, 15, (6,), generator=g), VocabShard(0, 33, 15)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    def gradients(rows, **options):
        of = head.LmHead(weight[:rows], "unsharded", **options)
        filtered, mean = of.read(hidden, head.Sampled(labels, top_p=0.9), head.MeanLogit())
        return torch.autograd.grad(filtered.masked_fill(filtered == -torch.inf, 0.0).sum() + mean.sum(), leaves)

    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        found = gradients(33, vocab=vocab)
    finally:
        torch.set_deterministic_debug_mode(before)
    torch.testing.assert_close(found, gradients(15), rtol=1e-5, atol=1e-6)
    assert not found[1][15:].any()
