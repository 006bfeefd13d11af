"""Log-probabilities and entropy among the ids that a generator kept: values, gradients, costs, faults."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head import Kept, KeptEntropy, LmHead, Logits, linear_sampled_log_probs, sampled_log_probs
from tests.fuzz import heads
from tests.head.test_read import check_read
from tests.marks import slow
from tests.ranks import ranks


@pytest.mark.parametrize("cases", [8, *slow(24)])
@ranks(1, 2, 4)
def test_alone_only_the_kept_columns_are_computed(cases):
    """Random cases agree with fp64 over the whole vocabulary, with softcap, bias, slices and left out tokens."""
    for number in range(cases):
        for names in (["kept"], ["kept entropy", "kept"]):
            for kind in (heads.read, heads.read_logits):
                check_read(kind, number, names)


@pytest.mark.parametrize(
    "tokens, multiplied",
    [(512, 1 / 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1024, 1 / 2), (1032, 1)])],
)
def test_flops(tokens, multiplied):
    """64 of 128k ids at each token, all different: 6 FLOPs a logit of their union while that is at most half of all;
    beyond it of all columns, which is no more than the whole read-out takes."""
    width, vocabulary, kept = 4, 1 << 17, 64
    ids, offsets = torch.randperm(vocabulary)[: tokens * kept], torch.arange(tokens + 1) * kept
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    with measure() as found:
        LmHead(weight).read(hidden, Kept(ids[offsets[:-1]], offsets, ids)).sum().backward()
    few, columns = hidden[:3].detach().requires_grad_(), weight[:256].detach().requires_grad_()
    with measure() as whole:
        linear_sampled_log_probs(few, columns, torch.zeros(3).long(), top_k=kept).sum().backward()
    assert found.flops == 6 * tokens * width * vocabulary * multiplied
    limit = 0.4 if multiplied < 0.4 else 1
    assert found.flops <= limit * (whole.flops // (3 * 256)) * tokens * vocabulary


@ranks(1, 2)
def test_functions_and_weight_gradients_into_main_grad():
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    labels, offsets, ids = torch.tensor([3, 7, -100, 0]), torch.tensor([0, 2, 4, 4, 5]), torch.tensor([5, 3, 7, 1, 0])
    hidden, whole = (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double() for n in (4, 16))
    leaf, leaf_weight = hidden.clone().requires_grad_(), whole.clone().requires_grad_()
    kept = torch.zeros(4, 16, dtype=torch.bool)
    kept[[0, 0, 1, 1, 3], [5, 3, 7, 1, 0]] = True
    kept[2] = True
    z = leaf @ leaf_weight.t() / 0.7
    expected = z.masked_fill(~kept, -torch.inf).log_softmax(-1)[range(4), labels.clamp(min=0)].where(labels >= 0, 0.0)
    dx, dw = torch.autograd.grad(expected @ torch.arange(4.0).double(), (leaf, leaf_weight))

    mine = slice(16 // world * rank, 16 // world * (rank + 1))
    weight = whole[mine].clone().requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    x = hidden.clone().requires_grad_()
    options = {"temperature": 0.7, "tp_group": group, "kept": (offsets, ids.int())}
    with count_collectives() as sent:
        found = linear_sampled_log_probs(x, weight, labels, gradient_accumulation_fusion=True, **options)
        (found @ torch.arange(4.0).double()).backward()
    assert sent.total() == (2 if world > 1 else 0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(weight.main_grad, 1 + dw[mine])
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(sampled_log_probs((hidden @ whole.t())[:, mine], labels, **options), expected)


@ranks(2)
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"labels": torch.tensor([3, 5])}, "labels holds one that is not among the kept ids"),
        ({"offsets": torch.tensor([0, 9, 4])}, "offsets do not cut 4 ids into rows"),
        ({"ids": torch.tensor([3, 1, 7, 16])}, r"ids holds \[16\], outside \[0, 16\)"),
        ({"ids": torch.tensor([3, 3, 7, 6])}, "ids holds one twice"),
    ],
)
def test_what_one_rank_alone_was_given_wrong(wrong, said, from_logits):
    given = {"labels": torch.tensor([3, 7]), "offsets": torch.tensor([0, 2, 4]), "ids": torch.tensor([3, 1, 7, 6])}
    if dist.get_rank():
        given |= wrong
    for read_out in (Kept, KeptEntropy):
        with pytest.raises(ValueError, match=said if dist.get_rank() else "another rank of tp_group refused"):
            _read(read_out(**given), from_logits)


@ranks(2)
@pytest.mark.parametrize("read_out", [Kept, KeptEntropy])
def test_ranks_with_other_masks_are_refused(read_out):
    ids = torch.tensor([3, 1, 7, 4 + dist.get_rank()])
    with pytest.raises(ValueError, match="labels are not the same on every rank"):
        _read(read_out(torch.tensor([3, 7]), torch.tensor([0, 2, 4]), ids), False)


def test_bad_input():
    labels, offsets, ids = torch.tensor([3, 7]), torch.tensor([0, 2, 4]), torch.tensor([3, 1, 7, 6])
    for wrong, said in (
        ((labels, offsets[:2], ids), "offsets has 2 entries for 2 labels"),
        ((labels, offsets.float(), ids), "offsets is torch.float32"),
        ((labels, offsets, ids.tolist()), "ids is list"),
        ((labels, offsets, ids.view(2, 2)), r"ids is torch.int64 \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=said):
            LmHead(torch.randn(16, 3)).read(torch.randn(2, 3), Kept(*wrong))
    with pytest.raises(ValueError, match="filters off"):
        sampled_log_probs(torch.randn(2, 16), labels, top_k=5, kept=(offsets, ids))
    with pytest.raises(ValueError, match=r"must be \(offsets, ids\)"):
        sampled_log_probs(torch.randn(2, 16), labels, kept=ids)


def _read(read_out, from_logits):
    group, shard = dist.group.WORLD, VocabShard.equal(8, dist.group.WORLD)
    if from_logits:
        return Logits(torch.randn(2, 8), group, vocab=shard).read(read_out)
    return LmHead(torch.randn(8, 3), group, vocab=shard).read(torch.ones(2, 3), read_out)
