"""Attention against the plain formula in fp64: every way of taking it apart, alone and over context-parallel ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.sequence.attention import CAUSAL, EVERYTHING, Packing, Window, attend
from megatron_ext.sequence.host_values import HostMemo
from megatron_ext.sequence.zigzag import thd_partition_indices, zigzag_positions
from tests.devices import GPU
from tests.ranks import ranks
from tests.sequence.batches import documents_seen, seen

WINDOWS = {
    "everything": EVERYTHING,
    "causal": CAUSAL,
    "left 3": Window(3, 0),
    "left 0": Window(0, 0),
    "both sides": Window(5, 2),
    "right only": Window(None, 4),
}
HEADS = {"heads": (4, 4), "grouped": (4, 2), "one group": (4, 1)}

by_window = pytest.mark.parametrize("window", WINDOWS)
by_heads = pytest.mark.parametrize("heads", HEADS)


def inputs(queries, keys, heads="grouped", batch=2, channels=8, dtype=torch.float64):
    h, g = HEADS[heads]
    q = torch.randn(queries, batch, h, channels, dtype=dtype)
    k, v = (torch.randn(keys, batch, g, channels, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v)]


def plain_sdpa(q, k, v, visible):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).permute(2, 0, 1, 3)


def assert_same(out, expected, tensors):
    weight = torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad((out * weight).sum(), tensors)
    want = torch.autograd.grad((expected * weight).sum(), tensors)
    torch.testing.assert_close(got, want)


@by_window
@by_heads
@pytest.mark.parametrize("queries, keys", [(9, 9), (1, 7), (5, 12), (12, 5)])
def test_windows_heads_and_lengths(window, heads, queries, keys):
    q, k, v = inputs(queries, keys, heads)
    visible = seen(WINDOWS[window], queries, keys)
    out = attend(q, k, v, WINDOWS[window], scale=0.3)
    assert_same(out, reference.attention(q, k, v, visible, 0.3), (q, k, v))


@pytest.mark.parametrize("window", [Window(7, 0), Window(130, 0), Window(3, 140)], ids=str)
def test_a_window_is_computed_in_blocks(window):
    q, k, v = inputs(300, 300, batch=1)
    assert_same(attend(q, k, v, window), reference.attention(q, k, v, seen(window, 300, 300)), (q, k, v))


def test_a_window_reads_few_keys(monkeypatch):
    """Work grows with length x window, not with the square of the length."""
    keys = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **kw: keys.append(k.shape[2]) or sdpa(q, k, v, **kw),
    )
    q, k, v = inputs(1000, 1000, batch=1)
    attend(q, k, v, Window(7, 0))
    assert len(keys) == 8
    assert max(keys) == 135


@pytest.mark.parametrize("window", [EVERYTHING, CAUSAL, Window(2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (1, 4, 9, 9), (2, 1, 1, 9), (1, 1, 1, 1)], ids=str)
def test_a_mask_narrows_the_window(window, shape):
    q, k, v = inputs(9, 9)
    hidden = torch.rand(shape) < 0.5
    if shape[2] == 9:
        hidden[..., 4, :] = True  # a query that sees nothing
    visible = seen(window, 9, 9) & ~hidden
    out = attend(q, k, v, window, mask=hidden)
    assert_same(out, reference.attention(q, k, v, visible), (q, k, v))
    assert shape[2] == 1 or (out[4] == 0).all()


def test_softcap_bends_scores_before_the_mask():
    """A query that sees nothing gets zeros, as without a softcap."""
    q, k, v = inputs(9, 9, "heads")
    hidden = torch.rand(2, 4, 9, 9) < 0.5
    hidden[..., 4, :] = True
    visible = seen(CAUSAL, 9, 9) & ~hidden
    scores = 2 * torch.tanh(0.3 * torch.einsum("sbhd,tbhd->bhst", q, k) / 2)
    some = visible.any(-1, keepdim=True)
    probs = scores.masked_fill(~visible & some, -torch.inf).softmax(-1) * some
    out = attend(q, k, v, CAUSAL, mask=hidden, scale=0.3, softcap=2.0)
    assert_same(out, torch.einsum("bhst,tbhd->sbhd", probs, v), (q, k, v))


PACKS = [  # lengths and places of the documents of queries, and of keys where they are others
    [Packing((5, 1, 0, 7, 1), (5, 1, 0, 7, 1))],
    [Packing((3, 4), (4, 8))],
    [Packing((0,), (0,))],
    [Packing((0, 3), (2, 4))],
    [Packing((2, 1, 4), (2, 1, 4)), Packing((5, 3, 2), (5, 4, 2))],
]


@by_window
@pytest.mark.parametrize("packs", PACKS, ids=str)
def test_documents_do_not_see_each_other(window, packs):
    q_packing, kv_packing = packs[0], packs[-1]
    q, k, v = inputs(sum(q_packing.places), sum(kv_packing.places), batch=1)
    visible = documents_seen(WINDOWS[window], q_packing, kv_packing)
    out = attend(q, k, v, WINDOWS[window], q_packing=q_packing, kv_packing=kv_packing)
    assert_same(out, reference.attention(q, k, v, visible), (q, k, v))


def test_values_may_have_other_channels_than_keys():
    q, k, _ = inputs(6, 6)
    v = torch.randn(6, 2, 2, 5, dtype=torch.float64, requires_grad=True)
    assert_same(attend(q, k, v, CAUSAL), reference.attention(q, k, v, seen(CAUSAL, 6, 6)), (q, k, v))


@by_window
def test_bf16_errs_no_more_than_plain_sdpa(window):
    q, k, v = inputs(64, 64, dtype=torch.bfloat16)
    visible = seen(WINDOWS[window], 64, 64)
    truth = reference.attention(q.double(), k.double(), v.double(), visible)
    found, plain = attend(q, k, v, WINDOWS[window]), plain_sdpa(q, k, v, visible)
    error, allowed = ((x.double() - truth).abs().max() for x in (found, plain))
    assert error <= 2 * allowed


@pytest.mark.gpu
@pytest.mark.rehearsed
@by_window
@by_heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, keys", [(200, 200), (72, 200)])
def test_on_cuda_errs_no_more_than_plain_sdpa(window, heads, dtype, queries, keys):
    """72 queries of 200 keys are a context-parallel rank's chunk: causal, its end aligned with the keys' end."""
    tensors = [x.detach().to(GPU, dtype).requires_grad_() for x in inputs(queries, keys, heads, channels=64)]
    visible = seen(WINDOWS[window], queries, keys).to(GPU)
    weight = torch.randn(queries, 2, 4, 64, device=GPU, dtype=dtype)

    def results(attention, tensors):
        out = attention(*tensors)
        return out, *torch.autograd.grad((out * weight).sum(), tensors)

    truth = results(lambda q, k, v: reference.attention(q, k, v, visible), [x.double() for x in tensors])
    ours = results(lambda q, k, v: attend(q, k, v, WINDOWS[window]), tensors)
    allowed = results(lambda q, k, v: plain_sdpa(q, k, v, visible), tensors)
    limit = 2 if GPU == "cuda" else 4  # a CPU's kernel sums the gradients of shared keys in bf16
    for a, b, t in zip(ours, allowed, truth, strict=True):
        assert (a - t).abs().max() <= limit * (b - t).abs().max() + torch.finfo(dtype).eps


def test_dropout_drops_its_share():
    q, k, v = inputs(64, 64, "heads")
    ones = torch.ones_like(v)
    torch.manual_seed(1)
    out = attend(q, k, ones, EVERYTHING, dropout=0.25)
    assert out.mean().sub(1).abs() < 0.02
    assert (out != 1).any()
    torch.manual_seed(1)
    torch.testing.assert_close(attend(q, k, ones, EVERYTHING, dropout=0.25), out, rtol=0, atol=0)


def test_what_does_not_fit_is_refused():
    q, k, v = inputs(4, 4, batch=1)
    packing = Packing((4,), (4,))
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    for tensors, options, said in (
        ((q[:, :, :3], k, v), {}, "heads a multiple of groups"),
        ((q, k, v[:3]), {}, "do not fit"),
        ((q, k, v), {"mask": hidden[..., :3]}, r"bool and broadcastable to .* = \[1, 4, 4, 4\]"),
        ((q, k, v), {"mask": hidden.float()}, "attention mask is torch.float32"),
        ((q, k, v), {"mask": hidden, "q_packing": packing, "kv_packing": packing}, "pass mask=None"),
        ((q, k, v), {"q_packing": packing, "kv_packing": Packing((2, 2), (2, 2))}, "as many documents"),
        ((q, k, v), {"q_packing": Packing((6,), (6,)), "kv_packing": packing}, "take 6 places: these must be 4"),
        (inputs(4, 4), {"q_packing": packing, "kv_packing": packing}, "batch size 2: it must be 1"),
    ):
        with pytest.raises(ValueError, match=said):
            attend(*tensors, **options)


def test_cu_seqlens_that_are_none_are_refused():
    assert Packing.of(torch.tensor([0, 3, 4]), torch.tensor([0, 4, 8])) == Packing((3, 1), (4, 4))
    for starts, padded, said in (
        (torch.tensor([1, 3]), None, "begins with 0"),
        (None, None, "cu_seqlens is None"),
        (torch.tensor([0, 3]), torch.tensor([0.0, 4.0]), "cu_seqlens_padded is .* integers"),
        (torch.tensor([0, 3, 2]), None, "never fall"),
        (torch.tensor([0, 3, 4]), torch.tensor([0, 2, 4]), "at least the same lengths"),
    ):
        with pytest.raises(ValueError, match=said):
            Packing.of(starts, padded)


def test_values_are_read_once_and_again_when_they_change():
    reads = []
    memo = HostMemo(lambda x, more: reads.append(more) or len(reads))
    x = torch.empty(2, device="meta")
    assert memo(x, "a") == memo(x, "a") == 1
    x[0] = 5
    assert memo(x, "a") == 2
    memo(x, "b")
    assert reads == ["a", "a", "b"]


def test_boundaries_that_numpy_has_changed_are_read_anew():
    starts = np.array([0, 3, 4])
    cu_seqlens = torch.from_numpy(starts)
    assert Packing.of(cu_seqlens) == Packing((3, 1), (3, 1))
    starts[1] = 2
    assert Packing.of(cu_seqlens) == Packing((2, 2), (2, 2))


@by_window
@ranks(2, 4)
def test_context_parallel_equals_one_rank(window):
    check_whole(WINDOWS[window])


@ranks(2)
def test_context_parallel_in_blocks():
    check_whole(Window(9, 0), length=600, batch=1)


@pytest.mark.parametrize("shape", [(1, 1, 32, 32), (2, 4, 32, 32), (2, 1, 1, 32)], ids=str)
@ranks(2, 4)
def test_context_parallel_with_a_mask(shape):
    check_whole(CAUSAL, hidden=torch.rand(shape) < 0.4)


@by_window
@ranks(2, 4)
def test_context_parallel_packed_equals_one_rank(window):
    multiple = 2 * dist.get_world_size()
    lengths = (5, 1, 0, 3 * multiple, 2 * multiple - 1)
    packing = Packing(lengths, tuple(-(-n // multiple) * multiple for n in lengths))
    check_whole(WINDOWS[window], sum(packing.places), batch=1, packing=packing)


def check_whole(window, length=32, batch=2, hidden=None, packing=None, attention=attend):
    """This rank's part of the output and of the gradients, and one exchange each way."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    own = zigzag_positions(length, size, rank)
    options, visible = {}, seen(window, length, length)
    if packing is not None:
        own = thd_partition_indices(torch.tensor([0, *packing.places]).cumsum(0), length, size, rank).long()
        options, visible = {"q_packing": packing, "kv_packing": packing}, documents_seen(window, packing, packing)
    if hidden is not None:
        visible = visible & ~hidden
        options["mask"] = hidden if hidden.shape[2] == 1 else hidden[:, :, own]
    whole = inputs(length, length, batch=batch)
    expected = reference.attention(*whole, visible)
    weight = torch.randn_like(expected)
    parts = [x.detach()[own].requires_grad_() for x in whole]
    with count_collectives() as forward:
        out = attention(*parts, window, cp_group=group, **options)
    with count_collectives() as backward:
        grads = torch.autograd.grad((out * weight[own]).sum(), parts)
    torch.testing.assert_close(out, expected[own])
    for got, want in zip(grads, torch.autograd.grad((expected * weight).sum(), whole), strict=True):
        torch.testing.assert_close(got, want[own])
    assert sum(forward.values()) == sum(backward.values()) == 1, (forward, backward)


@ranks(2)
def test_a_rank_of_padding_alone_takes_part_in_the_backward():
    group, rank = dist.group.WORLD, dist.get_rank()
    packing = Packing((1,), (4,))  # its one token is rank 0's
    parts = inputs(2, 2, batch=1)
    out = attend(*parts, CAUSAL, q_packing=packing, kv_packing=packing, cp_group=group)
    grads = torch.autograd.grad(out.sum(), parts)
    ones = torch.zeros_like(parts[2])
    ones[0] = 2 * (rank == 0)  # both heads of a group read it
    torch.testing.assert_close(grads[2], ones)


@ranks(2)
def test_context_parallel_faults_are_raised_before_messages():
    group = dist.group.WORLD
    odd = inputs(3, 3, batch=1)
    uneven = Packing((6, 2), (6, 2))
    with count_collectives() as counts:
        with pytest.raises(ValueError, match="takes 6 places: over 2 .* multiple of 4; pad to 8"):
            attend(*odd, cp_group=group)
        with pytest.raises(ValueError, match="takes 6 places"):
            attend(*inputs(4, 4, batch=1), q_packing=uneven, kv_packing=uneven, cp_group=group)
        with pytest.raises(ValueError, match="keys those of all ranks"):
            attend(*inputs(4, 4), mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool), cp_group=group)
    assert not counts
