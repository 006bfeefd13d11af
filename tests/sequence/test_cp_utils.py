"""Context-parallel batches: what a rank gets inside the context, and that models train on it as on the whole."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.sequence.attention import CAUSAL, Packing, Window, attend
from megatron_ext.sequence.cp_utils import (
    _build_position_ids,
    create_context_parallel_ctx,
    get_train_context,
    make_cp_batch_and_ctx,
    make_cp_batch_for_te,
)
from megatron_ext.sequence.zigzag import gather_zigzag, split_zigzag
from tests.ranks import ranks
from tests.sequence.batches import TinyLM, check_sum_over_ranks, cp_mesh, expected_line, losses, packed_batch


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
        with context, context():
            assert not torch.overrides._len_torch_function_stack(), "attention stays as it is"
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
def test_attend_is_the_same_inside_the_context():
    """Options go through the mode that replaces PyTorch's attention."""
    group = dist.group.WORLD
    q, k, v = (torch.randn(8, 1, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    packing = Packing((3, 10), (4, 12))
    plain = attend(q, k, v, CAUSAL, cp_group=group)
    for options in (
        {"scale": 0.3},
        {"mask": (torch.arange(16) == 2).view(1, 1, 1, 16)},
        {"q_packing": packing, "kv_packing": packing},
        {"dropout": 0.5},
        {"softcap": 0.2},
        {"sinks": torch.arange(4, dtype=torch.float64)},
        {"window": Window(3, 0)},
    ):
        arguments = {"window": CAUSAL, "cp_group": group, **options}
        torch.manual_seed(1)
        outside = attend(q, k, v, **arguments)
        assert not torch.equal(outside, plain), options
        with get_train_context(False, False, create_context_parallel_ctx(cp_mesh(), [], [], set())):
            torch.manual_seed(1)
            inside = attend(q, k, v, **arguments)
        assert torch.equal(inside, outside), options


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
    with pytest.raises(ValueError, match="loss_mask came with use_te=True"):
        make_cp_batch_and_ctx(mesh, packed_batch([[(4, 4)]]), torch.ones(1, 4), use_te=True)
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
def test_attention_of_missing_keys_or_padding_is_refused():
    """Functions that hide their call of SDPA are refused, and SDPA that is not causal where a mask hides padding."""
    mesh, x = cp_mesh(), torch.randn(2, 4, 8)
    hidden = [
        lambda: torch.nn.MultiheadAttention(8, 2)(x, x, x, need_weights=False),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16).eval()(x),
        lambda: torch.ops.aten.scaled_dot_product_attention.default(x, x, x),
    ]
    with create_context_parallel_ctx(mesh, [], [], set()), count_collectives() as counts:
        for call in hidden:
            with pytest.raises(ValueError, match="attention.* over context-parallel ranks"):
                call()
    assert not counts
    q = x[:, None]
    for padded in (True, False):
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[1, 5:] = not padded
        context, _ = make_cp_batch_and_ctx(mesh, {"input_ids": torch.zeros(2, 8), "attention_mask": mask})
        with context:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            with pytest.raises(ValueError, match="hides padding") if padded else nullcontext():
                F.scaled_dot_product_attention(q, q, q)


@ranks(2)
def test_loss_parallel_is_entered_on_request():
    from torch.distributed.tensor import Shard, distribute_tensor

    logits = distribute_tensor(torch.randn(6, 8), cp_mesh(), [Shard(1)])
    labels = torch.arange(6)
    expected = F.cross_entropy(logits.full_tensor(), labels)
    with get_train_context(True, False):
        torch.testing.assert_close(F.cross_entropy(logits, labels).full_tensor(), expected)


@ranks(2, 4)
def test_model_without_ranks_trains_on_parts_of_rows():
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
