import copy
import sys

import numpy as np
import pytest
import torch

from megatron_ext.dtensor import use_attention
from megatron_ext.sequence.attention import CAUSAL, Packing, Window, attend
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.devices import GPU
from tests.dtensor.models import drawn, error, make, meshes, reference
from tests.ranks import ranks

CU_SEQLENS = torch.tensor([0, 8, 12, 28, 32])


def _positions(cu_seqlens):
    return torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])[None]


@pytest.mark.parametrize("said_by", ["cu_seqlens", "cu_seq_lens_q", "position_ids"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_documents_do_not_see_each_other(name, said_by):
    tokens = drawn(1, 32)
    true = reference(name, False, tokens, CU_SEQLENS)[0]
    said = {"cu_seqlens": CU_SEQLENS, "cu_seq_lens_q": CU_SEQLENS.int(), "position_ids": _positions(CU_SEQLENS)}
    model = use_attention(make(name))
    assert error(model(input_ids=tokens, **{said_by: said[said_by]}).logits, true) < 3e-6
    assert error(model(input_ids=tokens).logits, true) > 1e-2


def test_rows_of_positions_are_packed_row_by_row():
    tokens = drawn(2, 32)
    positions = torch.cat([_positions(CU_SEQLENS), torch.arange(32)[None]])
    true = torch.cat([reference("gemma3", False, tokens[:1], CU_SEQLENS)[0], reference("gemma3", False, tokens[1:])[0]])
    model = use_attention(make("gemma3"))
    assert error(model(input_ids=tokens, position_ids=positions).logits, true) < 3e-6
    shared = model(input_ids=tokens, position_ids=positions[:1]).logits
    assert error(shared[1:], reference("gemma3", False, tokens[1:], CU_SEQLENS)[0]) < 3e-6
    assert error(shared[:1], true[:1]) < 3e-6


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gemma3_multimodal"])
def test_padding_mask_before_and_behind_the_tokens(name):
    tokens = drawn(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    model = use_attention(make(name))
    mask[1, 9:] = 0
    behind = model(input_ids=tokens, attention_mask=mask).logits
    assert error(behind[1, :9], reference(name, False, tokens[1:, :9])[0][0]) < 3e-6
    mask = mask.flip(1)
    before = model(input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert error(before[1, 3:], reference(name, False, tokens[1:, 3:])[0][0]) < 3e-6
    assert error(before[0], reference(name, False, tokens[:1])[0][0]) < 3e-6
    assert before.isfinite().all()


def test_arguments_that_numpy_has_changed_are_read_anew():
    tokens, positions = drawn(1, 32), np.arange(32)[None]
    model, given = use_attention(make("llama")), torch.from_numpy(positions)
    model(input_ids=tokens, position_ids=given)
    positions[:] = _positions(CU_SEQLENS).numpy()
    true = reference("llama", False, tokens, CU_SEQLENS)[0]
    assert error(model(input_ids=tokens, position_ids=given).logits, true) < 3e-6


@ranks(2)
def test_padding_before_the_tokens_with_context_parallelism():
    mesh = meshes(cp=2)[0]["cp"]
    parts = SequenceParts(mesh.get_group())
    tokens, mask = drawn(2, 16), torch.ones(2, 16)
    mask[1, :5] = 0
    model = make("gemma3")
    alone = use_attention(copy.deepcopy(model))(input_ids=tokens, attention_mask=mask).logits
    found = use_attention(model, mesh.get_group())(input_ids=parts.split(tokens, 1), attention_mask=mask).logits
    kept = parts.split(mask, 1).bool()
    assert error(found[kept], parts.split(alone, 1)[kept]) < 3e-6


REFUSED = [
    ({"input_ids": None}, "input_ids is None"),
    ({"attention_mask": torch.ones(2, 1, 12, 12)}, "attention_mask is"),
    ({"attention_mask": torch.ones(2, 11)}, "attention_mask is"),
    ({"cu_seqlens": torch.tensor([0, 4, 12])}, "batch of 2"),
    ({"use_cache": True}, "use_cache"),
    ({"past_key_values": object()}, "past_key_values"),
    ({"token_type_ids": torch.ones(2, 12, dtype=torch.int64)}, "token_type_ids"),
    ({"pixel_values": torch.ones(1)}, "pixel_values"),
]


@pytest.mark.parametrize("arguments,message", REFUSED, ids=[next(iter(a)) + str(i) for i, (a, _) in enumerate(REFUSED)])
def test_what_would_be_ignored_or_wrong_is_refused(arguments, message):
    model = use_attention(make("gemma3_multimodal"))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": drawn(2, 12)} | arguments)


@ranks(2)
def test_what_does_not_fit_a_split_sequence_is_refused():
    model = use_attention(make("llama"), meshes(cp=2)[0]["cp"].get_group())
    tokens = drawn(1, 12)
    for arguments, message in [
        ({"labels": tokens}, "causal_lm_loss"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"position_ids": torch.arange(12)[None]}, "zigzag"),
        ({"attention_mask": torch.ones(1, 12)}, "whole sequence"),
        ({"cu_seqlens": torch.tensor([0, 6, 24])}, "divide by 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(input_ids=tokens, **arguments)
    with pytest.raises(ValueError, match="multiple of"):
        model(input_ids=tokens[:, :11])
    sliced = use_attention(make("llama"), None, tensor_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="pad to 12"):
        sliced(input_ids=tokens[:, :11])
    with pytest.raises(ValueError, match="inputs_embeds"):
        sliced(inputs_embeds=torch.zeros(1, 12, 32))


def test_a_model_that_was_not_prepared_is_told_so():
    model = make("llama")
    use_attention(copy.deepcopy(model))  # registers the name
    model.config._attn_implementation = "megatron_ext"
    with pytest.raises(ValueError, match="use_attention"):
        model(input_ids=drawn(1, 4))


def test_no_mask_is_built(monkeypatch):
    """Neither by transformers nor here: SDPA's own "causal" does."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        seen.append((type(attn_mask), is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = use_attention(make("qwen3"))
    mask = torch.ones(1, 32, dtype=torch.int64)
    mask[:, 30:] = 0
    model(input_ids=drawn(1, 32), attention_mask=mask)
    model(input_ids=drawn(1, 32), cu_seqlens=CU_SEQLENS)
    assert seen == [(type(None), True)] * (2 + 2 * 4)


def test_without_transformers(monkeypatch):
    model = make("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="megatron-ext\\[hf\\]"):
        use_attention(model)


@ranks(2)
def test_a_second_call_replaces_the_first():
    mesh = meshes(cp=2)[0]["cp"]
    parts, tokens = SequenceParts(mesh.get_group()), drawn(2, 16)
    model = use_attention(use_attention(make("llama")), mesh.get_group())
    assert (
        error(model(input_ids=parts.split(tokens, 1)).logits, parts.split(reference("llama", False, tokens)[0], 1))
        < 3e-6
    )


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt_oss"])
def test_on_a_gpu(name):
    """Packed, windowed, with shared keys, in fp32 as on the CPU; in bf16 as near to it as bf16 is."""
    tokens = drawn(1, 32)
    true = reference(name, False, tokens, CU_SEQLENS)[0]
    model = use_attention(make(name)).to(GPU)
    arguments = {"input_ids": tokens.to(GPU), "cu_seqlens": CU_SEQLENS.to(GPU)}
    assert error(model(**arguments).logits.cpu(), true) < 1e-4
    assert error(model.bfloat16()(**arguments).logits.float().cpu(), true) < 5e-2


def _by_hand(q, k, v, window, softcap=None, sinks=None, hidden=None):
    """`[S, B, H, D]`. Sinks are a column of scores more, whose probabilities go nowhere."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    z = torch.einsum("sbhd,tbhd->bhst", q, k) * 0.3
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z.masked_fill(~window.visible(0, len(q), len(k), q.device), float("-inf"))
    if hidden is not None:
        z = z.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return torch.einsum("bhst,tbhd->sbhd", z.softmax(-1), v)
    column = sinks[None, :, None, None].expand(*z.shape[:3], 1)
    return torch.einsum("bhst,tbhd->sbhd", torch.cat([z, column], -1).softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("window", [CAUSAL, Window(left=3, right=0), Window()], ids=["causal", "window", "all"])
@pytest.mark.parametrize("of", ["softcap", "sinks"])
@ranks(1, 2)
def test_softcap_and_sinks(of, window):
    mesh = meshes(cp=torch.distributed.get_world_size())[0]["cp"]
    parts = SequenceParts(mesh.get_group())
    leaves = [torch.randn(16, 2, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = {"sinks": sinks} if of == "sinks" else {"softcap": 1.7}
    grad = torch.randn(16, 2, 4, 8, dtype=torch.float64)
    true = _by_hand(*leaves, window, **options)
    *true_grads, true_sinks = torch.autograd.grad(true, [*leaves, sinks], grad, allow_unused=True)
    mine = [parts.split(x, 0) for x in leaves]
    found = attend(*mine, window, cp_group=mesh.get_group(), scale=0.3, **options)
    torch.testing.assert_close(found, parts.split(true, 0))
    *grads, sink_grad = torch.autograd.grad(found, [*mine, sinks], parts.split(grad, 0), allow_unused=True)
    for x, expected in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(x, parts.split(expected, 0))
    if of == "sinks":
        torch.distributed.all_reduce(sink_grad, group=mesh.get_group())
        torch.testing.assert_close(sink_grad, true_sinks)


def test_softcap_and_sinks_of_documents_and_sinks_behind_masks():
    """Softcaps behind masks are tested in `tests/sequence/test_attention.py`."""
    q, k, v = (torch.randn(6, 1, 2, 4, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64)
    packing = Packing((4, 2), (4, 2))
    for options in ({"sinks": sinks}, {"softcap": 2.0}):
        packed = attend(q, k, v, CAUSAL, q_packing=packing, kv_packing=packing, scale=0.3, **options)
        for document in (slice(0, 4), slice(4, 6)):
            alone = _by_hand(q[document], k[document], v[document], CAUSAL, **options)
            torch.testing.assert_close(packed[document], alone)
    hidden = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    hidden[..., :2] = True  # the first two queries see the sink alone
    masked = attend(q, k, v, CAUSAL, mask=hidden, scale=0.3, sinks=sinks)
    torch.testing.assert_close(masked, _by_hand(q, k, v, CAUSAL, sinks=sinks, hidden=hidden))
    assert masked[:2].eq(0).all()
    for bad in ({"sinks": sinks[:1]}, {"sinks": sinks, "softcap": 2.0}):
        with pytest.raises(ValueError, match="one number a head, without softcap"):
            attend(q, k, v, CAUSAL, **bad)


def test_attention_that_is_not_known_is_refused():
    model = make("llama4")
    with pytest.raises(ValueError, match="create_chunked_causal_mask|attention in chunks"):
        use_attention(model)
    model = use_attention(make("llama"))
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, "slopes": 1}), with_kwargs=True)
    with pytest.raises(ValueError, match="passes slopes to its attention"):
        model(input_ids=drawn(1, 4))


def test_attention_in_both_directions_is_refused():
    tokens, model = drawn(1, 4), use_attention(make("llama"))
    with pytest.raises(ValueError, match="LlamaAttention is not causal"):
        model(input_ids=tokens, is_causal=False)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="LlamaAttention is not causal"):
        model(input_ids=tokens)
    model = make("llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="attention in both directions, as config.is_causal=False says"):
        use_attention(model)
