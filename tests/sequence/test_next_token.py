"""Next tokens, written out by hand: all labels of the package come from this one function."""

import pytest
import torch

from megatron_ext.sequence.next_token import next_tokens

X = -100


@pytest.mark.parametrize(
    "starts, padded, labels",
    [
        (None, None, [11, 12, 13, 14, 15, 16, 17, X]),
        ([0, 8], None, [11, 12, 13, 14, 15, 16, 17, X]),
        ([0, 3, 3, 4, 8], None, [11, 12, X, X, 15, 16, 17, X]),  # documents of 3, 0, 1 and 4 tokens
        ([0, 3, 6], None, [11, 12, X, 14, 15, X, X, X]),  # what follows the last document belongs to none
        ([0, 3, 5], [0, 4, 8], [11, 12, X, X, 15, X, X, X]),
        ([0, 0, 2], [0, 4, 8], [X, X, X, X, 15, X, X, X]),
        ([0], None, [X] * 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_next_tokens(starts, padded, labels, dtype):
    tokens = torch.arange(10, 18, dtype=dtype).expand(2, 8)
    given = [None if x is None else torch.tensor(x, dtype=dtype) for x in (starts, padded)]
    found = next_tokens(tokens, *given)
    assert found.dtype == torch.int64
    assert found.tolist() == [labels] * 2
    assert next_tokens(tokens, *given, ignore_index=-1).tolist() == [[-1 if x == X else x for x in labels]] * 2
