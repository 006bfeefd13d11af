"""Our core attention against Megatron's `DotProductAttention`, and against itself over several ranks."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module

from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron.attention import CoreAttention
from megatron_ext.megatron.layer_specs import gpt_layer_spec
from megatron_ext.sequence.attention import CAUSAL, Packing
from megatron_ext.sequence.zigzag import split_zigzag
from tests.gpt import (
    causal_mask,
    grouped,
    loss_and_grads,
    model_parallel,
    own_part,
    seed_ranks,
    tiny_batches,
    tiny_config,
    tiny_gpt,
)
from tests.marks import quick_if, slow
from tests.megatron import patching
from tests.ranks import ranks
from tests.sequence.batches import documents_seen
from tests.sequence.test_attention import check_whole

HEADS, CHANNELS = 4, 8


def kinds(mask_type="causal", layer=1, **overrides):
    """Megatron's core attention and ours, of one layer, in training; stock never sees context parallelism."""
    arguments = {"layer_number": layer, "attn_mask_type": AttnMaskType[mask_type], "attention_type": "self"}
    stock = DotProductAttention(tiny_config(**overrides | {"context_parallel_size": 1}), **arguments)
    return stock, CoreAttention(tiny_config(**overrides), **arguments)


def inputs(queries=12, keys=None, batch=2, groups=HEADS, tp=1, dtype=torch.float32):
    keys = queries if keys is None else keys
    shapes = (queries, batch, HEADS // tp, CHANNELS), *[(keys, batch, groups // tp, CHANNELS)] * 2
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def run(core, tensors, mask=None, **arguments):
    """Output and gradients, from the same random numbers each time."""
    seed_ranks(7)
    out = core(*tensors, mask, **arguments)
    return out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), tensors)


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def hides_documents(n):
    """[2, 1, n, n] of a batch with document boundaries, as Megatron-LM's --reset-attention-mask makes it."""
    mask = causal_mask(n).repeat(2, 1, 1, 1)
    mask[0, :, 5:, :5] = True
    mask[1, :, 9:, :9] = True
    return mask


def hides_padding(rows, n):
    """[2, 1, rows, n]: the second sequence has 7 tokens."""
    mask = torch.zeros(2, 1, rows, n, dtype=torch.bool)
    mask[1, ..., 7:] = True
    return mask


CASES = {
    "causal": ("causal", None, {}),
    "causal and said so": ("causal", causal_mask, {}),
    "documents": ("causal", hides_documents, {}),
    "padded keys": ("padding", lambda n: hides_padding(1, n), {}),
    "padding": ("padding", lambda n: hides_padding(n, n), {}),
    "arbitrary": ("arbitrary", lambda n: torch.rand(2, 1, n, n).argsort(-1) < 4, {}),
    "no mask": ("no_mask", None, {}),
    "grouped": ("causal", None, {"num_query_groups": 2}),
    "window": ("causal", None, {"window_size": (4, 0)}),
    "layer without the window": ("causal", None, {"window_size": (4, 0), "window_attn_skip_freq": 3}),
    "layers scaled": ("causal", None, {"apply_query_key_layer_scaling": True}),
    "softmax not in fp32": ("causal", None, {"attention_softmax_in_fp32": False}),
}
by_case = pytest.mark.parametrize("case", CASES)


def of_case(case, n=12, **more):
    mask_type, make_mask, overrides = CASES[case]
    groups = overrides.get("num_query_groups", HEADS)
    tensors = inputs(n, groups=groups, dtype=more.get("params_dtype", torch.float32))
    return kinds(mask_type, layer=3, **overrides | more), tensors, make_mask and make_mask(n)


@grouped(1)
@by_case
def test_equals_megatron(case):
    (stock, ours), tensors, mask = of_case(case)
    torch.testing.assert_close(run(ours, tensors, mask), run(stock, tensors, mask))


@grouped(1)
@by_case
@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16", "float16")])
def test_dropout_is_megatrons_bit_for_bit(case, dtype):
    kind = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}.get(dtype, {})
    more = {"attention_dropout": 0.2, "params_dtype": getattr(torch, dtype)} | kind
    (stock, ours), tensors, mask = of_case(case, **more)
    expected = run(stock, tensors, mask)
    drawn = [*get_cuda_rng_tracker().get_states().values(), torch.get_rng_state()]
    assert_equal(run(ours, tensors, mask), expected)
    assert_equal([*get_cuda_rng_tracker().get_states().values(), torch.get_rng_state()], drawn)
    ours.eval()
    stock.eval()
    tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if dtype != "float32" else {}
    torch.testing.assert_close(ours(*tensors, mask), stock(*tensors, mask), **tolerance)


@grouped(1)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_query_that_sees_nothing_gets_zeros(dropout):
    _, ours = kinds("padding", attention_dropout=dropout)
    hidden = hides_padding(12, 12)
    hidden[1, :, 7:] = True
    out, *grads = run(ours, inputs(), hidden)
    assert (out[7:, 1] == 0).all()
    assert (out[:7, 1] != 0).any()
    assert all(grad.isfinite().all() for grad in grads)


@grouped(1)
@pytest.mark.parametrize("queries, keys", [(1, 9), (5, 12)], ids=["end of a cache", "cross attention"])
def test_fewer_queries_than_keys(queries, keys):
    stock, ours = kinds("causal" if queries == 1 else "padding", attention_dropout=0.2)
    tensors, mask = inputs(queries, keys), None if queries == 1 else hides_padding(1, keys)
    assert_equal(run(ours, tensors, mask), run(stock, tensors, mask))
    ours.eval()
    stock.eval()
    torch.testing.assert_close(run(ours, tensors, mask), run(stock, tensors, mask))


@grouped(1)
def test_queries_at_the_end_of_a_cache():
    _, ours = kinds()
    q, k, v = inputs(queries=3, keys=9)
    out = ours(q, k, v, None, attn_mask_type=AttnMaskType.causal_bottom_right)
    whole = ours(torch.cat([torch.zeros(6, *q.shape[1:]), q]), k, v, None)
    torch.testing.assert_close(out, whole[6:])


@grouped(1)
def test_an_infinite_window_and_one_that_would_look_ahead():
    tensors = inputs()
    whole = run(kinds()[1], tensors)
    torch.testing.assert_close(run(kinds(window_size=(-1, 0))[1], tensors), whole)
    torch.testing.assert_close(run(kinds(window_size=(11, 3))[1], tensors), whole)
    unlimited = run(kinds("no_mask", window_size=(-1, -1))[1], tensors)
    torch.testing.assert_close(unlimited, run(kinds("no_mask")[1], tensors))


@grouped(1)
def test_a_window_for_some_layers():
    tensors = inputs()
    narrow, wide = run(kinds(window_size=(3, 0))[1], tensors), run(kinds()[1], tensors)
    for skip, layers in ((2, "nwnw"), ([0, 1, 1, 0], "wnnw"), (None, "nnnn")):
        for layer, expected in enumerate(layers, 1):
            core = kinds(layer=layer, window_size=(3, 0), window_attn_skip_freq=skip, num_layers=4)[1]
            assert_equal(run(core, tensors), narrow if expected == "n" else wide)


@grouped(1)
def test_no_mask_reaches_the_kernel_where_none_is_needed():
    _, ours = kinds()
    tensors = inputs()
    for mask, dense in ((None, False), (causal_mask(12), False), (hides_documents(12), True)):
        with calls_of_sdpa() as calls:
            ours(*tensors, mask)
        assert [(call["attn_mask"] is not None, call["is_causal"]) for call in calls] == [(dense, not dense)]


class calls_of_sdpa(torch.overrides.TorchFunctionMode):
    def __enter__(self):
        super().__enter__()
        self.calls = []
        return self.calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append(kwargs)
        return function(*args, **(kwargs or {}))


@grouped(1)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_layer_recomputes_the_same_numbers(dropout):
    """Selective recompute runs the core attention a second time: it must drop the same entries."""
    results = []
    for packed in (False, True):
        for recompute in ({}, {"recompute_granularity": "selective"}):
            seed_ranks(1)
            attention = self_attention(attention_dropout=dropout, num_query_groups=2, **recompute)
            torch.manual_seed(2)
            hidden = torch.randn(12, 1, 32, requires_grad=True)
            out, _ = attention(hidden, None, packed_seq_params=packing([5, 7]) if packed else None)
            out.square().sum().backward()
            results.append([out, hidden.grad, *(parameter.grad for parameter in attention.parameters())])
    assert_equal(results[1], results[0])
    assert_equal(results[3], results[2])


def self_attention(**overrides):
    assert gpt_layer_spec.submodules.self_attention.submodules.core_attention is CoreAttention
    config = tiny_config(add_bias_linear=False, **overrides)
    return build_module(gpt_layer_spec.submodules.self_attention, config=config, layer_number=1)


def packing(lengths, places=None, **more):
    """Megatron's `PackedSeqParams` of documents on all context-parallel ranks."""
    starts, padded = (n and tuple(itertools.accumulate(n, initial=0)) for n in (lengths, places))
    params = patching.packing(*starts, padded=padded)
    vars(params).update(more)  # fields that older versions of Megatron-Core do not have
    return params


@grouped(1)
@pytest.mark.parametrize("overrides", [{}, {"window_size": (3, 0)}], ids=["causal", "window"])
def test_packed_documents_equal_single_ones(overrides):
    lengths = [5, 1, 9, 1]
    stock, ours = kinds(num_query_groups=2, **overrides)
    tensors = inputs(sum(lengths), batch=1, groups=2)
    documents = zip(*(x.split(lengths) for x in tensors), strict=True)
    alone = torch.cat([stock(*document, None) for document in documents])
    out = ours(*(x.squeeze(1) for x in tensors), None, packed_seq_params=packing(lengths))
    assert out.shape == (16, HEADS * CHANNELS)
    torch.testing.assert_close(out, alone.squeeze(1))
    # Padding between documents takes places and gives zeros.
    padded = packing([5, 1, 8, 1], lengths)
    out = ours(*(x.squeeze(1) for x in tensors), None, packed_seq_params=padded)
    assert (out[14] == 0).all()
    torch.testing.assert_close(out[:14], alone[:14].squeeze(1))


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)])
def test_tensor_parallel_ranks_draw_as_in_megatron(sequence_parallel):
    stock, ours = kinds(attention_dropout=0.5, sequence_parallel=sequence_parallel, num_query_groups=2)
    torch.manual_seed(0)
    tensors = inputs(groups=2, tp=2)  # equal on both ranks
    got = run(ours, tensors)
    assert_equal(got, run(stock, tensors))
    both = [torch.empty_like(got[0]) for _ in range(2)]
    dist.all_gather(both, got[0].detach())
    # Under sequence parallelism the fork is the transformer block's, which is not here.
    assert torch.equal(*both) == sequence_parallel


def part_of_batch(x):
    """This rank's part of [s, b, ...] as Megatron's data loading cuts it."""
    part = own_part({"x": x.detach().transpose(0, 1).contiguous()})["x"]
    return part.transpose(0, 1).contiguous().requires_grad_()


@grouped(2, 4, over="cp")
@pytest.mark.parametrize("case", quick_if(("causal", "documents", "padding", "window", "grouped").__contains__, CASES))
def test_context_parallel_equals_megatron_on_one_rank(case):
    size, rank = dist.get_world_size(), dist.get_rank()
    (stock, ours), whole, mask = of_case(case, n=16)
    expected = stock(*whole, mask)
    weight = torch.randn_like(expected)
    parts = [part_of_batch(x) for x in whole]
    own_mask = mask
    if mask is not None and mask.shape[2] > 1:
        own_mask = own_part({"attention_mask": mask})["attention_mask"]
    with count_collectives() as forward:
        out = ours(*parts, own_mask)
    with count_collectives() as backward:
        grads = torch.autograd.grad((out * split_zigzag(weight, size, rank)).sum(), parts)
    torch.testing.assert_close(out, split_zigzag(expected, size, rank))
    for got, want in zip(grads, torch.autograd.grad((expected * weight).sum(), whole), strict=True):
        torch.testing.assert_close(got, split_zigzag(want, size, rank))
    assert sum(forward.values()) == sum(backward.values()) == 1, (forward, backward)


@grouped(2, 4, over="cp")
def test_context_parallel_packed_equals_one_rank():
    size = dist.get_world_size()
    lengths, places = (5, 1, 2 * size + 1, 2 * size), (-(-8 // (2 * size)) * 2 * size, 2 * size, 4 * size, 2 * size)
    _, ours = kinds(num_query_groups=2)

    def core(*tensors, cp_group, **_):
        query, key, value = (x.squeeze(1) for x in tensors[:3])
        return ours(query, key, value, None, packed_seq_params=packing(lengths, places)).view_as(tensors[0])

    check_whole(CAUSAL, sum(places), batch=1, packing=Packing(lengths, places), attention=core)


@grouped(2, cp=2)
def test_a_packed_batch_may_name_its_own_group():
    _, ours = kinds()
    tensors = [x.squeeze(1) for x in inputs(12, batch=1)]
    with count_collectives() as counts:
        out = ours(*tensors, None, packed_seq_params=packing([5, 7], local_cp_size=1))
    assert not counts
    pack = Packing((5, 7), (5, 7))
    expected = reference.attention(*(x[:, None] for x in tensors), documents_seen(CAUSAL, pack, pack))
    torch.testing.assert_close(out, expected.flatten(1))
    named = packing([5, 15], [8, 16], local_cp_size=2, cp_group=dist.group.WORLD)
    with count_collectives() as counts:
        out = ours(*tensors, None, packed_seq_params=named)
    assert sum(counts.values()) == 1
    torch.testing.assert_close(out, ours(*tensors, None, packed_seq_params=packing([5, 15], [8, 16])))


@ranks(2)
def test_a_context_parallel_gpt_equals_one_rank():
    """Rotary embeddings, layers, loss and gradients, with Megatron's own splitting of the batch."""
    tokens = tiny_batches(batch=2)[0]
    results = []
    for cp in (1, 2):
        with model_parallel(cp=cp):
            results.append(loss_and_grads(tiny_gpt(gpt_layer_spec, num_query_groups=2), tokens, micro_batch=1))
    (loss, grads), (cp_loss, cp_grads) = results
    assert abs(cp_loss - loss) < 1e-6 * abs(loss)
    for name, grad in grads.items():
        torch.testing.assert_close(cp_grads[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@grouped(1)
def test_a_packed_gpt_equals_its_documents():
    lengths = [5, 1, 10]
    tokens = tiny_batches(batch=1)[0, :, :16]
    (model,) = tiny_gpt(gpt_layer_spec)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions, None, packed_seq_params=packing(lengths))
    alone = [model(part, torch.arange(part.shape[1])[None], None) for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


@grouped(1)
def test_what_is_not_supported_says_so():
    def build(cp_comm_type=None, **overrides):
        config = tiny_config()
        for name, value in overrides.items():
            setattr(config, name, value)
        return CoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=cp_comm_type)

    for overrides, said in (
        ({"softmax_type": "learnable"}, "softmax_type is 'learnable'.*only 'vanilla'"),
        ({"qk_clip": True}, "qk_clip is True"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention"),
        ({"window_size": 4}, "window_size is 4: it must be None or two integers"),
        ({"cp_comm_type": "ring"}, "cp_comm_type is 'ring'"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2 and the context-parallel group has 1"),
    ):
        with pytest.raises(ValueError, match=said):
            build(**overrides)
    core, (q, k, v) = build("p2p"), inputs()
    flat = [x[:, 0] for x in (q, k, v)]
    other_format, other_keys = packing([12]), packing([5, 7])
    other_format.qkv_format = "bshd"
    other_keys.cu_seqlens_kv = packing([7, 5]).cu_seqlens_q
    for tensors, mask, more, said in (
        ((q, k, v), None, {"attention_bias": torch.zeros(1)}, "attention_bias"),
        ((q, k[:9], v[:9]), None, {}, "causal, with 12 queries and 9 keys.*causal_bottom_right"),
        ((q, k, v), torch.zeros(1, 1, 12, 12), {}, "torch.float32 .*it must be bool"),
        ((q, k, v), None, {"packed_seq_params": packing([12])}, "remove the batch dim"),
        (flat, None, {"packed_seq_params": packing([5, 8])}, "take 13 places: these must be 12"),
        (flat, None, {"packed_seq_params": other_format}, "qkv_format is 'bshd'"),
        (flat, None, {"packed_seq_params": other_keys}, r"documents of \[5, 7\] queries and \[7, 5\] keys"),
    ):
        with pytest.raises(ValueError, match=said):
            core(*tensors, mask, **more)
