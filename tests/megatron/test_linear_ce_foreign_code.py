"""Output layers and losses that tools and users have changed: the patch leaves their numbers as they are."""

import functools
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import cross_entropy, layers, mappings
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import grouped
from tests.megatron.patching import assert_same, batch, grads_of, on_gpt, one_gpt, patched, run
from tests.megatron.test_linear_ce_proof import doubled
from tests.transparent import Transparent


def partial_with_a_factor(model):
    def loss(self, labels, logits, factor):
        return factor * type(self).compute_language_model_loss(self, labels, logits)

    model.compute_language_model_loss = functools.partial(loss, model, factor=3)


def subclass_that_calls_super(model):
    class Weighted(type(model)):
        def compute_language_model_loss(self, labels, logits):
            return 0.5 * super().compute_language_model_loss(labels, logits)

    model.__class__ = Weighted


def function_of_the_cross_entropy(model):
    """Replace a function of the cross entropy as MindSpeed does, here with another result."""
    owner = cross_entropy.VocabParallelCrossEntropy
    own = owner.calculate_cross_entropy_loss

    def other(exp_logits, predicted, sums):
        exp_logits, loss = own(exp_logits, predicted, sums)
        return exp_logits, 2 * loss

    return mock.patch.object(owner, "calculate_cross_entropy_loss", staticmethod(other))


def function_of_the_fused_cross_entropy(model):
    """The inner one of Megatron's own fused kernel, which that looks up in its module."""
    own = fused_cross_entropy.calculate_cross_entropy_loss

    def other(exp_logits, predicted_and_sums):
        exp_logits, loss = own(exp_logits, predicted_and_sums)
        return exp_logits, 2 * loss

    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "native"
    return mock.patch.object(fused_cross_entropy, "calculate_cross_entropy_loss", other)


def apply_of_the_linear_function(model):
    """The autograd class inherits it: what is put there is no static method, and was not there before."""
    owner = layers.LinearWithGradAccumulationAndAsyncCommunication
    own = owner.apply
    return mock.patch.object(owner, "apply", lambda *args: 2 * own(*args))


def backward_of_the_copy_to_ranks(model):
    """Called within a function that is Megatron's own still; losses stay, gradients do not."""
    own = mappings._CopyToModelParallelRegion.backward

    def other(ctx, gradient):
        found = own(ctx, gradient)
        return (2 * found[0], *found[1:])

    return mock.patch.object(mappings._CopyToModelParallelRegion, "backward", staticmethod(other))


def quantizer_inside(model):
    """Change the layer's class and give it a quantizer, as Model-Optimizer does."""

    class Quantizer(torch.nn.Module):
        def forward(self, x):
            return x + (torch.round(x * 8) / 8 - x).detach()

    class Quantized(type(model.output_layer)):
        def forward(self, input_, weight=None, **others):
            return super().forward(self.input_quantizer(input_), weight=weight, **others)

    model.output_layer.__class__ = Quantized
    model.output_layer.input_quantizer = Quantizer()


def forward_as_a_partial(model):
    own = model.output_layer.forward
    model.output_layer.forward = functools.partial(
        lambda factor, *args, **kwargs: (factor * own(*args, **kwargs)[0], None), 2
    )


def call_impl(model):
    own = model.output_layer._call_impl
    model.output_layer._call_impl = lambda *args, **kwargs: ((own(*args, **kwargs)[0] * 2), None)


def call_of_the_class(model):
    class Called(type(model.output_layer)):
        def __call__(self, *args, **kwargs):
            logits, bias = super().__call__(*args, **kwargs)
            return 2 * logits, bias

    model.output_layer.__class__ = Called


def foreign_layer(model):
    class Foreign(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, input_, weight=None, runtime_gather_output=None):
            return torch.nn.functional.linear(input_, self.weight if weight is None else weight).tanh() * 2, None

    model.output_layer = Foreign(model.output_layer.weight)


def parametrized_weight(model):
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(model.output_layer, "weight", Doubled())


def loss_of_more(model, *given, **named):
    class Weighted(type(model)):
        def compute_language_model_loss(self, labels, logits, weight=1.0):
            return weight * super().compute_language_model_loss(labels, logits)

        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            return self.compute_language_model_loss(labels, self.output_layer(hidden_states)[0], *given, **named)

    model.__class__ = Weighted


def layer_of_more(model):
    """Call the output layer with a factor; the first one in the patch changes nothing."""
    factors = iter([2.0, 1.0, 3.0])

    class Scaled(type(model.output_layer)):
        def forward(self, input_, weight=None, runtime_gather_output=None, factor=1.0):
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            return logits / factor, bias

    class Scaling(type(model)):
        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            factor = next(factors)
            logits, _ = self.output_layer(hidden_states, factor=factor)
            return self.compute_language_model_loss(labels, logits * factor)

    model.output_layer.__class__, model.__class__ = Scaled, Scaling


# Of two calls the number of losses that are fused, and a change of the model, in a context where it must end.
CHANGES = {
    "hook that scales": (2, lambda m: m.output_layer.register_forward_hook(lambda *x: (2 * x[2][0], x[2][1]))),
    "hook of hidden states": (
        2,
        lambda m: m.output_layer.register_forward_pre_hook(lambda _, x: (x[0].tanh(), *x[1:])),
    ),
    "layer compiled in place": (2, lambda m: m.output_layer.compile(backend="eager")),
    "compiled layer": (2, lambda m: setattr(m, "output_layer", torch.compile(m.output_layer, backend="eager"))),
    "parametrized weight": (2, parametrized_weight),
    "call of the class": (2, call_of_the_class),
    "call impl": (0, call_impl),
    "partial with a factor": (0, partial_with_a_factor),
    "subclass that calls super": (0, subclass_that_calls_super),
    "function of the cross entropy": (0, function_of_the_cross_entropy),
    "function of the fused cross entropy": (0, function_of_the_fused_cross_entropy),
    "apply of the linear function": (0, apply_of_the_linear_function),
    "backward of the copy to ranks": (0, backward_of_the_copy_to_ranks),
    "transparent loss": (0, lambda m: doubled(m, "loss of the base", Transparent)),
    "transparent forward impl": (0, lambda m: doubled(m, "forward impl", Transparent)),
    "transparent call impl": (0, lambda m: doubled(m, "call impl", Transparent)),
    "transparent cross entropy": (0, lambda m: doubled(m, "cross entropy", Transparent)),
    "quantizer inside": (0, quantizer_inside),
    "forward as a partial": (0, forward_as_a_partial),
    "foreign layer": (0, foreign_layer),
    "loss of a third argument": (0, lambda m: loss_of_more(m, 3.0)),
    "loss of a keyword": (0, lambda m: loss_of_more(m, weight=3.0)),
    "layer of more": (0, layer_of_more),
}


@on_gpt(tied=False)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_code_gives_its_own_loss(model, labels, name):
    fused, change = CHANGES[name]
    with change(model) or mock.patch.dict({}):
        stock = run(model, labels)
        wanted = grads_of(model, stock)
        with patched():
            for _ in range(2):
                loss = run(model, labels)
                torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
                assert_same(grads_of(model, loss), wanted)
    assert fusion_report().losses_fused == fused


@on_gpt()
def test_a_loss_with_metrics_beside_it_is_kept(model, labels):
    class WithMetrics(type(model)):
        def compute_language_model_loss(self, labels, logits):
            losses = super().compute_language_model_loss(labels, logits)
            return losses, {"mean": losses.detach().mean(), "tokens": labels.numel()}

    model.__class__ = WithMetrics
    stock = run(model, labels)
    with patched():
        for _ in range(2):
            torch.testing.assert_close(run(model, labels), stock)


def _not_reentrant(function, _, hidden):
    return checkpoint(function, hidden, use_reentrant=False)


@on_gpt()
@pytest.mark.parametrize("checkpointed", [tensor_parallel.checkpoint, _not_reentrant])
def test_a_checkpointed_loss_is_kept_and_no_other_one_is_taken(model, labels, checkpointed):
    """Backward runs the checkpointed function again, where the model is not patched."""

    class Checkpointed(type(model)):
        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            def loss(hidden):
                weight = self.shared_embedding_or_output_weight()
                return self.compute_language_model_loss(labels, self.output_layer(hidden, weight=weight)[0])

            return checkpointed(loss, False, hidden_states)

    def step():
        loss, weight = run(model, labels), model.shared_embedding_or_output_weight()
        weight.grad = None
        loss.sum().backward()
        return loss, weight.grad

    model.__class__ = Checkpointed
    stock = step()
    with patched():
        assert all(map(torch.equal, step(), stock))
    with patched(temperature=0.5), pytest.raises(ValueError, match="temperature=0.5, .* is called under no_grad"):
        step()


@grouped(1)
def test_quantizers_in_bfloat16_keep_their_own_loss():
    """Their work is as small as rounding, which the proof allows."""
    model, labels = one_gpt(tied=False, params_dtype=torch.bfloat16, bf16=True).bfloat16(), batch()[1]
    quantizer_inside(model)
    stock = run(model, labels)
    with patched():
        assert torch.equal(run(model, labels), stock)
    assert fusion_report().losses_fused == 0


@on_gpt()
def test_hooks_of_all_modules_see_one_call_of_the_output_layer(model, labels):
    seen = []

    def hook(module, inputs, outputs):
        if module is not model.output_layer:
            return None
        seen.append(outputs[0].shape)
        return 2 * outputs[0], outputs[1]

    with register_module_forward_hook(hook):
        stock = run(model, labels)
        wanted = grads_of(model, stock)
        with patched():
            loss = run(model, labels)
            found = grads_of(model, loss)
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
    assert_same(found, wanted)
    assert len(seen) == 2


@grouped(1)
def test_logits_returned_beside_a_loss_are_of_that_call():
    class Both(GPTModel):
        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            logits, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight())
            return {"loss": self.compute_language_model_loss(labels, logits), "logits": logits}

    model, labels = one_gpt(), batch()[1]
    loss, logits_BSV = run(model, labels), run(model)
    model.__class__ = Both
    with patched():
        found = run(model, labels)
    torch.testing.assert_close(found["loss"], loss, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        model.shared_embedding_or_output_weight().zero_()
    assert torch.equal(found["logits"].transpose(0, 1), logits_BSV)
