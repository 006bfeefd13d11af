"""Values that a proved loss or output layer reads beside its arguments: once they change, the proof holds no longer."""

import functools
import gc
import weakref
from unittest import mock

import pytest
import torch

from megatron_ext.megatron.fused_loss import fusion_proof
from megatron_ext.megatron.fused_loss.model_methods import label_argument
from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import grouped
from tests.megatron.patching import assert_same, batch, grads_of, later_gpt, on_gpt, patched, run

factor = 1.0


class Schedule:
    weight = 1.0

    def now(self):
        return self.weight


class Slots:
    __slots__ = ("weight",)


class Cell:
    """Ways to a number that `weigh(model)` makes a factor of the loss, and `set_to(model, x)` changes."""

    def closure(self):
        weight = 1.0

        def set_to(model, x):
            nonlocal weight
            weight = x

        return lambda model: weight, set_to

    def dictionary(self):
        held = {"weight": 1.0}
        return lambda model: held["weight"], lambda model, x: held.update(weight=x)

    def constant_of_the_file(self):
        def set_to(model, x):
            global factor
            factor = x

        return lambda model: factor, set_to

    def config(self):
        return lambda model: getattr(model.config, "my_weight", 1.0), lambda model, x: setattr(
            model.config, "my_weight", x
        )

    def attribute(self):
        return lambda model: vars(model).get("my_weight", 1), lambda model, x: setattr(model, "my_weight", int(x))

    def object(self):
        schedule = Schedule()
        return lambda model: schedule.now(), lambda model, x: setattr(schedule, "weight", x)

    def slot(self):
        held = Slots()
        return lambda model: held.weight, lambda model, x: setattr(held, "weight", x)

    def function(self):
        constants = {1.0: lambda: 1.0, 3.0: lambda: 3.0}
        return lambda model: model.my_weight(), lambda model, x: setattr(model, "my_weight", constants[x])

    def module(self):
        kinds = {1.0: type("One", (torch.nn.Module,), {"forward": lambda self: 1.0})}
        kinds[3.0] = type("Three", (torch.nn.Module,), {"forward": lambda self: 3.0})
        return lambda model: model.my_weight(), lambda model, x: setattr(model, "my_weight", kinds[x]())

    def tensor(self):
        held = torch.ones(())
        return lambda model: held, lambda model, x: held.fill_(x)


@on_gpt(tied=False)
@pytest.mark.parametrize("way", [name for name in vars(Cell) if not name.startswith("_")])
def test_a_weight_of_a_proved_loss_may_change(model, labels, way):
    weigh, set_to = getattr(Cell(), way)()
    own = type(model).compute_language_model_loss

    def loss(self, labels, logits):
        return weigh(self) * own(self, labels, logits)

    model.compute_language_model_loss = loss.__get__(model)
    set_to(model, 3.0)
    stock = run(model, labels)
    wanted = grads_of(model, stock)
    set_to(model, 1.0)
    with patched():
        for _ in range(2):
            run(model, labels)
        assert fusion_report().losses_fused == 2
        set_to(model, 3.0)
        found = run(model, labels)
        assert torch.equal(found, stock)
        assert_same(grads_of(model, found), wanted)
    set_to(model, 1.0)


@grouped(1)
def test_a_weight_may_change_between_logits_and_loss():
    """A call looks at what a loss reads when it is taken, and not only when the call begins."""
    model, labels = later_gpt(tied=False), batch()[1]
    own = type(model).compute_language_model_loss
    scheduled = {"weight": 3.0}

    def loss(self, labels, logits):
        return self.my_weight * own(self, labels, logits)

    def change(logits):
        model.my_weight = scheduled["weight"]
        return logits

    model.compute_language_model_loss, model.change = loss.__get__(model), change
    stock = run(model, labels)
    scheduled["weight"] = 1.0
    with patched():
        for _ in range(2):
            run(model, labels)
        assert fusion_report().losses_fused == 2
        scheduled["weight"] = 3.0
        assert torch.equal(run(model, labels), stock)


@on_gpt(tied=False)
@pytest.mark.parametrize("kind", ["buffer", "number"])
def test_values_that_an_output_layer_holds_may_change(model, labels, kind):
    layer = model.output_layer

    class Scaled(type(layer)):
        def forward(self, input_, weight=None, **others):
            logits, bias = super().forward(input_, weight=weight, **others)
            return logits * self.factor, bias

    layer.__class__ = Scaled
    held = torch.ones(()) if kind == "buffer" else 1
    layer.register_buffer("factor", held) if kind == "buffer" else setattr(layer, "factor", held)
    with patched():
        run(model, labels)
        held.fill_(3) if kind == "buffer" else setattr(layer, "factor", 3)
        found = run(model, labels)
    torch.testing.assert_close(found, run(model, labels), rtol=1e-6, atol=1e-6)


@on_gpt(tied=False)
def test_a_loss_that_counts_its_calls_is_warned_of(model, labels):
    calls = {"count": 0}
    own = type(model).compute_language_model_loss

    def loss(self, labels, logits):
        calls["count"] += 1
        return own(self, labels, logits)

    model.compute_language_model_loss = loss.__get__(model)
    with patched(), torch.no_grad():
        for _ in range(10):
            run(model, labels)
        with pytest.warns(UserWarning, match="has changed 10 times since its first call"):
            run(model, labels)
    assert calls["count"] == 11


@on_gpt()
def test_a_loss_that_is_bound_anew_is_proved_once(model, labels):
    own = type(model).compute_language_model_loss

    def loss(model, *args, **kwargs):
        return own(model, *args, **kwargs)

    stock = run(model, labels)
    with patched(), mock.patch.object(fusion_proof, "proof_of", wraps=fusion_proof.proof_of) as proofs:
        for _ in range(3):
            model.compute_language_model_loss = functools.partial(loss, model)
            torch.testing.assert_close(run(model, labels), stock, rtol=1e-6, atol=1e-6)
        assert proofs.call_count == 1


def test_what_a_method_holds_is_not_kept_alive():
    def method_of(held):
        def forward(self, labels):
            return held

        return forward

    held = Schedule()
    assert label_argument(method_of(held)) == "labels"
    left = weakref.ref(held)
    del held
    gc.collect()
    assert left() is None
