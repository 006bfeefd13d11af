"""A draft head over a part of the target's vocabulary: EAGLE-3's maps, its loss and its teacher, over shards too."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, reference
from megatron_ext.head import (
    KL,
    CrossEntropy,
    DraftVocabulary,
    Entropy,
    Gather,
    IsArgmax,
    JensenShannon,
    LmHead,
    LogProbs,
    Teacher,
    TopK,
)
from tests.head.problems import error
from tests.ranks import ranks

T, D, V, WIDTH = 12, 6, 29, 5
KEPT = [0, 3, 4, 9, 10, 11, 12, 20, 27]  # with 4 ranks one has two of them and one has one


def drawn():
    g = torch.Generator().manual_seed(3)
    student, draft = torch.randn(T, D, generator=g).double(), torch.randn(len(KEPT), D, generator=g).double()
    target_hidden, target = torch.randn(T, WIDTH, generator=g).double(), torch.randn(V, WIDTH, generator=g).double()
    labels = torch.randint(0, V, (T,), generator=g)
    labels[:3] = torch.tensor([-100, 3, 5])
    return student, draft, target_hidden, target, labels


def vocabulary():
    ids = torch.tensor(KEPT)
    return DraftVocabulary(ids - torch.arange(len(ids)), V)


def test_both_buffers_of_a_checkpoint_say_the_same():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[KEPT] = True
    d2t = torch.tensor([0, 2, 2, 6, 6, 6, 6, 13, 19])
    for made in (DraftVocabulary(d2t, V), DraftVocabulary(d2t.int(), V), DraftVocabulary.of_mask(t2d)):
        assert made.ids.tolist() == KEPT
        assert (len(made), made.size) == (len(KEPT), V)


def test_labels_are_draft_ids_and_what_has_none_is_told_apart():
    labels, outside = vocabulary().labels(torch.tensor([[-100, 0, 1], [27, 28, 9]]))
    assert labels.tolist() == [[-100, 0, -100], [8, -100, 3]]
    assert outside.tolist() == [[False, False, True], [False, True, False]]
    other, outside = vocabulary().labels(torch.tensor([28, 9, 5]), ignore_index=28)
    assert other.tolist() == [28, 3, 28], "an ignore_index that is a token id"
    assert outside.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="ignore_index is 7, one of the 9 draft ids"):
        vocabulary().labels(torch.tensor([7, 9, 5]), ignore_index=7)


@ranks(1, 2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_eagles_losses_over_shards_of_the_target(layout):
    """Cross entropy of labels, and of the target's distribution over the draft's ids where its choice is among them;
    beside other read-outs, in one pass each. Values and gradients of the whole in fp64."""
    group, (student, draft, target_hidden, target, labels) = dist.group.WORLD, drawn()
    rank, count, found = dist.get_rank(), dist.get_world_size(), vocabulary()
    theirs = VocabShard.split(V, group)
    shard = found.shard(theirs)
    here = target[theirs.start : theirs.stop]

    def cut(x):
        return x.chunk(count)[rank] if layout == "sequence" else x

    hidden, weight = cut(student).clone().requires_grad_(), draft[shard.start : shard.stop].clone().requires_grad_()
    head = LmHead(weight, group, layout, vocab=shard)
    own = LmHead(here, group, layout, vocab=theirs)
    _, chosen = own.read(cut(target_hidden), TopK(1))
    kept = ~found.labels(chosen.squeeze(-1)).outside
    teacher = Teacher(LmHead(found.rows(here, theirs), group, layout, vocab=shard), cut(target_hidden))
    ids, outside = found.labels(labels)
    nll, hits, entropy = head.read(hidden, CrossEntropy(ids), IsArgmax(ids), Entropy(ids != -100))
    soft = head.read(hidden, KL(teacher, "cross entropy"))
    apart = head.read(hidden, JensenShannon(teacher, 0.3), Gather(torch.zeros(T, 1).long()))[0]
    loss = nll.sum() + 0.5 * (soft * kept).sum() + 0.3 * entropy.sum() + 0.2 * apart.sum()
    grads = torch.autograd.grad(loss, [hidden, weight])

    leaves = [x.clone().requires_grad_() for x in (student, draft)]
    z, full = reference.logits(*leaves), reference.logits(target_hidden, target)
    place = torch.tensor([KEPT.index(x) if x in KEPT else -100 for x in labels.tolist()])
    inside = place >= 0
    true_nll, true_soft = reference.cross_entropy(z, place), reference.soft_cross_entropy(z, full[:, KEPT])
    true_kept = torch.tensor([x in KEPT for x in full.argmax(-1).tolist()])
    true_entropy = reference.entropy(z).where(inside, 0.0)
    m = (0.7 * z.softmax(-1) + 0.3 * full[:, KEPT].softmax(-1)).log()
    true_apart = 0.7 * reference.kl_divergence(z, m) + 0.3 * reference.kl_divergence(full[:, KEPT], m)
    true = true_nll.sum() + 0.5 * (true_soft * true_kept).sum() + 0.3 * true_entropy.sum() + 0.2 * true_apart.sum()
    dx, dw = torch.autograd.grad(true, leaves)

    assert torch.equal(kept, true_kept)
    assert 0 < kept.sum() < T
    assert torch.equal(outside, (labels != -100) & ~inside)
    assert torch.equal(hits, (z.argmax(-1) == place) & inside)
    for got, wanted in ((nll, true_nll), (soft, true_soft), (entropy, true_entropy), (apart, true_apart)):
        assert error(got, wanted) < 1e-7  # fp32's logarithms of the weights of the mixture
    assert error(grads[0], cut(dx)) < 1e-7
    assert error(grads[1], dw[shard.start : shard.stop]) < 1e-7


def test_log_probs_of_ids_a_draft_model_proposed():
    student, draft, *_ = drawn()
    found = vocabulary()
    log_probs, ids = LmHead(draft).read(student, TopK(2))
    assert torch.equal(found.labels(found.ids[ids]).labels, ids)
    assert error(LmHead(draft).read(student, LogProbs(ids[:, 0])), log_probs[:, 0]) < 1e-12


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: DraftVocabulary(torch.tensor(KEPT), V), "they must rise and lie in"),
        (lambda: DraftVocabulary(torch.tensor([3, 1]), V), "they must rise and lie in"),
        (lambda: DraftVocabulary(torch.ones(3), V), "d2t is torch.float32 (3,): it must be integers [D]"),
        (lambda: DraftVocabulary(torch.ones(0).long(), V), "it must be integers [D]"),
        (lambda: DraftVocabulary.of_mask(torch.ones(3)), "t2d is torch.float32 (3,): it must be bool [V]"),
        (
            lambda: DraftVocabulary.of_mask(torch.zeros(3).bool()),
            "t2d is false for all 3 ids: some must have a",
        ),
        (lambda: vocabulary().labels(torch.tensor([V])), "labels holds [29], outside"),
        (lambda: vocabulary().rows(torch.ones(V - 1, 2)), "weight has 28 rows, the target's shard 29 columns"),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()
