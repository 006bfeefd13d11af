"""Packed batches of context-parallel ranks, against what a loop over documents and tokens makes of them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.sequence.cp_utils import _shard_thd_chunk_for_te, make_cp_batch_for_te
from tests.marks import slow
from tests.sequence.batches import SENTINEL, expected_line, packed_batch

PER_TOKEN = ("input_ids", "labels", "position_ids", "padding_mask")


def mesh(ranks, rank):
    """Context-parallel mesh for functions that communicate nothing."""
    return SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)


@st.composite
def packs(draw, multiple):
    """Rows of documents that take as many places in each row."""
    documents = st.integers(0, 3).flatmap(
        lambda k: st.tuples(st.integers(0, multiple * k), st.just(multiple * k)),
    )
    rows = draw(st.lists(st.lists(documents, min_size=1, max_size=4), min_size=1, max_size=4))
    places = max(1, *(sum(p for _, p in row) for row in rows), multiple)
    filled = []
    for row in rows:
        rest = places - sum(p for _, p in row)
        filled.append(row + ([(draw(st.integers(0, rest)), rest)] if rest else []))
    return filled


@pytest.mark.parametrize("size", [2, *slow(1, 4)])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_each_rank_gets_its_chunks_of_every_document(size, data):
    rows = data.draw(packs(2 * size))
    batch = packed_batch(rows)
    flat = [document for row in rows for document in row]
    for rank in range(size):
        part = make_cp_batch_for_te(mesh(size, rank), batch)
        for name, expected in zip(PER_TOKEN, expected_line(rows, size, rank), strict=True):
            torch.testing.assert_close(part[name], expected, rtol=0, atol=0)
        assert part["cu_seqlens"].tolist() == [0, *torch.tensor([n for n, _ in flat]).cumsum(0).tolist()]
        assert part["cu_seqlens_padded"].tolist() == [0, *torch.tensor([p for _, p in flat]).cumsum(0).tolist()]
        assert part["max_seqlen"].tolist() == max(p for _, p in flat)
        assert part["cu_seqlens"].dtype == part["cu_seqlens_padded"].dtype == part["max_seqlen"].dtype == torch.int32
        assert part["qkv_format"] == "thd"


@pytest.mark.parametrize("size", [1, 2])
def test_chunks_are_lines_of_their_own(size):
    rows = [[(4, 4), (3, 8), (4, 4)], [(16, 16)], [(0, 8), (5, 8)], [(1, 4), (11, 12)]]
    batch = packed_batch(rows)
    part = make_cp_batch_for_te(mesh(size, size - 1), batch, num_chunks=2)
    for i in (0, 1):
        chunk = {name: x[2 * i : 2 * i + 2] for name, x in batch.items()}
        expected = make_cp_batch_for_te(mesh(size, size - 1), chunk)
        for name, x in expected.items():
            if name == "qkv_format":
                assert part[name] == x
            else:
                torch.testing.assert_close(part[name][i][: len(x)] if x.dim() else part[name][i], x)
    assert part["input_ids"].shape == (2, 32 // size)
    # The second chunk has as many documents as the first; a third with fewer shows the sentinel.
    fewer = make_cp_batch_for_te(
        None, packed_batch([[(4, 4), (4, 4)], [(8, 8)]], sentinel=-7), num_chunks=2, seq_lens_padding_value=-7
    )
    assert fewer["cu_seqlens"].tolist() == [[0, 4, 8], [0, 8, -7]]
    assert fewer["cu_seqlens_padded"].tolist() == [[0, 4, 8], [0, 8, -7]]
    assert fewer["max_seqlen"].tolist() == [4, 8]


def test_a_token_that_is_the_padding_token_counts_as_padding():
    batch = packed_batch([[(3, 4)]])
    assert make_cp_batch_for_te(None, batch)["padding_mask"].tolist() == [False, False, False, True]
    assert make_cp_batch_for_te(None, batch, padding_token_id=2)["padding_mask"].tolist() == [False, True, False, True]


def test_given_positions_are_kept_and_the_batch_is_not_touched():
    batch = packed_batch([[(8, 8)], [(4, 4), (4, 4)]])
    batch["position_ids"] = torch.arange(100, 108)[None]
    before = {name: x.clone() for name, x in batch.items()}
    part = make_cp_batch_for_te(mesh(2, 1), batch)
    assert part["position_ids"].tolist() == [102, 103, 104, 105, 101, 102, 105, 106]
    for name, x in before.items():
        torch.testing.assert_close(batch[name], x, rtol=0, atol=0)


def test_embeddings_travel_with_their_gradient():
    rows = [[(6, 8), (8, 8)], [(12, 16)]]
    batch = packed_batch(rows)
    ids = batch["input_ids"]
    embeddings = torch.randn(2, 16, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(16, 3, dtype=torch.float64)
    part = make_cp_batch_for_te(mesh(2, 0), batch | {"input_ids": embeddings})
    places = make_cp_batch_for_te(mesh(2, 0), batch | {"input_ids": torch.arange(32).view(ids.shape)})["input_ids"]
    torch.testing.assert_close(part["input_ids"], embeddings.detach().flatten(0, 1)[places], rtol=0, atol=0)
    assert part["padding_mask"].tolist() == expected_line(rows, 2, 0)[3].tolist()
    (part["input_ids"] * weights).sum().backward()
    expected = torch.zeros(32, 3, dtype=torch.float64).index_add(0, places, weights)
    torch.testing.assert_close(embeddings.grad.flatten(0, 1), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_lens": torch.tensor([[5, 4]])}, "must not outnumber the places"),
        ({"seq_lens": torch.tensor([[-1, 4]])}, "must not outnumber the places"),
        ({"seq_lens": torch.tensor([[4, SENTINEL]])}, "just where seq_lens_padded"),
        ({"seq_lens_padded": torch.tensor([[4, 8]])}, "take all of its 8 places"),
        ({"seq_lens": torch.tensor([[2, 4]]), "seq_lens_padded": torch.tensor([[2, 6]])}, "divide by 4"),
        ({"seq_lens": torch.tensor([4, 4])}, r"have shapes \[2\] and \[1, 2\]"),
        ({"labels": torch.zeros(1, 7)}, r"labels has shape \[1, 7\]"),
        ({"position_ids": torch.zeros(1, 7)}, r"position_ids has shape \[1, 7\]"),
        ({"input_ids": torch.zeros(8)}, r"input_ids has shape \[8\]"),
    ],
    ids=str,
)
def test_batches_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_cp_batch_for_te(mesh(2, 0), packed_batch([[(4, 4), (4, 4)]]) | change)


def test_other_arguments_that_do_not_fit_are_refused():
    batch = packed_batch([[(4, 4)], [(4, 4)]])
    with pytest.raises(ValueError, match="qkv_format is 'bshd'"):
        make_cp_batch_for_te(None, batch, qkv_format="bshd")
    for chunks in (0, 3):
        with pytest.raises(ValueError, match=f"num_chunks is {chunks}: .* divide the batch of 2 rows"):
            make_cp_batch_for_te(None, batch, num_chunks=chunks)
    for name in ("seq_lens", "seq_lens_padded", "labels", "input_ids"):
        with pytest.raises(KeyError, match=f"has no {name}"):
            make_cp_batch_for_te(None, {key: x for key, x in batch.items() if key != name})


def test_a_line_made_elsewhere_is_sharded():
    line = {
        "input_ids": torch.tensor([5, 6, 0, 7, 8, 9, 4, 0]),
        "labels": torch.arange(8),
        "position_ids": torch.arange(8),
        "cu_seqlens": torch.tensor([0, 4, 8, SENTINEL, SENTINEL]),
    }
    part = _shard_thd_chunk_for_te(line, mesh(2, 1), "thd", SENTINEL, 0)
    assert part["labels"].tolist() == [1, 2, 5, 6]
    assert part["padding_mask"].tolist() == [False, True, False, False]
    assert part["cu_seqlens"].tolist() == part["cu_seqlens_padded"].tolist() == [0, 4, 8, SENTINEL, SENTINEL]
    assert part["max_seqlen"].tolist() == 4
    with pytest.raises(ValueError, match="no cu_seqlens: it has rows"):
        _shard_thd_chunk_for_te({"input_ids": torch.zeros(1, 8)}, mesh(2, 1), "thd", SENTINEL, 0)
