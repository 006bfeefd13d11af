"""`use_fused_loss` on the model at hand: proved at the first call, again after a change, and kept by copies."""

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Trainer

from megatron_ext import fused_loss_report, linear_cross_entropy
from megatron_ext.dtensor import causal_lm_loss, use_attention, use_fused_loss
from megatron_ext.dtensor.output import fused_loss, loss_proof
from megatron_ext.proof import compare
from megatron_ext.sequence.next_token import next_tokens
from tests.dtensor.models import (
    MOE,
    SIZES,
    VOCAB,
    batch,
    check_step,
    drawn,
    loss_and_gradients,
    make,
    meshes,
    parallelize,
    told,
)
from tests.dtensor.test_fused_loss import check_fused
from tests.dtensor.test_trainer import rows, settings
from tests.marks import slow
from tests.ranks import ranks
from tests.transparent import Transparent


@pytest.fixture
def proofs(monkeypatch):
    """The comparisons that are made."""
    made = []

    def recorded(*args):
        made.append(compare(*args))
        return made[-1]

    monkeypatch.setattr("megatron_ext.dtensor.output.loss_proof.compare", recorded)
    return made


def test_a_proof_is_made_at_the_first_call_and_after_a_change(proofs, monkeypatch):
    model, given = use_fused_loss(make("llama")), batch()
    for _ in range(2):
        model(**given).loss.backward()
        assert [str(one) for one in proofs] == [str(proofs[0])]
    assert str(proofs[0]).startswith("proved on 9 tokens, largest difference")
    model.lm_head.register_forward_hook(lambda module, given, out: out * 1.0)
    assert model(**given).logits is None
    assert len(proofs) == 2
    own = LlamaForCausalLM.forward
    expected = model(**given).loss

    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        out.loss = 3 * out.loss
        return out

    forward.__name__, forward.__qualname__ = own.__name__, own.__qualname__
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    torch.testing.assert_close(model(**given).loss, 3 * expected)
    assert len(proofs) == 3
    assert all(one.fused for one in proofs)


def test_what_differs_keeps_the_models_own_loss(monkeypatch):
    """A fused loss that were wrong would be found, and told by how much."""
    model, given = make("llama"), batch()
    expected, true = loss_and_gradients(model, **given)

    def twice(*args, **kwargs):
        return 2 * linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(loss_proof, "PLAIN", loss_proof.PLAIN._replace(hidden=twice))
    with told(r"LlamaForCausalLM keeps its own loss \(differs by a factor 0.5\)"):
        found = use_fused_loss(model)(**given)
    assert found.logits is not None
    check_step(model, found.loss, expected, true, tolerance=0.0)


def test_proofs_and_fusion_are_turned_off(proofs, monkeypatch):
    given = batch()
    assert use_fused_loss(make("llama"), proof="off")(**given).logits is None
    assert not proofs
    model = use_fused_loss(make("llama"), proof="always")
    model(**given)
    model(**given)
    assert len(proofs) == 2
    monkeypatch.setenv("MEGATRON_EXT_FUSION", "off")
    assert model(**given).logits is not None
    assert len(proofs) == 2
    with pytest.raises(ValueError, match="proof is 'never': it must be \"first\""):
        use_fused_loss(make("llama"), proof="never")


def test_saved_and_copied_models_stay_fused():
    model, given = use_fused_loss(make("llama"), cache=0), batch()
    expected = model(**given).loss
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert not torch.equal(model(**given).loss, expected)
    for twin in twins:
        found = twin(**given)
        assert torch.equal(found.loss, expected)
        assert found.logits is None
        assert use_fused_loss(twin, label_smoothing=0.1)(**given).loss != expected
        assert isinstance(twin, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"


def replica(module, factor):
    """`module` as `nn.DataParallel` replicates it, with other weights."""
    copied = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        copied._modules[name] = replica(child, factor)
    for name, parameter in module._parameters.items():
        setattr(copied, name, None if parameter is None else parameter * factor)
    return copied


def test_replicas_compute_with_their_own_weights():
    model, given = use_fused_loss(make("llama")), batch()
    model(**given)
    expected = replica(make("llama"), 1.5)(**given).loss
    found = replica(model, 1.5)(**given)
    torch.testing.assert_close(found.loss, expected)
    assert found.logits is None


@pytest.mark.parametrize("options", [{}, *slow({"fullgraph": True})], ids=str)
def test_a_compiled_forward_keeps_its_own_loss(options):
    """And says what to do; `fullgraph` has no graph to break."""
    model, given = make("llama"), batch()
    expected = use_fused_loss(model)(**given).loss  # proved before it is compiled
    compiled = torch.compile(use_fused_loss(model), backend="eager", **options)
    with told(r"Llama.* own loss .* torch.compile, .* by model.model.compile\(\)"):
        found = compiled(**given).loss
    torch.testing.assert_close(found, expected)
    assert str(fused_loss_report(model)).endswith("; its own loss in graphs of torch.compile")
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"model is compiled by torch.compile, .* model\.model\.compile\(\)"):
        use_fused_loss(torch.compile(model))


@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1}], ids=str)
def test_options_that_a_models_own_loss_lacks_are_refused(options, monkeypatch):
    (name,) = options
    model, given = use_fused_loss(make("llama"), **options), batch()
    fused = model(**given).loss
    with pytest.raises(Exception, match=rf"use_fused_loss was given {name}=0.1, .* torch.compile"):
        torch.compile(model, backend="eager")(**given)
    torch._dynamo.reset()
    assert torch.equal(model(**given).loss, fused)
    with monkeypatch.context() as off:
        off.setenv("MEGATRON_EXT_FUSION", "off")
        with pytest.raises(ValueError, match=rf"use_fused_loss was given {name}=0.1, and .*MEGATRON_EXT_FUSION=off"):
            model(**given)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with pytest.raises(ValueError, match=rf"use_fused_loss was given {name}=0.1, and Llama.* by square"):
        model(**given)
    assert model.eval()(**given).loss > 0  # which answers as before


def test_labels_are_smoothed_by_model_or_option_alone():
    model, given = make("llama"), batch()
    model.loss_function = lambda logits, labels, vocab_size, **_: torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), label_smoothing=0.2
    )
    expected = model(**given).loss
    torch.testing.assert_close(use_fused_loss(model)(**given).loss, expected)
    with pytest.raises(ValueError, match="given label_smoothing=0.1, and the model's own loss has label_smoothing=0.2"):
        use_fused_loss(model, label_smoothing=0.1)(**given)


def _checkpointed(logits, labels, vocab_size, **_):
    targets = next_tokens(labels).flatten()
    return checkpoint(lambda z: F.cross_entropy(z.flatten(0, -2), targets), logits, use_reentrant=False)


def _plain(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits.flatten(0, -2), next_tokens(labels).flatten())


@pytest.mark.parametrize("loss", [_checkpointed, *slow(_plain)], ids=["checkpointed", "compiled"])
def test_losses_that_cannot_take_promises_stay_the_models_own(loss):
    model, given = make("llama"), batch()
    model.loss_function = loss if loss is _checkpointed else torch.compile(loss, backend="eager")
    expected, true = loss_and_gradients(model, **given)
    with told("keeps its own loss .*(without its logits it raised|reads its logits)"):
        found, gradients = loss_and_gradients(use_fused_loss(model), **given)
    torch.testing.assert_close((found, gradients), (expected, true))


def test_arguments_without_names_keep_the_models_own_loss():
    class Unnamed(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model, given = Unnamed(make("llama").config), batch()
    expected = model(**given).loss
    use_fused_loss(model)
    assert model(**given).logits is None
    with pytest.warns(UserWarning, match="Unnamed keeps its own loss .its forward does not name its positional"):
        found = model(given["input_ids"], labels=given["labels"])
    torch.testing.assert_close(found.loss, expected)


def test_a_compiled_decoder_is_fused():
    model, given = make("llama"), batch()
    expected = model(**given).loss
    model.model.compile(backend="eager")
    found = use_fused_loss(model)(**given)
    torch.testing.assert_close(found.loss, expected)
    assert found.logits is None
    torch._dynamo.reset()


AUXILIARY = {
    "JetMoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "aux_loss_coef": 0.1},
    "Qwen3Moe": MOE | {"head_dim": 8, "router_aux_loss_coef": 0.1},
    "GraniteMoe": SIZES | {"num_local_experts": 4, "router_aux_loss_coef": 0.1, "logits_scaling": 3.0},
}


@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_losses_are_the_models_own(name):
    """The name of a loss's coefficient does not matter, nor where the model keeps the coefficient."""
    config = getattr(transformers, f"{name}Config")(**AUXILIARY[name])
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    plain = model(**batch()).loss
    found, _ = check_fused(model, **batch(), output_router_logits=True)
    assert found.loss != plain


def test_arguments_that_do_not_fit_are_refused_in_a_sentence():
    model, given = use_fused_loss(make("llama")), batch()
    with pytest.raises(ValueError, match=r"labels has shape \[2, 8\]: it must be that of input_ids, \[2, 9\]"):
        model(**given | {"labels": given["labels"][:, :-1]})
    one = {name: x[:1] for name, x in given.items()}
    expected = make("llama")(**one).loss
    torch.testing.assert_close(model(**one | {"labels": one["labels"][0]}).loss, expected)
    for options in ({"label_smoothing": 3.0}, {"cache": "most"}, {"chunk_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
            use_fused_loss(make("llama"), **options)


def test_packed_rows_of_our_attention_are_fused():
    model, tokens, cu_seqlens = use_attention(make("llama")), drawn(1, 80), torch.tensor([0, 30, 80])
    expected, true = loss_and_gradients(model, input_ids=tokens, cu_seqlens=cu_seqlens, labels=tokens)
    found = loss_and_gradients(use_fused_loss(model), input_ids=tokens, cu_seqlens=cu_seqlens, labels=tokens)
    torch.testing.assert_close(found, (expected, true))
    assert "fused (proved on 64 tokens" in str(fused_loss_report(model))


class KeepsLogits(LlamaForCausalLM):
    def forward(self, input_ids, **others):
        out = super().forward(input_ids, **others)
        self.kept = out.logits
        return out


def test_kept_logits_are_those_of_the_step_or_refused():
    model, given = use_fused_loss(KeepsLogits(make("llama").config)), batch()
    model(**given).loss.backward()
    kept = model.kept
    with torch.no_grad():
        expected = model(given["input_ids"]).logits
        assert kept.argmax(-1).equal(expected.argmax(-1))
    model(**given).loss.backward()
    kept = model.kept
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(ValueError, match="logits of an earlier call, .* the lm head has changed since"):
        kept.argmax(-1)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_indices_of_kept_logits_are_those_of_real_ones():
    model, given = use_fused_loss(KeepsLogits(make("llama").config)), batch()
    with torch.no_grad():
        expected = model(given["input_ids"]).logits
    mask = given["labels"] > VOCAB // 2
    for index in (mask.numpy(), mask.tolist(), mask.byte(), mask, (True, 0), (0, [1, 2]), (slice(1), torch.tensor(2))):
        model(**given)
        index = index if isinstance(index, tuple) else (index,)
        torch.testing.assert_close(model.kept[(*index, slice(5))] + 0, expected[(*index, slice(5))])


class OfLastTokens(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **others):
        out = super().forward(input_ids, **others)
        out.loss = F.cross_entropy(out.logits[:, -1], labels)
        return out


def test_labels_of_a_decoder_have_a_length_of_their_own():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    model, given = transformers.T5ForConditionalGeneration(config), {"input_ids": drawn(2, 9), "labels": drawn(2, 5)}
    expected, true = loss_and_gradients(model, **given)
    torch.testing.assert_close(loss_and_gradients(use_fused_loss(model), **given), (expected, true))
    assert "fused (proved" in str(fused_loss_report(model))


def test_labels_of_another_forward_are_its_own_affair():
    model, labels = OfLastTokens(make("llama").config), torch.tensor([3, 5])
    expected = model(drawn(2, 9), labels=labels).loss
    assert use_fused_loss(model)(drawn(2, 9), labels=labels).loss == expected


def test_a_row_of_one_embedding():
    model, labels = make("llama"), drawn(2, 1)
    given = {"inputs_embeds": torch.randn(2, 1, SIZES["hidden_size"]), "labels": labels, "shift_labels": labels}
    expected = model(**given).loss
    torch.testing.assert_close(use_fused_loss(model)(**given).loss, expected)


def test_an_embedding_that_is_more_than_a_table():
    """Losses, and log-probabilities in a loop of one's own."""
    model, given = make("llama"), batch()
    narrow = torch.nn.Embedding(VOCAB, 4)
    model.model.embed_tokens = torch.nn.Sequential(narrow, torch.nn.Linear(4, SIZES["hidden_size"]))
    expected, true = loss_and_gradients(model, **given)
    found = causal_lm_loss(model, given["input_ids"], labels=given["labels"])
    torch.testing.assert_close(found.sum() / (next_tokens(given["labels"]) != -100).sum(), expected)
    torch.testing.assert_close(loss_and_gradients(use_fused_loss(model), **given), (expected, true))


class OfImages(LlamaForCausalLM):
    """A model with token ids below 0 where images stand, as those of LLaVA's first code."""

    def forward(self, input_ids=None, images=None, **kwargs):
        embedded = self.get_input_embeddings()(input_ids.clamp(min=0))
        embedded = embedded if images is None else embedded.where((input_ids >= 0).unsqueeze(-1), images[:, None])
        return super().forward(inputs_embeds=embedded, **kwargs)


def test_token_ids_of_another_forward_may_stand_for_images():
    model, given = OfImages(make("llama").config), batch()
    given["input_ids"][:, 1] = -200
    given["images"] = torch.randn(len(given["input_ids"]), SIZES["hidden_size"])
    expected, true = loss_and_gradients(model, **given)
    loss, gradients = loss_and_gradients(use_fused_loss(model), **given)
    torch.testing.assert_close((loss, gradients), (expected, true))
    assert "fused (proved" in str(fused_loss_report(model))


@pytest.mark.parametrize("way", ["label_smoothing_factor", "compute_loss_func"])
def test_a_trainer_that_takes_the_labels_out_is_told(way, tmp_path):
    def compute(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean()

    arguments = settings(tmp_path, max_steps=1, **({way: 0.1} if way == "label_smoothing_factor" else {}))
    more = {way: compute} if way == "compute_loss_func" else {}
    trainer = Trainer(use_fused_loss(make("llama")), arguments, train_dataset=rows(), **more)
    fused_loss._say_that_labels_are_missing.cache_clear()
    with pytest.warns(UserWarning, match="LlamaForCausalLM was called in training without labels, so its logits"):
        trainer.train()


def test_each_line_that_calls_without_labels_is_told_once():
    model, tokens = use_fused_loss(make("llama")), drawn(2, 8)
    with warnings.catch_warnings(record=True, action="always", category=UserWarning) as told:
        for _ in range(2):
            model(tokens)
            model(input_ids=tokens)
    first = test_each_line_that_calls_without_labels_is_told_once.__code__.co_firstlineno
    assert [(each.filename, each.lineno - first) for each in told] == [(__file__, 4), (__file__, 5)]


def test_batches_of_16_bits_are_proved():
    """The proof computes in fp32, whatever autocast or the model's dtype."""
    given = {"input_ids": drawn(2, 80), "labels": drawn(2, 80)}
    for autocast in (False, True):
        model = make("gemma2") if autocast else make("gemma2").bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = model(**given).loss
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                found = use_fused_loss(model, proof="always")(**given)
        torch.testing.assert_close(found.loss.float(), expected.float(), rtol=5e-3, atol=0)
        (proof,) = fused_loss_report(model).proofs
        assert proof.tokens == 64
        assert proof.largest_difference < 1e-5


def test_a_forward_of_another_model_computes_with_its_weights():
    model, other, given = make("llama"), replica(make("llama"), 1.5), batch()
    expected = other(**given).loss
    model.forward = other.forward
    torch.testing.assert_close(use_fused_loss(model)(**given).loss, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_transparent_decorator_of_a_forward_is_called(when):
    """An object of wrapt's that doubles the loss says of itself that it is the model's own method."""
    model, given = make("llama"), batch()
    expected = 2 * model(**given).loss
    if when == "after":
        use_fused_loss(model)(**given)
    model.forward = Transparent(model.forward)
    torch.testing.assert_close((model if when == "after" else use_fused_loss(model))(**given).loss, expected)


def test_threads_share_a_fused_model():
    """Some call it with labels, others for its logits."""
    model, given = make("llama"), batch()
    expected, tokens = model(**given), {"input_ids": given["input_ids"]}
    use_fused_loss(model)
    before = dict(vars(model))

    def work(with_labels):
        for _ in range(10):
            found = model(**given if with_labels else tokens)
            if with_labels:
                torch.testing.assert_close(found.loss, expected.loss)
            else:
                assert torch.equal(found.logits, expected.logits)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (True, False, True, False)))
    assert vars(model) == before


@ranks(2)
def test_a_hook_of_a_sharded_head_is_not_left_out():
    """FSDP2 and tensor parallelism have hooks of their own there."""
    given, plain = batch(), make("llama")
    plain.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    expected = plain(**given).loss
    for tp in (1, 2):
        model = use_fused_loss(parallelize(make("llama"), *meshes(dp=2 // tp, tp=tp)))
        model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
        if tp == 1:
            torch.testing.assert_close(model(**given).loss.float(), expected)
            continue
        with pytest.raises(ValueError, match=r"has hooks, which may read its logits\); call .*causal_lm_loss"):
            model(**given)


def test_proofs_are_read_while_a_thread_makes_another(monkeypatch):
    """Reports are read while training goes on, where a call of another kind adds an owner."""
    model = use_fused_loss(make("llama"), in_eval=True)
    model(**batch())
    made = fused_loss._PROOFS.made

    def meanwhile(owner):
        vars(model)[fused_loss.FUSED].owner({}, False)
        return made(owner)

    monkeypatch.setattr(fused_loss._PROOFS, "made", meanwhile)
    assert [proof.verdict for proof in fused_loss.proofs_of(model)] == ["proved"]
