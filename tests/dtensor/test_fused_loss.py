"""`model(input_ids, labels=labels).loss` without logits: transformers' own losses and gradients, whatever calls it."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron_ext import linear_cross_entropy
from megatron_ext.dtensor import causal_lm_loss, parallelize, use_fused_loss
from megatron_ext.dtensor.output.stand_ins import standing_in
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens
from tests.batch_invariant_mode import fixed_calls
from tests.dtensor.models import (
    VOCAB,
    batch,
    check_gradients,
    check_step,
    drawn,
    error,
    loss_and_gradients,
    make,
    meshes,
    told,
)
from tests.dtensor.models import parallelize as sharded
from tests.dtensor.test_causal_lm import Squared, adapted, largest_logits
from tests.marks import slow
from tests.ranks import ranks


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "gemma3_multimodal", "mixtral"])
@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": torch.tensor(31)}, {"num_items_in_batch": 31}])
def test_loss_and_gradients_are_those_of_transformers(kind, given):
    model = make(kind, tied=kind == "llama")
    aux = {"output_router_logits": True} if kind == "mixtral" else {}
    assert not aux or model.router_aux_loss_coef > 0
    found, _ = check_fused(model, **batch(), **given, **aux)
    assert (found.get("aux_loss") is None) == (not aux)


def check_fused(model, **given):
    """Loss and gradients of the model, and no logits; gives the output and the true gradients."""
    expected, true = loss_and_gradients(model, **given)
    assert use_fused_loss(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = model(**given)
    assert found.logits is None
    check_step(model, found.loss, expected, true)
    return found, true


def test_no_logits_are_made():
    model = use_fused_loss(make("llama"), cache=0, chunk_tokens=8)
    with largest_logits() as found:
        model(**batch(4, 32)).loss.backward()
    assert 0 < found.size <= 32 * VOCAB  # of a chunk, or the weight's transpose
    with largest_logits() as found:
        model.eval()(**batch(4, 32))
    assert found.size == 4 * 32 * VOCAB


def test_what_else_a_forward_takes_and_gives():
    model, given = make("llama"), batch()
    mask = torch.ones_like(given["input_ids"])
    mask[1, 7:] = 0
    expected = model(**given, attention_mask=mask, output_hidden_states=True)
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    use_fused_loss(model)
    found = model(given["input_ids"], mask, labels=given["labels"], output_hidden_states=True)
    torch.testing.assert_close(found.loss, expected.loss)
    assert len(found.hidden_states) == len(expected.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states, strict=True))
    torch.testing.assert_close(model(given["input_ids"], mask, shift_labels=shifted).loss, expected.loss)
    first = model(**given, attention_mask=mask, return_dict=False)[0]
    torch.testing.assert_close(first, expected.loss)
    assert torch.equal(model(given["input_ids"], mask).logits, expected.logits)
    assert torch.equal(model.eval()(**given, attention_mask=mask).logits, expected.logits)
    assert use_fused_loss(model, in_eval=True)(**given, attention_mask=mask).logits is None
    assert "num_items_in_batch" in str(inspect.signature(model.forward)) or "kwargs" in str(
        inspect.signature(model.forward)
    )


def test_options_of_the_head():
    model, given = make("llama"), batch()
    logits = model(given["input_ids"]).logits[:, :-1].flatten(0, 1)
    labels = given["labels"][:, 1:].flatten()
    counts = labels != -100
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    expected = expected + 0.01 * (logits.logsumexp(-1)[counts] ** 2).mean()
    use_fused_loss(model, label_smoothing=0.1, z_loss=0.01, skip_ignored=True)
    torch.testing.assert_close(model(**given).loss, expected)


def _with_a_loss_of_its_own(model):
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    return model


class Weighted(LlamaForCausalLM):
    """A model with class weights, labels that are shifted already, and the loss of a second head."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        weight = torch.linspace(0.5, 1.5, VOCAB)
        out.loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), weight=weight)
        return out


class Twice(LlamaForCausalLM):
    """A model whose scale before the head is no scale of the logits' alone: its head has a bias."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0] * 3.0
        logits = self.lm_head(hidden)[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB).float(), labels[:, 1:].flatten(), reduction="sum")
        loss = loss / 7 + 0.01 * hidden.square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Cut(LlamaForCausalLM):
    """A model that cuts columns off behind its head, and caps what remains."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs)[0])[..., : VOCAB - 5]
        logits = torch.tanh(logits / 2.0 / 3.0) * 3.0
        loss = self.loss_function(logits=logits, labels=labels.clamp(max=VOCAB - 6), vocab_size=VOCAB - 5)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Hidden(LlamaForCausalLM):
    """A model that makes logits, and has a loss of its hidden states."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        return CausalLMOutputWithPast(loss=hidden.square().mean(), logits=self.lm_head(hidden))


class Delegating(LlamaForCausalLM):
    """A model that adds a term to the loss of its base class."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        out = super().forward(*args, **kwargs)
        out.loss = 2 * out.loss + 0.5
        out.beside = self.calls
        return out


def _hooked(model):
    model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    return model


def with_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    return model


FUSED = {
    "gpt2": lambda: make("gpt2"),
    "llama4": lambda: make("llama4"),
    "a hook of the head": lambda: _hooked(make("llama")),
    "a scale before the head": lambda: with_bias(Twice(make("llama").config)),
    "columns cut off": lambda: Cut(make("llama").config),
    "a term beside the loss": lambda: Delegating(make("llama").config),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_forward_of_the_models_own_is_followed(name):
    torch.manual_seed(1)
    check_fused(FUSED[name](), **batch())


@pytest.mark.parametrize(
    "change,said",
    [
        (adapted, "LlamaForCausalLM keeps its own loss .its gradient of "),
        (_with_a_loss_of_its_own, r"LlamaForCausalLM keeps its own loss \(its forward reads its logits by square\)"),
        (lambda model: Squared(model.config), "Squared keeps its own loss .its forward reads its logits by pow"),
        (
            lambda model: Hidden(model.config),
            "Hidden keeps its own loss .it is no cross entropy of the logits",
        ),
        (lambda model: Weighted(model.config), "Weighted keeps its own loss .its forward reads its logits by cross_en"),
    ],
)
def test_what_is_not_understood_keeps_its_logits_and_says_so(change, said):
    check_left_alone(change(make("llama")), said, **batch())


def check_left_alone(model, said, **given):
    """The loss is bit by bit that of the model's own logits."""
    expected = model(**given).loss
    with told(said):
        found = use_fused_loss(model)(**given)
    assert found.logits is not None
    assert torch.equal(found.loss, expected)


def mine(given):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {name: x.chunk(size)[rank] for name, x in given.items()}


WRAPS = ["ddp", "fsdp2", "fsdp2, the head by itself", "fsdp2, the head's output rounded", "parallelize"]


@pytest.mark.parametrize("wrap", WRAPS)
@ranks(2)
def test_data_parallel(wrap):
    check_data_parallel(make("llama", tied="rounded" not in wrap), wrap)


def check_data_parallel(model, wrap):
    """Each rank has its rows; the gradient is that of the mean over all targets."""
    given = batch(4)
    count = (given["labels"][:, 1:] != -100).sum()
    _, true = loss_and_gradients(model, **given)
    if wrap in ("fsdp2", "fsdp2, the head by itself"):
        for layer in model.get_decoder().layers:
            fully_shard(layer)
    if wrap == "ddp":
        wrapped = DistributedDataParallel(use_fused_loss(model))
    elif wrap == "fsdp2":
        wrapped = fully_shard(use_fused_loss(model))
    elif wrap == "fsdp2, the head by itself":  # as accelerate does from 1.15 on
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        tail = [model.model.norm, *([model.model.embed_tokens] if tied else []), model.lm_head]
        fully_shard(tail, reshard_after_forward=False)
        wrapped = use_fused_loss(fully_shard(model))
    elif wrap == "fsdp2, the head's output rounded":
        fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        wrapped = use_fused_loss(fully_shard(model))
    else:
        mesh, _ = meshes(dp=2)
        wrapped = use_fused_loss(parallelize(model, mesh, torch.float32))
    found = wrapped(**mine(given), num_items_in_batch=count)
    assert found.logits is None
    (found.loss * 2).backward()  # gradients are averaged over ranks
    check_gradients(model, true)


@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)])
@ranks(2)
def test_tensor_parallel(sequence_parallel):
    given, model = batch(2, 10), make("gemma2", tied=True)
    expected, true = loss_and_gradients(model, **given)
    mesh, _ = meshes(tp=2)
    parallelize(model, mesh, torch.float32, sequence_parallel=sequence_parallel)
    with pytest.raises(ValueError, match="labels is given, but this model does not take labels"):
        model(**given)
    use_fused_loss(model)
    check_step(model, model(**given).loss, expected, true)


@ranks(2)
def test_context_parallel_models_are_told_what_to_call():
    mesh, _ = meshes(cp=2)
    model = use_fused_loss(parallelize(make("llama"), mesh, torch.float32))
    with pytest.raises(ValueError, match="labels: logits are split over ranks; call .*causal_lm_loss"):
        model(**batch(2, 8))


def test_what_is_no_model_and_token_ids_out_of_range():
    for model in ("meta-llama/Llama-3.2-1B", make("llama").config):
        for call in (use_fused_loss, lambda model: causal_lm_loss(model, batch()["input_ids"])):
            with pytest.raises(ValueError, match=rf"model is {type(model).__name__}: .* load it first"):
                call(model)
    with pytest.raises(ValueError, match="LlamaModel has no lm head"):
        use_fused_loss(make("llama").model)
    given = batch()
    with pytest.raises(ValueError, match=r"input_ids holds \[\d+\], outside \[0, \d+\): each must be a token id"):
        use_fused_loss(make("llama"))(**given | {"input_ids": given["input_ids"] + 1000})


BY_ROWS = {
    "model.embed_tokens": "embedding_rowwise",
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


@pytest.mark.parametrize(
    "kind, tp, cp, options",
    [
        ("llama", 2, 1, {}),
        ("gemma3", 2, 1, {"sequence_parallel": True}),
        ("gemma3", 2, 1, {"custom_parallel_plan": BY_ROWS}),
        ("granite", 1, 2, {}),
    ],
)
@ranks(2)
def test_token_ids_out_of_range_on_one_rank_are_refused_on_both(kind, tp, cp, options):
    check_ids_of_one_rank(kind, tp, cp, options)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@ranks(4)
def test_token_ids_out_of_range_on_one_rank_are_refused_on_all(kind):
    check_ids_of_one_rank(kind, 2, 2, {"sequence_parallel": True, "activation_checkpointing": True})


def check_ids_of_one_rank(kind, tp, cp, options):
    """Calls the model's own forward with a bad id at a row's start or later, with labels (if cp is 1) and without; then
    the model goes on."""
    mesh, dp_cp = meshes(cp=cp, tp=tp)
    plain = make(kind)
    model = use_fused_loss(sharded(make(kind), mesh, dp_cp, **options))
    parts, tokens = SequenceParts(mesh["cp"].get_group()), drawn(2, 8)
    for last in (0, cp * tp - 1):
        for place, bad in ((0, VOCAB), (2, -7)):
            own = parts.split(tokens, 1).clone()
            if at_fault := torch.distributed.get_rank() == last:
                own[1, place] = bad
            said = r"input_ids holds \[" if at_fault else "another rank of (tp_group was|cp_group ref)"
            for more in ({}, {"labels": tokens}) if cp == 1 else ({},):
                with pytest.raises(ValueError, match=said):
                    model(input_ids=own, **more)
    logits = model(input_ids=parts.split(tokens, 1)).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    assert error(parts.gather(logits, 1), plain(input_ids=tokens).logits) < 1e-5
    assert error(causal_lm_loss(model, tokens), causal_lm_loss(plain, tokens)) < 3e-6


def test_bits_of_a_loss_in_the_models_forward():
    found = []
    with fixed_calls() as calls:
        for chunk in (None, 3):
            model = use_fused_loss(make("llama"), bits="batch", chunk_tokens=chunk)
            calls.clear()  # of the options' check
            loss = model(**batch()).loss
            loss.backward()
            found.append((loss.detach(), *(p.grad for p in model.parameters())))
            assert len(calls) == 1
    assert all(map(torch.equal, *found))
    model = make("llama")
    hidden = model.model(input_ids=batch()["input_ids"], use_cache=False)[0]
    targets = next_tokens(batch()["labels"])
    losses = linear_cross_entropy(hidden, model.lm_head.weight, targets, bits="batch")
    assert torch.equal(found[0][0], losses.sum() / (targets != -100).sum())


def test_what_a_forward_sets_comes_back_to_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    model.kept = kept = object()
    around = torch.nn.Sequential(model)
    model.gone = around.count = 1
    with standing_in(around, "0.1", torch.nn.Identity()) as stub:
        stub[0].seen = 5
        stub[0].made = made = torch.nn.Identity()
        del stub[0].gone
        around.count += 1
    assert (model.seen, model.kept, around.count) == (5, kept, 2)
    assert model.made is made
    assert isinstance(model[1], torch.nn.Linear)
    assert not hasattr(model, "gone")
