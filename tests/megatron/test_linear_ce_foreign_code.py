"""Output layers and losses that tools and users have changed: the patch leaves their numbers as they are."""

import functools
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import cross_entropy, layers, mappings
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import grouped
from tests.megatron.patching import assert_same, batch, grads_of, on_gpt, one_gpt, patched, run
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
    """As MindSpeed replaces it, here with another result."""
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


def _transparent(owner, name):
    return mock.patch.object(owner, name, Transparent(getattr(owner, name)))


def transparent_loss(model):
    return _transparent(LanguageModule, "compute_language_model_loss")


def transparent_forward_impl(model):
    return _transparent(model.output_layer, "_forward_impl")


def transparent_call_impl(model):
    return _transparent(model.output_layer, "_call_impl")


def transparent_cross_entropy(model):
    return _transparent(tensor_parallel, "vocab_parallel_cross_entropy")


def quantizer_inside(model):
    """As Model-Optimizer changes a layer's class and gives it quantizers."""

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


def hook_that_scales(model):
    model.output_layer.register_forward_hook(lambda layer, inputs, outputs: (2 * outputs[0], outputs[1]))


def hook_that_changes_hidden_states(model):
    model.output_layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].tanh(), *inputs[1:]))


def layer_compiled_in_place(model):
    model.output_layer.compile(backend="eager")


def compiled_layer(model):
    model.output_layer = torch.compile(model.output_layer, backend="eager")


def foreign_layer(model):
    """Without an attribute of Megatron's layers."""

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
    """Of a model that calls its loss with more than labels and logits."""

    class Weighted(type(model)):
        def compute_language_model_loss(self, labels, logits, weight=1.0):
            return weight * super().compute_language_model_loss(labels, logits)

        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            return self.compute_language_model_loss(labels, self.output_layer(hidden_states)[0], *given, **named)

    model.__class__ = Weighted


def loss_of_a_third_argument(model):
    loss_of_more(model, 3.0)


def loss_of_a_keyword(model):
    loss_of_more(model, weight=3.0)


def layer_of_more(model):
    """Of an output layer that is called with a factor, first in the patch with one that changes nothing."""
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


# By the number of losses of two calls that are fused.
CHANGES = {
    hook_that_scales: 2,
    hook_that_changes_hidden_states: 2,
    layer_compiled_in_place: 2,
    compiled_layer: 2,
    parametrized_weight: 2,
    call_of_the_class: 2,
    call_impl: 0,
    partial_with_a_factor: 0,
    subclass_that_calls_super: 0,
    function_of_the_cross_entropy: 0,
    function_of_the_fused_cross_entropy: 0,
    apply_of_the_linear_function: 0,
    backward_of_the_copy_to_ranks: 0,
    transparent_loss: 0,
    transparent_forward_impl: 0,
    transparent_call_impl: 0,
    transparent_cross_entropy: 0,
    quantizer_inside: 0,
    forward_as_a_partial: 0,
    foreign_layer: 0,
    loss_of_a_third_argument: 0,
    loss_of_a_keyword: 0,
    layer_of_more: 0,
}


@on_gpt(tied=False)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_gives_its_own_loss(model, labels, change):
    with change(model) or mock.patch.dict({}):
        stock = run(model, labels)
        wanted = grads_of(model, stock)
        with patched():
            for _ in range(2):
                loss = run(model, labels)
                torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
                assert_same(grads_of(model, loss), wanted)
    assert fusion_report().losses_fused == CHANGES[change]


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
    """Its function runs again in backward, where the model is not patched."""

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
