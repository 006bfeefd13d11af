import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaForCausalLM

from megatron_ext.dtensor import (
    causal_lm_log_probs,
    causal_lm_loss,
    get_logprobs_from_vocab_parallel_logits,
    use_attention,
)
from megatron_ext.dtensor.causal_lm import causal_lm_from_logits, causal_lm_sampled_log_probs
from megatron_ext.dtensor.output.decisions import is_hooked
from megatron_ext.dtensor.output.reads import say_once
from megatron_ext.reference import log_probs, sampled_log_probs
from megatron_ext.sequence.next_token import next_tokens
from tests.dtensor.models import (
    VOCAB,
    batch,
    check_gradients,
    drawn,
    error,
    logits_proof,
    make,
    meshes,
    parallelize,
    reference,
    told,
)
from tests.marks import slow
from tests.operators import Largest
from tests.ranks import ranks


@pytest.mark.slow
@ranks(4)
def test_odd_lengths_and_padding_are_nobodys_business():
    """13 tokens over two context-parallel ranks and slices of two more; entropy too, with its gradients."""
    tokens, mask = drawn(2, 13), torch.ones(2, 13, dtype=torch.int64)
    mask[1, 9:] = 0
    plain = make("gemma3")
    labels = next_tokens(tokens)
    labels[1, 8:] = -100
    logits = plain(input_ids=tokens, attention_mask=mask, use_cache=False).logits / 1.3
    true = log_probs(logits, labels)
    counts = labels != -100
    entropy = torch.distributions.Categorical(logits=logits).entropy() * counts
    (true.sum() + 0.7 * entropy.sum()).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}

    model = parallelize(make("gemma3"), *meshes(cp=2, tp=2), sequence_parallel=True)
    found, found_entropy = causal_lm_log_probs(
        model, tokens, attention_mask=mask, temperature=1.3, return_entropy=True, cache=0
    )
    assert found.dtype == torch.float32
    assert error(found, true) < 3e-6
    assert error(found_entropy, entropy) < 3e-6
    assert found[~counts].eq(0).all()
    (found.sum() + 0.7 * found_entropy.sum()).backward()
    check_gradients(model, gradients, tolerance=1e-5)  # an entropy's gradient cancels more
    given = causal_lm_log_probs(model, tokens, shift_labels=labels, attention_mask=mask, temperature=1.3)
    assert error(given, true) < 3e-6


def test_padding_before_a_row_predicts_nothing():
    model, row = make("llama"), drawn(1, 9)
    mask = F.pad(torch.ones_like(row), (4, 2))
    found = causal_lm_log_probs(model, F.pad(row, (4, 2)), attention_mask=mask)
    assert error(found, F.pad(causal_lm_log_probs(model, row), (4, 2))) < 3e-6


@ranks(2)
def test_packed_tokens_of_an_odd_number_in_slices():
    cu_seqlens = torch.tensor([0, 5, 6, 13])
    tokens = drawn(1, 13)
    logits = reference("llama", False, tokens, cu_seqlens)[0]
    model = parallelize(make("llama"), *meshes(tp=2), sequence_parallel=True)
    loss = causal_lm_loss(model, tokens, cu_seqlens=cu_seqlens)
    assert error(loss, -log_probs(logits, next_tokens(tokens, cu_seqlens))) < 3e-6
    assert loss[0, [4, 5, 12]].eq(0).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_models_that_are_not_sharded(name):
    """Models cap their logits, or scale them by attributes of different names."""
    tokens = drawn(2, 9)
    true = reference(name, False, tokens)[0]
    plain = make(name)
    plain.config.unknown_softcapping = 3.0
    expected = log_probs(true / 1.3, next_tokens(tokens))
    for model in (plain, use_attention(plain)):
        assert error(causal_lm_log_probs(model, tokens, temperature=1.3), expected) < 3e-6
        assert error(-causal_lm_loss(model, tokens, temperature=1.3), expected) < 3e-6


class Squared(LlamaForCausalLM):
    """A causal LM with a head of its own kind."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.bent(out.logits)
        return out

    def bent(self, logits):
        return logits + 0.1 * logits**2


class Leaky(Squared):
    """A head that is nearly linear."""

    def bent(self, logits):
        return F.leaky_relu(logits, 0.999)


@pytest.mark.parametrize("dp, cp, tp", [(1, 2, 2), (2, 1, 2)])
@ranks(4)
def test_a_head_that_is_not_known_is_read_through_its_logits(dp, cp, tp):
    """Losses, entropies and gradients are the same; it is said once."""
    torch.manual_seed(1)
    plain = Squared(make("llama").config)
    tokens = drawn(2, 13)
    state = plain.state_dict()
    logits = plain(input_ids=tokens, use_cache=False).logits / 1.3
    labels = next_tokens(tokens)
    true = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)
    entropy = torch.distributions.Categorical(logits=logits).entropy() * (labels != -100)
    true.sum().backward()
    mesh, dp_cp = meshes(dp, cp, tp)
    mine = tokens[mesh["dp"].get_local_rank() :: dp]
    model = Squared(plain.config)
    model.load_state_dict(state)
    parallelize(model, mesh, dp_cp, sequence_parallel=True)
    with told("Squared makes its own logits .*its forward reads its logits by"):
        loss = causal_lm_loss(model, mine, temperature=1.3, label_smoothing=0.1)
    assert error(loss, true[mesh["dp"].get_local_rank() :: dp]) < 3e-6
    (loss.sum() * dp).backward()
    check_gradients(model, {name: p.grad for name, p in plain.named_parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = causal_lm_log_probs(model, mine, temperature=1.3, return_entropy=True)
    assert error(found[0], log_probs(logits, labels)[mesh["dp"].get_local_rank() :: dp]) < 3e-6
    assert error(found[1], entropy[mesh["dp"].get_local_rank() :: dp]) < 3e-6


def adapted(model):
    """`model`, with a head that does more than its weight says."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).abs()

    model.lm_head.__class__ = Adapted
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3_multimodal", "gemma2", "granite", "cohere", "gpt2"])
def test_what_is_read_from_hidden_states_is_proved(name):
    """The proof is of this model, again after a change, for any class whose head can be found, with a bias too."""
    model, tokens = make(name), drawn(2, 9)
    assert str(logits_proof(model)).startswith("proved on 9 tokens")
    assert logits_proof(model) is logits_proof(model)
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(VOCAB))
    assert logits_proof(model).fused
    with torch.no_grad():
        expected = log_probs(model(tokens).logits, next_tokens(tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert error(causal_lm_log_probs(model, tokens), expected) < 3e-6


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model: vars(model).update(forward=make("llama").forward), "does not call its lm head"),
        (adapted, "differs"),
        (lambda model: setattr(model, "__class__", Squared), "reads its logits by"),
        (lambda model: setattr(model, "__class__", Leaky), "reads its logits by"),
    ],
    ids=["instance", "head", "squared", "leaky"],
)
def test_logits_that_differ_are_made_and_told_why(change, reason):
    model, tokens = make("llama"), drawn(2, 9)
    change(model)
    true = log_probs(model(input_ids=tokens).logits, next_tokens(tokens))
    true.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with told(f"(LlamaForCausalLM|Squared|Leaky) makes its own logits .*{reason}"):
        found = causal_lm_log_probs(model, tokens)
    assert error(found, true) < 3e-6
    found.sum().backward()
    check_gradients(model, gradients)


def largest_logits():
    """The most elements of a tensor whose last dim is the vocabulary, or rank 0's shard of it."""
    kinds = ((VOCAB,), (VOCAB // 2 + 1,))
    return Largest(lambda x: min(x.numel(), x.untyped_storage().nbytes()) if x.shape[-1:] in kinds else 0)


@ranks(2)
def test_no_logits_are_held():
    """Forward makes nothing of vocabulary size for all tokens; the way through logits does. Seen on rank 0's shard."""
    model = parallelize(make("llama"), *meshes(tp=2))
    tokens, shard = drawn(2, 64), (VOCAB // 2 + 1,)

    causal_lm_loss(model, tokens)  # proves it on 64 tokens
    with largest_logits() as found:
        causal_lm_loss(model, tokens, cache=0, chunk_tokens=16)
    if torch.distributed.get_rank() == 0:
        assert 0 < found.size <= 32 * shard[0]  # the weight's transpose
    with largest_logits() as found:
        model(input_ids=tokens)
    assert found.size >= 128 * VOCAB // 2


@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)])
@ranks(2)
def test_log_probs_from_sharded_logits(sequence_parallel):
    """The vocabulary is odd, and its shards uneven; gradients of every parameter come through the logits."""
    tokens = drawn(2, 16)
    logits, _, gradients = reference("qwen3", True, tokens)
    model = parallelize(make("qwen3", True), *meshes(tp=2), sequence_parallel=sequence_parallel)
    found = get_logprobs_from_vocab_parallel_logits(model(input_ids=tokens).logits, tokens)
    assert error(found, log_probs(logits[:, :-1], tokens[:, 1:])) < 3e-6
    (-found.mean()).backward()
    check_gradients(model, gradients)
    assert error(get_logprobs_from_vocab_parallel_logits(logits, tokens), found.detach()) < 3e-6


@ranks(2)
def test_a_label_that_one_context_parallel_rank_holds():
    """Rank 0 alone can refuse the label; rank 1 hears of the refusal where the results are joined."""
    tokens = drawn(2, 13)  # padded to 16
    model = parallelize(make("llama"), *meshes(cp=2))
    labels = next_tokens(tokens)
    labels[1, 12] = VOCAB  # of rank 0's part
    said = "another rank of cp_group refused" if torch.distributed.get_rank() else r"outside \[0, 97\)"
    for call, more in ((causal_lm_loss, {}), (causal_lm_log_probs, {"return_entropy": True})):
        with pytest.raises(ValueError, match=said):
            call(model, tokens, shift_labels=labels, **more)
    true = log_probs(reference("llama", False, tokens)[0], next_tokens(tokens))
    assert error(causal_lm_log_probs(model, tokens), true) < 3e-6  # both are still here


@ranks(4)
def test_logits_on_a_mesh_of_two_dims_are_refused():
    mesh = meshes(cp=2, tp=2)[0]["cp", "tp"]
    logits = DTensor.from_local(torch.zeros(1, 4, 8), mesh, [Shard(1), Shard(2)])
    with pytest.raises(ValueError, match="1-D"):
        get_logprobs_from_vocab_parallel_logits(logits, drawn(1, 4))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"tokens_BS": torch.zeros(4, dtype=torch.int64)}, "batch, tokens"),
        ({"tokens_BS": torch.zeros(1, 4)}, "integers"),
        ({"tokens_BS": {"input_ids": drawn(2, 8)}}, r"tokens is a dict: .* pass batch\['input_ids'\]"),
        ({"labels": drawn(1, 9)}, "labels has shape"),
        ({"shift_labels": drawn(1, 9)}, "shift_labels has shape"),
        ({"labels": drawn(2, 8), "shift_labels": drawn(2, 8)}, "labels and shift_labels are both given"),
        ({"tokens_BS": drawn(2, 8) + VOCAB}, r"input_ids holds \[\d+\], outside \[0, 97\): each must be a token id"),
        ({"tokens_BS": drawn(2, 8) - 3}, r"input_ids holds \[-1\], outside \[0, 97\)"),
        ({"attention_mask": torch.ones(2, 9)}, "attention_mask has shape"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, "batch of 2"),
        ({"tokens_BS": drawn(1, 8), "cu_seqlens": torch.tensor([0, 4, 9])}, "8 rows"),
    ],
)
def test_bad_arguments(arguments, message):
    model = use_attention(make("llama"))
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(model, **{"tokens_BS": drawn(2, 8)} | arguments)


def test_labels_are_those_of_transformers():
    """Unshifted, under its name; shifted ones have its name too. Its own loss is the mean over targets."""
    model = make("llama")
    tokens, labels = batch().values()
    expected = model(**batch()).loss
    found = causal_lm_loss(model, tokens, labels=labels)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    assert (found != 0).eq(targets != -100).all()
    torch.testing.assert_close(found.sum() / (targets != -100).sum(), expected)
    torch.testing.assert_close(causal_lm_loss(model, tokens, shift_labels=targets), found, rtol=0, atol=0)
    torch.testing.assert_close(causal_lm_log_probs(model, tokens, labels=labels), -found)
    # In packed documents the label behind a document's end is of the next one.
    packed, starts = tokens.view(1, -1), torch.tensor([0, 9, 18])
    both = causal_lm_loss(use_attention(model), packed, labels=labels.view(1, -1), cu_seqlens=starts)
    torch.testing.assert_close(both.view(2, 9), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tp, cp, sequence_parallel", [(2, 1, False), (2, 1, True), (1, 2, False)])
@ranks(2)
def test_token_ids_out_of_range_on_one_rank_are_refused_on_both(tp, cp, sequence_parallel):
    """Also those that are no label, the first of a row; and with tokens that the head leaves out."""
    model = parallelize(make("llama"), *meshes(cp=cp, tp=tp), sequence_parallel=sequence_parallel)
    tokens, last = drawn(2, 8), torch.distributed.get_rank() == 1
    said = r"input_ids holds \[" if last else "another rank of (tp_group was given|cp_group refused)"
    for place, bad in ((0, VOCAB), (5, -7)):
        wrong = tokens.clone()
        wrong[1, place] = bad
        for call, more in (
            (causal_lm_loss, {}),
            (causal_lm_loss, {"skip_ignored": True}),
            (causal_lm_log_probs, {"return_entropy": True}),
        ):
            with pytest.raises(ValueError, match=said):
                call(model, wrong if last else tokens, **more)
    assert error(causal_lm_loss(model, tokens), causal_lm_loss(make("llama"), tokens)) < 3e-6


def test_logits_that_a_caller_takes_whole_are_not_copied():
    taken = []

    def read(logits, _, **shard):
        taken.append(logits * 2)
        return taken[0]

    found = causal_lm_from_logits(make("llama"), batch()["input_ids"], read, columns=VOCAB)
    assert found.data_ptr() == taken[0].data_ptr()


def test_packed_documents_need_our_attention():
    with pytest.raises(ValueError, match="use_attention"):
        causal_lm_loss(make("llama"), drawn(1, 8), cu_seqlens=torch.tensor([0, 4, 8]))


@pytest.mark.parametrize("tp", [1, 2])
@ranks(2)
def test_hooks_are_not_left_out(tp):
    """Hooks of the head, or of the model, come before or after it was sharded; those of parallelism do not count."""
    tokens, (mesh, dp_cp) = drawn(2, 8), meshes(dp=2 // tp, tp=tp)
    model = parallelize(make("llama"), mesh, dp_cp, sequence_parallel=tp > 1)
    assert not is_hooked(model, "lm_head")
    true = causal_lm_log_probs(model, tokens)
    calls = []
    handle = model.lm_head.register_forward_hook(lambda module, given, out: calls.append(1) or 2 * out)
    assert is_hooked(model, "lm_head")
    with told("Llama.* makes its own logits .*its head has hooks"):
        doubled = causal_lm_log_probs(model, tokens)
    assert calls == [1]
    plain = make("llama")
    labels = next_tokens(tokens)
    assert error(doubled, log_probs(2 * plain(tokens).logits, labels)) < 3e-6
    handle.remove()
    handle = model.register_forward_pre_hook(lambda module, given, kwargs: calls.append(2), with_kwargs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error(causal_lm_log_probs(model, tokens), true) < 3e-6
    assert calls == [1, 2]
    handle.remove()
    assert not is_hooked(model, "lm_head")


@ranks(1)
def test_filters_of_a_capped_head_make_no_logits():
    model, tokens = make("gemma2"), drawn(2, 8)
    say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, plain = causal_lm_sampled_log_probs(model, tokens, top_k=3, top_p=1.0, with_plain=True)
    labels = next_tokens(tokens)
    with torch.no_grad():
        logits = model(tokens).logits.float()
    torch.testing.assert_close(found, sampled_log_probs(logits, labels, top_k=3), rtol=1e-5, atol=1e-5)
    assert error(plain, log_probs(logits, labels)) < 3e-6
