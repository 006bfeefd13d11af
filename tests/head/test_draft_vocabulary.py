"""A draft head over a part of the target's vocabulary: EAGLE-3's maps. Its loss over shards: `tests.fuzz.heads`."""

import re

import pytest
import torch

from megatron_ext.head import DraftVocabulary

V = 29
KEPT = [0, 3, 4, 9, 10, 11, 12, 20, 27]


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
