"""Batches of context-parallel ranks, against what a loop over documents and tokens makes of them."""

import contextlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.sequence.attention import CAUSAL, Packing, attend
from megatron_ext.sequence.cp_utils import (
    _build_position_ids,
    _shard_thd_chunk_for_te,
    create_context_parallel_ctx,
    get_train_context,
    make_cp_batch_and_ctx,
    make_cp_batch_for_te,
)
from megatron_ext.sequence.thd import partition_indices
from megatron_ext.sequence.zigzag import gather_zigzag, split_zigzag
from tests.ranks import ranks

SENTINEL = -1000
PER_TOKEN = ("input_ids", "labels", "position_ids", "padding_mask")


class Mesh:
    """What the functions that communicate nothing ask of a context-parallel mesh."""

    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank

    def size(self):
        return self._ranks

    def get_local_rank(self):
        return self._rank


def cp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def packed_batch(rows, sentinel=SENTINEL):
    """From rows of documents (tokens, places); tokens from 1 up, 0 on padding, labels 1000 higher."""
    most = max(len(row) for row in rows)
    batch = {name: [] for name in ("input_ids", "seq_lens", "seq_lens_padded")}
    token = 1
    for row in rows:
        ids = []
        for n, places in row:
            ids += [*range(token, token + n)] + [0] * (places - n)
            token += n
        filler = [sentinel] * (most - len(row))
        batch["input_ids"].append(ids)
        batch["seq_lens"].append([n for n, _ in row] + filler)
        batch["seq_lens_padded"].append([places for _, places in row] + filler)
    tensors = {name: torch.tensor(x) for name, x in batch.items()}
    return tensors | {"labels": tensors["input_ids"] + 1000}


def expected_line(rows, size, rank):
    """What `rank` gets of the documents: ids, labels, positions and padding, by a loop over its two chunks of each."""
    ids, positions, padding, token = [], [], [], 1
    for n, places in [document for row in rows for document in row]:
        chunk = places // (2 * size)
        for c in (rank, 2 * size - 1 - rank):
            for position in range(c * chunk, (c + 1) * chunk):
                ids.append(token + position if position < n else 0)
                positions.append(position)
                padding.append(position >= n)
        token += n
    ids = torch.tensor(ids, dtype=torch.int64)
    return ids, ids + 1000, torch.tensor(positions, dtype=torch.int64), torch.tensor(padding, dtype=torch.bool)


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


@pytest.mark.parametrize("size", [1, 2, 4])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_rank_gets_its_chunks_of_every_document(size, data):
    rows = data.draw(packs(2 * size))
    batch = packed_batch(rows)
    flat = [document for row in rows for document in row]
    for rank in range(size):
        part = make_cp_batch_for_te(Mesh(size, rank), batch)
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
    part = make_cp_batch_for_te(Mesh(size, size - 1), batch, num_chunks=2)
    for i in (0, 1):
        chunk = {name: x[2 * i : 2 * i + 2] for name, x in batch.items()}
        expected = make_cp_batch_for_te(Mesh(size, size - 1), chunk)
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
    part = make_cp_batch_for_te(Mesh(2, 1), batch)
    assert part["position_ids"].tolist() == [102, 103, 104, 105, 101, 102, 105, 106]
    for name, x in before.items():
        torch.testing.assert_close(batch[name], x, rtol=0, atol=0)


def test_embeddings_travel_with_their_gradient():
    rows = [[(6, 8), (8, 8)], [(12, 16)]]
    batch = packed_batch(rows)
    ids = batch["input_ids"]
    embeddings = torch.randn(2, 16, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(16, 3, dtype=torch.float64)
    part = make_cp_batch_for_te(Mesh(2, 0), batch | {"input_ids": embeddings})
    places = make_cp_batch_for_te(Mesh(2, 0), batch | {"input_ids": torch.arange(32).view(ids.shape)})["input_ids"]
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
        make_cp_batch_for_te(Mesh(2, 0), packed_batch([[(4, 4), (4, 4)]]) | change)


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
    part = _shard_thd_chunk_for_te(line, Mesh(2, 1), "thd", SENTINEL, 0)
    assert part["labels"].tolist() == [1, 2, 5, 6]
    assert part["padding_mask"].tolist() == [False, True, False, False]
    assert part["cu_seqlens"].tolist() == part["cu_seqlens_padded"].tolist() == [0, 4, 8, SENTINEL, SENTINEL]
    assert part["max_seqlen"].tolist() == 4
    with pytest.raises(ValueError, match="no cu_seqlens: it is in rows"):
        _shard_thd_chunk_for_te({"input_ids": torch.zeros(1, 8)}, Mesh(2, 1), "thd", SENTINEL, 0)


@pytest.mark.gpu
def test_transformer_engine_partitions_where_it_is_installed(monkeypatch):
    calls = []
    engine = types.ModuleType("transformer_engine_torch")
    engine.thd_get_partitioned_indices = lambda *args: calls.append(args) or torch.zeros(4, dtype=torch.int32)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", engine)
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    partition_indices(cu_seqlens, 8, 2, 0)
    assert [args[1:] for args in calls] == [(8, 2, 0)]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", None)
    assert partition_indices(cu_seqlens, 8, 2, 0).tolist() == [0, 1, 6, 7]


def test_positions_are_made_only_where_there_are_none():
    batch = {"input_ids": torch.zeros(3, 5, dtype=torch.int64)}
    assert _build_position_ids(batch, "cpu") is batch
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    given = batch["position_ids"] = torch.zeros(3, 5)
    assert _build_position_ids(batch, "cpu")["position_ids"] is given


@ranks(1)
def test_without_context_parallelism_the_batch_is_the_batch():
    batch = {"input_ids": torch.zeros(1, 5), "attention_mask": torch.ones(1, 5)}
    for mesh in (None, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), cp_mesh()):
        context, found = make_cp_batch_and_ctx(mesh, batch)
        assert found is batch
        assert [*batch] == ["input_ids", "attention_mask"]
        assert isinstance(context, contextlib.nullcontext)
        with context, context():
            pass
    context, line = make_cp_batch_and_ctx(None, packed_batch([[(4, 4)], [(3, 4)]]), use_te=True, num_chunks=2)
    assert line["input_ids"].shape == (2, 4)
    with context, context():
        pass


@ranks(2, 4)
def test_inside_the_context_a_batch_is_this_ranks_part():
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    size, rank = dist.get_world_size(), dist.get_rank()
    tokens = torch.randint(9, (2, 8 * size + 1))
    # Views of the same memory, as recipes make them.
    given = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": torch.ones(2, 8 * size)}
    whole = {name: x.clone() for name, x in given.items()}
    loss_mask = torch.rand(2, 8 * size)
    whole_mask = loss_mask.clone()
    context, batch = make_cp_batch_and_ctx(mesh, given, loss_mask=loss_mask)
    assert [*batch] == ["input_ids", "labels", "position_ids"]
    positions = torch.arange(8 * size)[None]
    for name in ("input_ids", "labels"):
        torch.testing.assert_close(batch[name], whole[name], rtol=0, atol=0)
    with context():
        for x, expected in [
            (batch["input_ids"], whole["input_ids"]),
            (batch["labels"], whole["labels"]),
            (batch["position_ids"], positions),
            (loss_mask, whole_mask),
        ]:
            torch.testing.assert_close(x, split_zigzag(expected, size, rank, 1), rtol=0, atol=0)
        torch.testing.assert_close(gather_zigzag(batch["labels"], dist.group.WORLD, 1), whole["labels"])
    torch.testing.assert_close(batch["position_ids"], positions, rtol=0, atol=0)
    torch.testing.assert_close(tokens[:, 1:], whole["labels"], rtol=0, atol=0)
    assert batch["input_ids"].shape == (2, 8)

    part = make_cp_batch_and_ctx(mesh, packed_batch([[(5, 8), (8, 8)]]), use_te=True)[1]
    torch.testing.assert_close(part["input_ids"], expected_line([[(5, 8), (8, 8)]], size, rank)[0], rtol=0, atol=0)


@ranks(2)
def test_buffers_come_back_also_when_the_block_fails():
    x = torch.arange(16.0).view(8, 2)
    view, stays = x[:, 0], torch.arange(8)
    context = create_context_parallel_ctx(cp_mesh(), [x, view, x, stays], [0, 0, 0, 0], {stays}, "allgather")

    def block():
        with context:
            assert x.shape == (4, 2)
            assert view.shape == stays.shape == (4,)
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        block()
    torch.testing.assert_close(x, torch.arange(16.0).view(8, 2), rtol=0, atol=0)
    assert view.data_ptr() == x.data_ptr()
    assert view.stride() == (2,)
    assert stays.shape == (4,)


@ranks(2, 4)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_inside_the_context_sees_all_ranks(is_causal):
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    q = torch.randn(2, 4, 4 * size, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 4 * size, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn_like(q)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.3)
    expected = torch.autograd.grad(out, (q, k, v), weights)

    parts = [split_zigzag(x.detach(), size, rank, 2).requires_grad_() for x in (q, k, v)]
    own = split_zigzag(weights, size, rank, 2)

    def by_sdpa():
        return F.scaled_dot_product_attention(*parts, is_causal=is_causal, enable_gqa=True, scale=0.3)

    def by_hand():
        if not is_causal:
            return by_sdpa()
        found = attend(*(x.permute(2, 0, 1, 3) for x in parts), CAUSAL, cp_group=group, scale=0.3)
        return found.permute(1, 2, 0, 3)

    for call in (by_sdpa, by_hand):  # ours is left as it is
        with get_train_context(False, False, create_context_parallel_ctx(cp_mesh(), [], [], set())):
            with count_collectives() as forward:
                part = call()
            with count_collectives() as backward:
                grads = torch.autograd.grad(part, parts, own)
        assert sum(forward.values()) == sum(backward.values()) == 1
        torch.testing.assert_close(part, split_zigzag(out, size, rank, 2))
        for grad, whole in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, split_zigzag(whole, size, rank, 2))
    with count_collectives() as outside:
        by_sdpa()
    assert not outside


@ranks(2)
def test_what_the_context_cannot_do_is_refused_before_it_begins():
    mesh = cp_mesh()
    for buffers, dims, message in [
        ([torch.zeros(2, 10)], [1], "length 10.*multiple of 2 \\* 2 = 4; pad it to 12"),
        ([torch.zeros(8), torch.zeros(12)], [0, 0], r"\[8, 12\] tokens"),
        ([torch.zeros(8)], [0, 0], "1 buffers came with 2"),
        ([torch.zeros(8, requires_grad=True)], [0], "requires grad"),
    ]:
        with pytest.raises(ValueError, match=message):
            create_context_parallel_ctx(mesh, buffers, dims, set())
    with pytest.raises(ValueError, match="must be a subset"):
        create_context_parallel_ctx(mesh, [], [], {torch.zeros(8)})
    with pytest.raises(ValueError, match="cp_rotate_method is 'ring'"):
        create_context_parallel_ctx(mesh, [], [], set(), "ring")
    with pytest.raises(ValueError, match="length 6"):
        make_cp_batch_and_ctx(mesh, {"input_ids": torch.zeros(1, 6)})
    with pytest.raises(KeyError, match="has no input_ids"):
        make_cp_batch_and_ctx(mesh, {"labels": torch.zeros(1, 8)})
    for dtype in (torch.bool, torch.int64):
        left = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]).to(dtype)
        with pytest.raises(ValueError, match="only padding behind the tokens"):
            make_cp_batch_and_ctx(mesh, {"input_ids": torch.zeros(1, 8), "attention_mask": left})
        make_cp_batch_and_ctx(mesh, {"input_ids": torch.zeros(1, 8), "attention_mask": left.flip(1)})
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 1, 8, 8\]"):
        make_cp_batch_and_ctx(mesh, {"input_ids": torch.zeros(1, 8), "attention_mask": torch.ones(1, 1, 8, 8)})

    q = torch.zeros(1, 2, 4, 8)
    with create_context_parallel_ctx(mesh, [], [], set()), count_collectives() as counts:
        with pytest.raises(ValueError, match="with a mask"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match="as many tokens"):
            F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2])
        with pytest.raises(ValueError, match="enable_gqa"):
            F.scaled_dot_product_attention(q, q[:, :1], q[:, :1])
    assert not counts


@ranks(2)
def test_loss_parallel_is_entered_on_request():
    from torch.distributed.tensor import Shard, distribute_tensor

    logits = distribute_tensor(torch.randn(6, 8), cp_mesh(), [Shard(1)])
    labels = torch.arange(6)
    expected = F.cross_entropy(logits.full_tensor(), labels)
    with get_train_context(True, False):
        torch.testing.assert_close(F.cross_entropy(logits, labels).full_tensor(), expected)


class TinyLM(torch.nn.Module):
    """A language model of one attention layer that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(64, 8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)
        self.double()

    def forward(self, input_ids, position_ids, attention=None):
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0)  # [B, S, H, D] each
        if attention is None:
            out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
            out = out.transpose(1, 2)
        else:
            out = attention(q, k, v)
        return self.head(x + out.flatten(-2))


def losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def check_sum_over_ranks(model, loss, expected_loss, expected):
    """The ranks' losses and gradients add up to those of the whole."""
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected_loss.detach())
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad)


@ranks(2, 4)
def test_a_model_that_knows_nothing_of_ranks_trains_on_parts_of_rows():
    length = 4 * dist.get_world_size()
    tokens = torch.randint(11, (3, length + 1))
    model, whole = TinyLM(), TinyLM()
    expected_loss = losses(whole(tokens[:, :-1], torch.arange(length)[None]), tokens[:, 1:])
    expected = torch.autograd.grad(expected_loss, list(whole.parameters()))
    context, batch = make_cp_batch_and_ctx(cp_mesh(), {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    with context():
        loss = losses(model(batch["input_ids"], batch["position_ids"]), batch["labels"])
        check_sum_over_ranks(model, loss, expected_loss, expected)


@ranks(1, 2, 4)
def test_a_model_trains_on_parts_of_packed_documents():
    unit = 2 * dist.get_world_size()
    rows = [[(unit - 1, unit), (3, 2 * unit)], [(3 * unit, 3 * unit)]]
    batch = packed_batch(rows)
    batch["input_ids"] = batch["input_ids"] % 11
    batch["labels"] = torch.where(batch["labels"] == 1000, -100, batch["labels"] % 11)  # none for padding
    model, whole = TinyLM(), TinyLM()
    expected_loss, start = 0.0, 0
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    for n, places in [document for row in rows for document in row]:
        document = slice(start, start + n)
        expected_loss = expected_loss + losses(whole(ids[document][None], torch.arange(n)[None]), labels[document])
        start += places
    expected = torch.autograd.grad(expected_loss, list(whole.parameters()))

    part = make_cp_batch_for_te(cp_mesh(), batch)
    packing = Packing.of(part["cu_seqlens"], part["cu_seqlens_padded"])

    def attention(q, k, v):
        q, k, v = (x[:, None] for x in (q, k, v))  # [T, 1, H, D]
        return attend(q, k, v, CAUSAL, q_packing=packing, kv_packing=packing, cp_group=dist.group.WORLD)[:, 0]

    loss = losses(model(part["input_ids"], part["position_ids"], attention), part["labels"])
    check_sum_over_ranks(model, loss, expected_loss, expected)
