"""`bits` and `skip_ignored` of losses and log-probabilities of transformers' models."""

import warnings

import pytest
import torch

from benchmarks.meter import measure
from megatron_ext import batch_invariant_mode, linear_cross_entropy, linear_log_probs
from megatron_ext.dtensor import causal_lm_log_probs, causal_lm_loss, use_fused_loss
from megatron_ext.dtensor.causal_lm import causal_lm_read, causal_lm_sampled_log_probs
from megatron_ext.head import LogProbs, linear_sampled_log_probs
from megatron_ext.sequence.next_token import next_tokens
from tests.batch_invariant_mode import fixed_calls, switched_on
from tests.dtensor.models import batch, make, meshes, parallelize
from tests.dtensor.test_causal_lm import adapted
from tests.ranks import ranks

READS = {
    "loss": (causal_lm_loss, linear_cross_entropy, {"z_loss": 0.01}),
    "log-probabilities": (causal_lm_log_probs, linear_log_probs, {"return_entropy": True}),
}


def same(found, expected):
    """Bit by bit."""
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", READS)
def test_bits_are_those_of_the_head_in_any_chunks(kind):
    read, of_head, options = READS[kind]
    model, given = make("llama"), batch()
    hidden = model.model(input_ids=given["input_ids"], use_cache=False)[0]
    targets = next_tokens(given["labels"])
    expected = of_head(hidden, model.lm_head.weight, targets, bits="batch", **options)
    with fixed_calls() as calls:
        for chunk in (None, 3):
            assert same(read(model, **tokens(given), bits="batch", chunk_tokens=chunk, **options), expected)
        assert len(calls) == 2
        read(model, **tokens(given), **options)
        read(model, **tokens(given), bits="fast", **options)
        assert len(calls) == 2
        with switched_on():
            assert same(read(model, **tokens(given), **options), expected)
        assert len(calls) == 3


def tokens(given):
    """A batch under the names of our functions."""
    return {"tokens_BS": given["input_ids"], "labels": given["labels"]}


def test_bits_under_sampling():
    model, ids = make("llama"), batch()["input_ids"]
    hidden = model.model(input_ids=ids, use_cache=False)[0]
    expected = linear_sampled_log_probs(hidden, model.lm_head.weight, next_tokens(ids), 5, 0.9, bits="batch")
    found, plain = causal_lm_sampled_log_probs(model, ids, top_k=5, top_p=0.9, with_plain=True, bits="batch")
    assert torch.equal(found, expected)
    assert torch.equal(plain, linear_log_probs(hidden, model.lm_head.weight, next_tokens(ids), bits="batch"))


@pytest.mark.parametrize("kind", READS)
def test_tokens_that_do_not_count_are_left_out(kind):
    read, _, options = READS[kind]
    found, given = [], batch()
    for skip in (False, True, 12):
        model = make("llama")
        value = read(model, **tokens(given), skip_ignored=skip, **options)
        value = torch.stack(value) if isinstance(value, tuple) else value[None]
        value[:, next_tokens(given["labels"]) != -100].sum().backward()
        found.append((value.detach(), *(p.grad for p in model.parameters())))
    for skipped in found[1:]:
        for x, expected in zip(skipped, found[0], strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="at_most, or skip_ignored, is 4, and more"):
        read(make("llama"), **tokens(given), skip_ignored=4, **options)


def _fused(model, given, **options):
    return use_fused_loss(model, cache=1, **options)(**given).loss


def _loss(model, given, **options):
    return causal_lm_loss(model, **tokens(given), cache=1, **options)


def _log_probs(model, given, **options):
    return causal_lm_log_probs(model, **tokens(given), cache=1, **options)


def _read(model, given, **options):
    return causal_lm_read(model, readouts=lambda labels: [LogProbs(labels)], columns=1, **tokens(given), **options)


@pytest.mark.parametrize("way", [_loss, _log_probs, _read, _fused])
def test_products_are_of_the_tokens_that_count(way):
    """Or of as many as a bound says; the rest of the model is multiplied as before."""
    given = batch()
    counting, flops = int((next_tokens(given["labels"]) != -100).sum()), {}
    assert counting < 16 < given["labels"].numel()
    for skip in (False, True, 16):
        model = make("llama")
        with measure() as found:
            way(model, given, skip_ignored=skip).sum().backward()
        flops[skip] = found.flops
    each = 6 * model.lm_head.weight.numel()
    assert flops[False] - flops[True] == each * (given["labels"].numel() - counting)
    assert flops[16] - flops[True] == each * (16 - counting)


def _sampled(model, given, **options):
    return causal_lm_sampled_log_probs(model, given["input_ids"], top_k=5, top_p=0.9, **options)[0]


@pytest.mark.parametrize("way", [_loss, _log_probs, _sampled, _fused])
def test_bits_are_refused_where_the_models_logits_are_read(way):
    """The function of a head that is not known; the switch asks for bits too."""

    def call(**bits):
        return way(adapted(make("llama")), batch(), **bits)

    for bits in ("batch", "tensor_parallel"):
        with pytest.raises(ValueError, match=f'bits is "{bits}", and LlamaForCausalLM (makes|keeps)'):
            call(bits=bits)
    plain = call()
    with switched_on():
        with pytest.raises(ValueError, match='bits is "batch", and LlamaForCausalLM (makes|keeps)'):
            call()
        assert torch.equal(call(bits="fast"), plain)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_mode_reaches_the_layers_of_a_parallel_model(sequence_parallel):
    """Log-probabilities and entropies of a row beside another one, and alone; two ranks' parts have one sum."""
    model = parallelize(make("llama"), *meshes(tp=2), sequence_parallel=sequence_parallel)
    ids = batch()["input_ids"]
    with batch_invariant_mode(), warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "batch_invariant_mode is on")
        together = causal_lm_log_probs(model, ids, return_entropy=True)
        for row in range(len(ids)):
            alone = causal_lm_log_probs(model, ids[row : row + 1], return_entropy=True)
            assert same(tuple(x[0] for x in alone), tuple(x[row] for x in together))
