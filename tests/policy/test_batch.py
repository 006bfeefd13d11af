"""Batches: rows are cut, joined and put together without losing or parting any."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.policy import BatchedDataDict
from megatron_ext.policy.data.batch import fixed, packed, within_tokens
from tests.policy.problems import tiny_batch

LENGTHS = st.lists(st.integers(1, 20), min_size=2, max_size=24).filter(lambda lengths: len(lengths) % 2 == 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LENGTHS, st.integers(40, 90), st.sampled_from([1, 2]))
def test_every_row_comes_once_and_within_the_budget(lengths, tokens, unit):
    for found, size in (
        (within_tokens(lengths, tokens, unit), lambda rows: max(lengths[i] for i in rows) * len(rows)),
        (packed(lengths, tokens, unit), lambda rows: sum(lengths[i] for i in rows)),
        (fixed(len(lengths), unit * 2, unit), lambda rows: 0),
    ):
        assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
        assert all(size(rows) <= tokens for rows in found)
        # Rows of a unit follow each other.
        assert all(rows[i + 1] == rows[i] + 1 for rows in found for i in range(0, len(rows), unit) if unit == 2)
        assert all(rows[i] % unit == 0 for rows in found for i in range(0, len(rows), unit))


def test_packing_fills_the_bins():
    assert packed([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert within_tokens([2, 5, 5, 1], 10) == [[1, 2], [0, 3]]
    assert fixed(5, 2) == [[0, 1], [2, 3], [4]]


def test_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"rows \[1\] take 11 tokens, a micro-batch holds 10"):
        packed([3, 11], 10)
    with pytest.raises(ValueError, match="a micro-batch holds 10"):
        within_tokens([6, 2], 10, unit=2)
    with pytest.raises(ValueError, match="multiple of 2"):
        packed([3, 3, 3], 10, unit=2)
    for rows, size in ((4, 3), (3, 2)):
        with pytest.raises(ValueError, match=f"is {size} for {rows} rows: both must be a positive multiple of 2"):
            fixed(rows, size, unit=2)


def test_shards_keep_global_batches_together():
    data = BatchedDataDict(x=torch.arange(8), name=list("abcdefgh"))
    shards = data.shard_by_batch_size(2, batch_size=4)
    assert [part["x"].tolist() for part in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shards[1]["name"] == list("cdgh")
    assert shards[1].get_batch(1, 2)["x"].tolist() == [6, 7]
    for rows, batch_size in ((8, 3), (8, 6)):
        with pytest.raises(ValueError, match="must be a multiple"):
            data.slice(0, rows).shard_by_batch_size(4, batch_size)


def test_batches_are_joined_and_padded():
    parts = [
        BatchedDataDict(x=torch.ones(1, 2), y=torch.ones(1), names=["a"]),
        BatchedDataDict(x=torch.ones(2, 3), y=torch.ones(2), names=["b", "c"]),
    ]
    whole = BatchedDataDict.from_batches(parts, {"x": -1})
    assert whole["x"].tolist() == [[1, 1, -1], [1, 1, 1], [1, 1, 1]]
    assert whole["names"] == ["a", "b", "c"]
    assert whole.size == 3
    with pytest.raises(ValueError, match="must have as many"):
        BatchedDataDict(x=torch.ones(2), y=torch.ones(3)).size  # noqa: B018


def test_masks_of_rows_and_batches_with_other_keys_are_refused():
    data = BatchedDataDict(x=torch.arange(3), y=["a", "b", "c"])
    for mask in ([True, False, True], torch.tensor([True, False, True]), torch.ones(2)):
        with pytest.raises(ValueError, match=r"indices are torch.(bool|float32): they must be numbers of rows"):
            data.select_indices(mask)
    assert data.select_indices([]).size == 0
    with pytest.raises(ValueError, match="batches differ in the keys y: every one must have all"):
        BatchedDataDict.from_batches([{"x": torch.arange(3)}, data])


def test_micro_batch_iterators():
    data = tiny_batch()
    assert [part.size for part in data.make_microbatch_iterator(3)] == [3, 3, 2]
    for parts, count in (
        (data.make_microbatch_iterator_with_dynamic_shapes(30), data.get_microbatch_iterator_dynamic_shapes_len(30)),
        (
            data.make_microbatch_iterator_for_packable_sequences(30),
            data.get_microbatch_iterator_for_packable_sequences_len(30)[0],
        ),
    ):
        parts = list(parts)
        assert len(parts) == count
        assert sorted(n for part in parts for n in part["input_lengths"].tolist()) == sorted(
            data["input_lengths"].tolist()
        )
    assert data.get_microbatch_iterator_for_packable_sequences_len(30)[1] == 13
    short = next(iter(data.select_indices([3]).make_microbatch_iterator_with_dynamic_shapes(30)))
    assert short["input_ids"].shape[1] == data["input_lengths"][3]
    assert short["advantages"].shape == short["input_ids"].shape
