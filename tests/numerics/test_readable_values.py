"""Ids are looked at where they have values, and it is said whether all were seen within."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_ext.numerics.tensors import OutsideVocabulary, check_within


def test_ids_are_seen_within_where_they_have_values():
    assert check_within("labels", torch.tensor([0, 4]), 5)
    assert check_within("labels", torch.tensor([], dtype=torch.int64), 5)
    assert not check_within("labels", torch.tensor([0, -100]), 5, spared=-100)
    with FakeTensorMode():
        assert not check_within("labels", torch.zeros(2, dtype=torch.int64), 5)
    for ids in ([0, 5], [-1, 0]):
        with pytest.raises(OutsideVocabulary, match=r"labels holds \[-?\d\], outside \[0, 5\): .*; pad it"):
            check_within("labels", torch.tensor(ids), 5, fix="; pad it")
