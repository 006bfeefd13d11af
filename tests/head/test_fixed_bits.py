"""`bits="batch"`, "tensor_parallel": a token's bits do not depend on other tokens, chunks, cache, layout, ranks."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, head, linear_cross_entropy, linear_log_probs
from megatron_ext.head import LmHead
from megatron_ext.head.call import statistics
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics import fixed_order
from tests.marks import slow
from tests.ranks import ranks

TOKENS, WIDTH, VOCAB = 330, 40, 203  # 203: the last eighth, of 26 columns, ends 5 columns before the others
MODES = ["batch", "tensor_parallel"]
MULTIPLY = torch.mm


def problem(dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=g), torch.randn(VOCAB, WIDTH, generator=g)
    labels = torch.randint(VOCAB, (TOKENS,), generator=g)
    labels[7] = -100
    return hidden.to(dtype), (weight / 3).to(dtype), torch.randn(VOCAB, generator=g).to(dtype), labels


def computed(bits, hidden, weight, labels, slopes, bias=None, entropy=True, **options):
    """Losses, entropies if asked for, and hits, then dx, dW and the bias's gradient, of the sum by `slopes`."""
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    of = LmHead(leaves[1], bias=leaves[2], bits=bits, **options)
    loss = head.CrossEntropy(labels, label_smoothing=0.1, z_loss=0.01)
    found = of.read(leaves[0], loss, *([head.Entropy()] if entropy else []), head.IsArgmax(labels))
    (sum(x for x in found if x.requires_grad) * slopes).sum().backward()
    return [x.detach() for x in found], [x.grad for x in leaves if x is not None]


def slopes_of(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(1)).to(wide)


def same(one, other):
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True] * len(one)


def assert_as_near(found, fast, truth, times, floor):
    """Each result and gradient is as near the truth as that of "fast" is, up to a factor and a part of the truth."""
    for ours, other, true in zip(found, fast, truth, strict=True):
        if ours.is_floating_point():
            assert torch.equal(ours.isnan(), true.isnan())
            away, fast_away = ((x.double() - true).nan_to_num(0.0).norm() for x in (ours, other))
            assert away <= times * fast_away + floor * true.nan_to_num(0.0, 0.0, 0.0).norm(), (away, fast_away)


@pytest.fixture(params=[1, *slow(2)])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bits", MODES)
def test_the_same_bits_for_other_tokens_chunks_and_caches(bits, dtype, threads, monkeypatch):
    monkeypatch.setattr(fixed_order, "COLUMNS", 64)  # of which a product takes no more: there are several blocks
    hidden, weight, bias, labels = problem(dtype)
    slopes = slopes_of(dtype)
    draws = torch.Generator().manual_seed(2)
    cuts, counts = [*itertools.product((0, 0.9, "bounded"), (None, 100))], (1, 2, 3, 64, 65, 301)
    if threads > 1:  # a product takes many times as long where other processes hold a core
        cuts, counts = [(0.9, 100)], (1, 65)
    for options in ({}, {"bias": bias, "softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}):
        given = (hidden, weight, labels, slopes)
        results, grads = computed(bits, *given, cache=1, **options)
        for cache, chunk in cuts:
            again = computed(bits, *given, cache=cache, chunk_tokens=chunk, **options)
            same(results + grads, again[0] + again[1])
        for count in counts:
            some = torch.randperm(TOKENS, generator=draws)[:count]
            others, (dx, *_) = computed(bits, hidden[some], weight, labels[some], slopes[some], **options)
            same([x[some] for x in (*results, grads[0])], [*others, dx])


@pytest.mark.parametrize(
    "dtype", [torch.float32, *slow(torch.float64, torch.float16, torch.bfloat16)], ids=["fp32", "fp64", "fp16", "bf16"]
)
@pytest.mark.parametrize("width", [5, *slow(1, 3, 7, 9, 17, 33, 65)])
def test_products_whose_rows_a_library_adds_in_other_orders(width, dtype):
    """A library may give equal rows different bits where a product's columns are few or fill no register."""
    draws = torch.Generator().manual_seed(width)
    for columns, bits in itertools.product((3, 40, 203), MODES):
        hidden, weight = (torch.randn(n, width, generator=draws, dtype=torch.float64).to(dtype) for n in (140, columns))
        labels, slopes = torch.randint(columns, (140,), generator=draws), slopes_of(dtype)[:140]
        results, (dx, dw) = computed(bits, hidden, weight, labels, slopes)
        same([dw], computed(bits, hidden, weight, labels, slopes, chunk_tokens=20, cache=0)[1][1:])
        for count in (1, 3, 65):
            some = torch.randperm(140, generator=draws)[:count]
            others, (part, _) = computed(bits, hidden[some], weight, labels[some], slopes[some])
            same([x[some] for x in (*results, dx)], [*others, part])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("inner, columns", [(13, 43), (3, 5), *slow((7, 36), (40, 11))])
def test_a_rows_place_does_not_change_its_product(inner, columns, dtype):
    """A library that adds in another order in every second row shows it in one number of several hundred."""
    draws = torch.Generator().manual_seed(1)
    rows, matrix = (torch.randn(*shape, generator=draws).to(dtype) for shape in ((1920, inner), (inner, columns)))
    for b in (matrix, matrix.t().contiguous().t()):
        whole = fixed_order.mm(rows, b)
        for shift in (1, 6, 100):
            same([whole.roll(shift, 0)], [fixed_order.mm(rows.roll(shift, 0), b)])
        same([whole[:70]], [fixed_order.mm(rows[:70], b)])


def test_what_fast_gives_does_depend_on_other_tokens():
    """One token alone has another entropy in fp32, so the problem is large enough for these tests."""
    hidden, weight, _, labels = problem(torch.float32)
    results, _ = computed("fast", hidden, weight, labels, slopes_of(torch.float32))
    alone = [computed("fast", hidden[i : i + 1], weight, labels[i : i + 1], torch.ones(1))[0][1] for i in range(50)]
    assert not torch.equal(torch.cat(alone), results[1][:50])


def shard_of(x, width):
    """This rank's rows of `x`, padded with ones that must not count."""
    rank = dist.get_rank()
    mine = x[rank * width : (rank + 1) * width]
    return torch.cat([mine, mine.new_ones(width - len(mine), *mine.shape[1:])])


@pytest.mark.parametrize("bits", MODES)
def test_tokens_that_are_left_out_no_tokens_and_main_grad(bits):
    hidden, weight, _, labels = problem(torch.float32)
    whole = linear_cross_entropy(hidden, weight, labels, bits=bits)
    same([whole], [linear_cross_entropy(hidden, weight, labels, bits=bits, skip_ignored=True)])
    assert linear_cross_entropy(hidden[:0], weight, labels[:0], bits=bits).shape == (0,)
    plain, fused = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    fused.main_grad, fused.grad_added_to_main_grad = torch.zeros(VOCAB, WIDTH), False
    for w, fusion in ((plain, False), (fused, True)):
        loss = linear_cross_entropy(hidden, w, labels, bits=bits, gradient_accumulation_fusion=fusion)
        loss.sum().backward(retain_graph=True)
    same([plain.grad], [fused.main_grad])
    loss.sum().backward()
    torch.testing.assert_close(fused.main_grad, 2 * plain.grad)


class OfOnesOwn(head.ReadOut):
    needs_logits = True


def test_what_cannot_be_had_is_refused():
    hidden, weight, _, labels = problem(torch.float32)
    with pytest.raises(ValueError, match="bits is 'exact': it must be one of"):
        LmHead(weight, bits="exact")
    with pytest.raises(ValueError, match="OfOnesOwn is read, which does not say that its sums have one order: set its"):
        LmHead(weight, bits="batch").read(hidden, OfOnesOwn())
    uneven = VocabShard(0, 100, VOCAB)
    with pytest.raises(ValueError, match="pad the vocabulary of 203 to 208.*make_vocab_size_divisible_by=8"):
        linear_cross_entropy(hidden, weight[:100], labels, vocab=uneven, bits="tensor_parallel")


def differs(a, b, **options):
    found = MULTIPLY(a, b, **options)
    found[-1] *= 1 + 1e-6
    return found


def test_heights_drop_products_that_do_not_keep_bits(monkeypatch):
    """A processor that adds the rows of a tile in different orders, and one that does so in taller products alone."""
    heights = fixed_order.heights.__wrapped__
    assert heights(torch.float32, 1, True) == (512, 128, 64)
    monkeypatch.setattr(torch, "mm", lambda a, b, **of: (differs if len(a) > 64 else MULTIPLY)(a, b, **of))
    assert heights(torch.float32, 1, True) == (64,)
    monkeypatch.setattr(torch, "mm", differs)
    assert heights(torch.float32, 1, True) == ()


def test_layers_refuse_products_that_do_not_keep_bits(monkeypatch):
    monkeypatch.setattr(torch, "mm", differs)
    monkeypatch.setattr(fixed_order, "heights", fixed_order.heights.__wrapped__)
    with pytest.raises(ValueError, match="a row of a torch.float64 product with .* depends on its place"):
        fixed_order.mm(torch.ones(3, 4).double(), torch.ones(4, 5).double())


@ranks(2, 4)
@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_every_rank_learns_of_a_processor_without_fixed_bits(layout, bits):
    """One rank knows before anything is exchanged, and the exchange tells the others: of functions, of products."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    hidden, labels, weight = torch.randn(8, 6), torch.arange(8), torch.randn(24, 6).chunk(size)[rank]
    exp = torch.exp

    def other_exp(x):
        found = exp(x)
        return found if x.dim() == 0 else torch.cat([found[:-1], found[-1:] * (1 + 1e-6)])

    part = hidden if layout == "replicated" else hidden.chunk(size)[rank]
    for name, other, own in (("exp", other_exp, "exp depends"), ("mm", differs, "a row of a torch.float32 product")):
        said = f"bits: {own}" if rank == 0 else "another rank of tp_group refused"
        cached = fixed_order.functions_fault, fixed_order.heights
        for each in cached:
            each.cache_clear()
        try:
            with (
                mock.patch.object(torch, name, other if rank == 0 else getattr(torch, name)),
                pytest.raises(ValueError, match=said),
            ):
                linear_log_probs(part, weight, labels, group, layout, bits=bits)
        finally:
            for each in cached:
                each.cache_clear()
    linear_log_probs(part, weight, labels, group, layout, bits=bits)


@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("logits", [False, True], ids=["softmax", "logits"])
def test_gradients_ignore_tokens_behind_that_do_not_count(bits, logits):
    """dW, the bias's gradient and dx, with terms of all columns: label smoothing, a mean logit, a softcap."""
    hidden, weight, bias, given = problem(torch.float32)
    slopes, more = slopes_of(torch.float32), [head.SumOfSquares()] if logits else []

    def gradients(counted, count, softcap):
        labels = given.where(torch.arange(TOKENS) < counted, -100)
        leaves = [x.detach().clone().requires_grad_() for x in (hidden[:count], weight, bias)]
        of = LmHead(leaves[1], bias=leaves[2], softcap=softcap, bits=bits)
        loss = head.CrossEntropy(labels[:count], label_smoothing=0.1, z_loss=0.01)
        each = of.read(leaves[0], loss, head.MeanLogit(), *more)
        counts = labels[:count] != -100
        (sum(x.where(counts, 0.0) for x in each) * slopes[:count]).sum().backward()
        return [leaves[0].grad[:counted], leaves[1].grad, leaves[2].grad]

    for softcap, counted in itertools.product((None, 3.0), (5, 180)):
        wanted = gradients(counted, counted, softcap)
        for count in (counted + 7, 256, TOKENS):
            same(wanted, gradients(counted, count, softcap))


@ranks(2, 4)
@pytest.mark.parametrize("others", ["fast", "batch"])
def test_ranks_that_pass_different_bits_are_all_told(others):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    hidden, labels, weight = torch.randn(5, 40), torch.arange(5), torch.randn(208 // size, 40)
    bits = "tensor_parallel" if rank == size - 1 else others
    with pytest.raises(ValueError, match="options are not the same on every rank of tp_group"):
        linear_log_probs(hidden, weight, labels, group, bits=bits)


@ranks(2, 4)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_rank_that_refuses_is_told_of_on_every_rank(softcap):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    hidden, labels = torch.randn(5, 6), torch.arange(5)
    per_rank = 24 // size
    wide = torch.randn(16 // size, 6 + (rank == 0))
    with pytest.raises(ValueError, match="weight has shape" if rank == 0 else "another rank of tp_group refused"):
        linear_log_probs(hidden, wide, labels, group, softcap=softcap, bits="tensor_parallel")
    shard = VocabShard(per_rank * rank, min(per_rank * (rank + 1), 23), 23)
    narrow = torch.randn(shard.stop - shard.start, 6)
    last = rank == size - 1
    with pytest.raises(
        ValueError, match="pad the vocabulary of 23 to 24" if last else "another rank of tp_group refused"
    ):
        linear_log_probs(hidden, narrow, labels, group, vocab=shard, softcap=softcap, bits="tensor_parallel")


@pytest.mark.parametrize("tokens", [0, 1, 256, 300])
def test_column_sums_of_any_number_of_tokens(tokens):
    """A sequence-parallel rank may have no token."""
    g, factor, total = torch.randn(tokens, 5), torch.randn(tokens), torch.ones(5)
    fixed_order.add_column_sums(total, g, factor)
    torch.testing.assert_close(total, 1 + (factor[:, None] * g).sum(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("bits", MODES)
def test_a_bias_gradient_has_one_order_in_blocks_of_any_width(bits, dtype):
    """The last column of a leaf of 513 is a block of its own, or one of many: a library adds it in another order."""
    draws, columns = torch.Generator().manual_seed(0), 513 if bits == "batch" else 8 * 513
    hidden, weight, bias = (
        torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype)
        for shape in ((130, 5), (columns, 5), (columns,))
    )
    labels, slopes = torch.randint(columns, (130,), generator=draws), slopes_of(dtype)[:130]
    wanted = computed(bits, hidden, weight, labels, slopes, bias)[1]
    for options in ({"chunk_tokens": 20}, {"cache": 0, "chunk_tokens": 64}):
        same(wanted, computed(bits, hidden, weight, labels, slopes, bias, **options)[1])


def test_sums_of_leaves_are_those_of_their_branches():
    """Two ranks add four leaves each, and then their sums: in fp64, whose order results in fp32 seldom show."""
    leaves = torch.randn(8, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = ResolvedHead(None, VocabShard(0, 8, 8), bits="tensor_parallel")
    whole = statistics.added(leaves, call)
    same([whole], [statistics.added(torch.stack([statistics.added(four, call) for four in leaves.chunk(2)]), call)])
    assert not torch.equal(whole, leaves.sum(0)), "a sum in another order must show here"
