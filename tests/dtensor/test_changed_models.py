"""Models with a fused loss that change between calls, or whose code looks further than its arguments: each answers as
the same model without the fused loss does, with the same gradients."""

import contextlib
import copy
import functools
from collections import defaultdict
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron_ext import fused_loss_report
from megatron_ext.dtensor import restore_own_loss, use_fused_loss
from megatron_ext.dtensor.output.reads import say_once
from tests.dtensor.models import (
    VOCAB,
    assert_same,
    batch,
    check_gradients,
    check_step,
    error,
    loss_and_gradients,
    make,
    told,
)
from tests.dtensor.test_fused_loss import Delegating


class ScaledHead(nn.Linear):
    """A head whose logits depend on what it holds beside its weight."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.scale, self.dropout = linear.weight, 1.0, 0.0
        self.register_buffer("factor", torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, hidden):
        hidden = F.dropout(hidden, self.dropout, self.training)
        return F.linear(hidden, self.weight) * self.scale * self.factor * self.frozen


def with_scaled_head(kind="llama"):
    model = make(kind)
    model.lm_head = ScaledHead(model.lm_head)
    return model


def read(way, model):
    return loss_and_gradients(model, way, **batch())


CHANGES = {
    "attribute": lambda head: setattr(head, "scale", 3.0),
    "buffer": lambda head: head.factor.fill_(3.0),
    "frozen parameter": lambda head: head.frozen.detach().fill_(3.0),
    "dropout": lambda head: setattr(head, "dropout", 0.5),
}


@pytest.mark.parametrize("way", ["use_fused_loss", "read"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_head_holds_is_looked_at_again(change, way):
    true, model = with_scaled_head(), with_scaled_head()
    model = use_fused_loss(model) if way == "use_fused_loss" else model
    before = read(way, model)[0]
    for one in (true, model):
        CHANGES[change](one.lm_head)
    torch.manual_seed(3)
    expected = loss_and_gradients(true, **batch())
    torch.manual_seed(3)
    assert_same(read(way, model), expected)
    assert error(before, expected[0]) > 1e-2


class BorrowingHead(nn.Module):
    """A head with the embedding's weight, which is no parameter of its own."""

    def __init__(self, rows):
        super().__init__()
        self.rows = [rows]

    @property
    def weight(self):
        return self.rows[0].weight

    def forward(self, hidden):
        return F.linear(hidden, self.weight)


@pytest.mark.parametrize("way", ["use_fused_loss", "read"])
def test_a_head_without_parameters(way):
    model = make("llama")
    model.lm_head = BorrowingHead(model.model.embed_tokens)
    expected = loss_and_gradients(model, **batch())
    assert_same(read(way, use_fused_loss(model) if way == "use_fused_loss" else model), expected)


class PowerHead(nn.Linear):
    """A head that is told more than hidden states."""

    power = 1.0

    def forward(self, hidden, power=None):
        return super().forward(hidden) * (self.power if power is None else power)


class TellingModel(LlamaForCausalLM):
    """A model that tells its head a number, as an argument or, with `sets`, as an attribute."""

    power, sets = None, False

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        if self.sets and self.power is not None:
            self.lm_head.power = self.power
        told = {} if self.sets or self.power is None else {"power": self.power}
        logits = self.lm_head(hidden, **told)
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("way", ["use_fused_loss", "read"])
@pytest.mark.parametrize("first", [None, 2.0])
@pytest.mark.parametrize("sets", [False, True])
def test_a_head_that_is_told_more_than_hidden_states(first, sets, way):
    model = TellingModel(make("llama").config)
    model.sets = sets
    model.lm_head = PowerHead(model.lm_head.in_features, VOCAB, bias=False)
    model = use_fused_loss(model) if way == "use_fused_loss" else model
    for power in (first, 2.0, 3.0):
        model.power = power
        expected = loss_and_gradients(restore_own_loss(copy.deepcopy(model)), **batch())
        assert_same(read(way, model), expected)


def test_dropout_of_a_head_first_called_in_eval_mode():
    model, true = use_fused_loss(with_scaled_head(), in_eval=True), with_scaled_head()
    for one in (true, model):
        one.lm_head.dropout = 0.5
        one.eval()(**batch())
        one.train()
    torch.manual_seed(3)
    expected, _ = loss_and_gradients(true, **batch())
    torch.manual_seed(3)
    assert torch.equal(model(**batch()).loss, expected)


def test_a_training_step_after_another_makes_no_new_proof(monkeypatch):
    model = use_fused_loss(with_scaled_head(), in_eval=True)
    model(**batch())
    model.eval()(**batch())
    monkeypatch.setattr("megatron_ext.dtensor.output.loss_proof.compare", None)
    for _ in range(2):
        assert model.train()(**batch()).logits is None
        assert model.eval()(**batch()).logits is None


def test_functions_replaced_in_torch_after_a_proof_are_called(monkeypatch):
    true, model = make("llama"), use_fused_loss(make("llama"))
    model(**batch())
    own, vocabulary = F.linear, true.lm_head.out_features
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: own(x, w, b) * (2 if len(w) == vocabulary else 1))
    expected, gradients = loss_and_gradients(true, **batch())
    check_step(model, model(**batch()).loss, expected, gradients)


def of_all_modules(model):
    return register_module_forward_hook(lambda module, _, out: 2 * out if module is model.lm_head else None)


def of_backward(model):
    return model.lm_head.register_full_backward_hook(lambda module, given, out: (2 * given[0],))


@pytest.mark.parametrize("hook", [of_all_modules, of_backward])
@pytest.mark.parametrize("first", ["a step", "the hook"])
def test_hooks_that_no_stand_in_can_run_leave_a_model_its_loss(hook, first):
    true, model = make("llama"), use_fused_loss(make("llama"))
    if first == "a step":
        model(**batch())
    with hook(true):
        expected, gradients = loss_and_gradients(true, **batch())
    say_once.cache_clear()
    with hook(model):
        with pytest.warns(UserWarning, match="hooks"):
            found = model(**batch()).loss
        check_step(model, found, expected, gradients, tolerance=0.0)


def test_attributes_set_during_a_forward_stay():
    """Calls that a forward counts on itself, and a loss on the model."""
    model = use_fused_loss(Delegating(make("llama").config))
    model.losses, own = 0, model.loss_function

    def loss_function(*args, **kwargs):
        model.losses += 1
        return own(*args, **kwargs)

    model.loss_function = loss_function
    model(**batch())
    before = model.calls, model.losses
    for _ in range(3):
        out = model(**batch())
    assert (model.calls, model.losses) == (before[0] + 3, before[1] + 3)
    assert out.beside == model.calls


class Counting(nn.Module):
    """A norm that counts its calls in a buffer and attributes, as batch norms and observers do, and keeps a loss."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.losses, self.log = inner, 0, [], defaultdict(list)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", None)

    def forward(self, x):
        self.calls += 1
        self.losses.append(x.square().mean())
        self.log["largest"].append(x.detach().max())
        self.seen.add_(x[..., 0].numel())
        largest = x.detach().abs().max()
        self.largest = largest if self.largest is None else torch.maximum(0.9 * self.largest, largest)
        return self.inner(x) / self.largest


def test_a_proof_leaves_the_state_of_modules_as_it_was():
    """Three runs of a sample are no steps of a running statistic."""
    true, model = make("llama"), use_fused_loss(make("llama"))
    for one in (true, model):
        one.model.norm = Counting(one.model.norm)
    for _ in range(2):
        expected, gradients = loss_and_gradients(true, **batch())
        check_step(model, model(**batch()).loss, expected, gradients)
    assert fused_loss_report(model).proofs[0].fused
    counted = model.model.norm
    assert (counted.calls, counted.seen.item()) == (2, 2 * batch()["labels"].numel())
    assert torch.equal(counted.largest, true.model.norm.largest)
    torch.testing.assert_close((counted.losses, counted.log), (true.model.norm.losses, true.model.norm.log))


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_is_resized_after_a_proof(tied):
    """Weights change in place, which a graph that a proof left behind would not know."""
    gradients = []
    for model in (make("llama", tied), use_fused_loss(make("llama", tied))):
        model(**batch()).loss.backward()
        model.zero_grad()
        torch.manual_seed(3)
        model.resize_token_embeddings(model.config.vocab_size + 32)
        gradients.append(loss_and_gradients(model, **batch())[1])
    assert all(error(gradients[1][name], true) < 3e-6 for name, true in gradients[0].items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_inside_of_a_checkpoint(reentrant):
    true, model = make("llama"), use_fused_loss(make("llama"))
    given, losses = batch(), []
    for one in (true, model):
        rows = one.model.embed_tokens(given["input_ids"])

        def loss(rows, labels, one=one):
            return one(inputs_embeds=rows, labels=labels).loss

        losses.append(checkpoint(loss, rows, given["labels"], use_reentrant=reentrant))
        losses[-1].backward()
    assert error(losses[1], losses[0]) < 3e-6
    check_gradients(model, {name: p.grad for name, p in true.named_parameters()})
    assert fused_loss_report(model).proofs[0].fused


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return 2 * logits

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class AddedUp(Doubled):
    @staticmethod
    def forward(ctx, logits):
        return logits + logits


@pytest.mark.parametrize("function", [Doubled, AddedUp])
@pytest.mark.parametrize("made", [False, True])
def test_a_function_of_the_logits_of_some_batches(made, function):
    """The proof's sample has too few tokens for the function to be called."""

    def loss(logits, labels, vocab_size, **others):
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if len(labels) > 64:
            logits = function.apply(logits + 0 if made else logits)
        return F.cross_entropy(logits, labels)

    given = {name: x.repeat(12, 1) for name, x in batch().items()}
    plain, model = make("llama"), use_fused_loss(make("llama"))
    plain.loss_function = model.loss_function = loss
    if made:
        expected, true = loss_and_gradients(plain, **given)
        found = model(**given).loss
        found.backward()
        assert error(found, expected) < 3e-6
        check_gradients(model, true)
    else:
        with pytest.raises(ValueError, match=r"an autograd.Function was applied to logits .* apply it to logits \+ 0"):
            model(**given).loss.backward()


class ThirdOfGradients(nn.Linear):
    def forward(self, hidden):
        hidden = hidden / 3 + hidden.detach() * 2 / 3
        return super().forward(hidden)


class CheckpointedHead(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        def loss_of(hidden):
            return self.loss_function(logits=self.lm_head(hidden), labels=labels, vocab_size=VOCAB)

        hidden = self.model(input_ids=input_ids).last_hidden_state
        return CausalLMOutputWithPast(loss=checkpoint(loss_of, hidden, use_reentrant=True))


def test_gradients_of_a_head_in_a_reentrant_checkpoint():
    model = CheckpointedHead(make("llama").config)
    model.lm_head = ThirdOfGradients(model.lm_head.in_features, VOCAB, bias=False)
    expected = loss_and_gradients(model, **batch())
    assert_same(loss_and_gradients(use_fused_loss(model), **batch()), expected)


class ModelWithCheckpointedForward(LlamaForCausalLM):
    """A checkpoint holds the forward of its head, and not the head."""

    power = None

    def forward(self, input_ids=None, labels=None, **kwargs):
        if self.power is not None:
            self.lm_head.power = self.power
        head, loss = self.lm_head.forward, self.loss_function

        def loss_of(hidden):
            return loss(logits=head(hidden), labels=labels, vocab_size=VOCAB)

        hidden = self.model(input_ids=input_ids).last_hidden_state
        return CausalLMOutputWithPast(loss=checkpoint(loss_of, hidden, use_reentrant=False))


def test_a_checkpoint_around_the_forward_of_a_head():
    model = ModelWithCheckpointedForward(make("llama").config)
    model.lm_head = PowerHead(model.lm_head.in_features, VOCAB, bias=False)
    model = use_fused_loss(model)
    for power in (None, 2.0, 3.0):
        model.power = power
        expected = loss_and_gradients(restore_own_loss(copy.deepcopy(model)), **batch())
        assert_same(loss_and_gradients(model, **batch()), expected)
        assert power is not None or fused_loss_report(model).proofs[0].fused


@pytest.mark.parametrize("proved", [False, True])
def test_transforms_of_torch_func_see_the_models_own_loss(proved):
    """Gradients of each row, as data attribution takes them: nothing can be compared inside, nor our head be run."""
    model, given = make("llama"), batch()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def gradients_of_rows(model):
        def loss(parameters, ids, labels):
            row = {"input_ids": ids[None], "labels": labels[None]}
            return torch.func.functional_call(model, parameters, (), row).loss

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *given.values())

    true, fused = gradients_of_rows(model), use_fused_loss(copy.deepcopy(model))
    if proved:
        fused(**given)
    with told("torch.func"):
        found = gradients_of_rows(fused)
    assert all(torch.equal(found[name], true[name]) for name in true)


def test_a_head_of_whole_numbers_keeps_its_logits():
    class Quantised(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

        def forward(self, hidden):
            return hidden @ (self.weight * self.scale).T

    true, model = make("llama"), use_fused_loss(make("llama"))
    for one in (true, model):
        one.lm_head = Quantised(one.lm_head)
    expected, gradients = loss_and_gradients(true, **batch())
    with told("its lm head holds torch.int8"):
        found = model(**batch()).loss
    check_step(model, found, expected, gradients, tolerance=0.0)


def test_inference_mode_fuses_and_spoils_no_later_call():
    expected = make("llama")(**batch()).loss
    for mode in (torch.inference_mode, torch.no_grad):
        model = use_fused_loss(make("llama"), in_eval=True).eval()
        with torch.inference_mode():
            given = {name: x.clone() for name, x in batch().items()}
            first = model(**given)
        with mode():
            second = model(**batch())
        for found in (first, second, model(**batch())):
            assert error(found.loss, expected) < 3e-6
            assert found.logits is None


@pytest.mark.parametrize("chosen", [3, torch.arange(2, 5)])
def test_logits_to_keep_beside_all_labels_is_refused(chosen):
    model, given = use_fused_loss(make("llama")), batch()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"\[2, 9\], and with logits_to_keep the model makes logits of 3 positions"
        ):
            model(**given, logits_to_keep=chosen)
    own = make("llama")
    labels = given["labels"][:, -3:] if isinstance(chosen, int) else given["labels"][:, chosen]
    expected = own(given["input_ids"], labels=labels, logits_to_keep=chosen).loss
    assert error(model(given["input_ids"], labels=labels, logits_to_keep=chosen).loss, expected) < 3e-6


@pytest.mark.filterwarnings("error:the lm head or the loss of a model")
def test_a_head_that_changes_at_each_call_is_warned_of_once():
    model = with_scaled_head()
    use_fused_loss(model)
    for call in range(12):
        model.lm_head.note = call
        with pytest.warns(UserWarning, match="has changed 10 times") if call == 10 else contextlib.nullcontext():
            model(**batch())


def test_a_forward_that_was_wrapped_on_the_model_is_undone():
    """Accelerate's autocast wraps a forward like this, and a Trainer in bf16 leaves the wrapper on the model."""
    plain, model = make("llama"), make("llama")
    use_fused_loss(model)
    forward = model.forward.__func__
    model.forward = MethodType(lambda self, *args, **kwargs: forward(self, *args, **kwargs), model)
    for fused in (True, False, True):
        if not fused:
            restore_own_loss(model)
        elif "was not called" in str(fused_loss_report(model)):
            use_fused_loss(model)
        found = model(**batch())
        assert (found.logits is None) == fused
        torch.testing.assert_close(found.loss, plain(**batch()).loss)


def shifts_a_column(logits, labels, vocab_size, **others):
    """A loss of a view that was taken before the logits are changed in place, with some labels alone."""
    flat, wide = logits.view(-1, vocab_size), logits.float().clone()
    if labels[0, 0] == -100:
        logits[..., 7] -= 3
        logits.view(-1, vocab_size).mul_(2)
    return F.cross_entropy(flat[:-1], labels.flatten()[1:]) + F.cross_entropy(wide[0, :-1], labels[0, 1:])


def without_gradient_of_some(logits, labels, vocab_size, **others):
    with torch.set_grad_enabled(bool(labels[0, 0] != -100)):
        flat = 2 * logits.view(-1, vocab_size)
    return F.cross_entropy(flat[:-1], labels.flatten()[1:]) + 1e-3 * logits[0, 0].square().sum()


@pytest.mark.parametrize("loss", [shifts_a_column, without_gradient_of_some])
def test_a_loss_that_does_more_with_some_batches(loss):
    masked, plain, model = batch(), make("llama"), use_fused_loss(make("llama"))
    plain.loss_function = model.loss_function = loss
    for given in (masked | {"labels": masked["input_ids"]}, masked):
        expected, true = loss_and_gradients(plain, **given)
        found = model(**given).loss
        assert error(found, expected) < 3e-6
        found.backward()
        assert {name for name, x in model.named_parameters() if x.grad is not None} == true.keys()
        check_gradients(model, true)
        model.zero_grad()


def in_fp32_without_gradient(logits, labels, vocab_size, **others):
    with torch.no_grad():
        logits = logits.float()
    return F.cross_entropy(logits.view(-1, vocab_size)[:-1], labels.flatten()[1:])


def test_logits_of_fp32_that_are_cast_to_it_keep_their_gradient():
    """Torch's cast gives the tensor itself, under `no_grad` too."""
    plain, model = make("llama"), use_fused_loss(make("llama"), proof="off")
    plain.loss_function = model.loss_function = in_fp32_without_gradient
    expected, true = loss_and_gradients(plain, **batch())
    found = model(**batch())
    assert found.logits is None
    check_step(model, found.loss, expected, true)


def test_a_spectral_norm_of_the_head_takes_one_step_a_call():
    """Each read of its weight in training changes the vectors that it is made of."""
    plain, model = make("llama"), make("llama")
    for each in (plain, model):
        torch.manual_seed(2)
        nn.utils.parametrizations.spectral_norm(each.lm_head, n_power_iterations=1)
    use_fused_loss(model)
    for _ in range(2):
        expected, true = loss_and_gradients(plain, **batch())
        found, gradients = loss_and_gradients(model, **batch())
        assert torch.equal(found, expected)
        assert all(torch.equal(gradients[name], x) for name, x in true.items())


def test_accelerate_unwraps_a_model_to_its_fused_forward():
    """The model was prepared in bf16 before `use_fused_loss`; its loss stays fused."""
    from accelerate.utils import extract_model_from_parallel

    plain, model = make("llama"), make("llama")
    model._original_forward, own = model.forward, model.forward.__func__
    model.forward = MethodType(functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs)), model)
    found = extract_model_from_parallel(use_fused_loss(model), keep_fp32_wrapper=False)(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, plain(**batch()).loss)
