"""Output layers and models that somebody else has changed: hooks that read logits, adapters, forwards of their own."""

import warnings
from functools import partial

import pytest
import torch

from megatron_ext.megatron.fusion_report import fusion_report
from megatron_ext.megatron.output_processors import NextTokenLogProbs
from tests.gpt import grouped
from tests.megatron.patching import (
    assert_fused_is_stock,
    assert_same,
    batch,
    grads_of,
    on_gpt,
    one_gpt,
    patch,
    patched,
    run,
    unpatch,
)


@on_gpt()
def test_logits_that_are_read_without_gradients_still_train(model, labels):
    read = []

    def accuracy(module, inputs, outputs):
        with torch.no_grad():
            read.append(outputs[0].argmax(-1))

    model.output_layer.register_forward_hook(accuracy)
    loss = run(model, labels)
    wanted = grads_of(model, loss)
    before = fusion_report()
    said = "asks for the logits.* by Megatron's own function, to which labels of -100 count"
    with patched(), pytest.warns(UserWarning, match=said):
        found = run(model, labels)
    after = fusion_report()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
    assert_same(grads_of(model, found), wanted)
    assert torch.equal(*read)
    assert after.stock_losses - before.stock_losses == 1
    assert after.losses_fused == before.losses_fused
    assert after.logits_made - before.logits_made == 1


@on_gpt()
def test_processors_refuse_output_layers_beyond_a_product(model):
    tokens = batch()[0]
    layer = model.output_layer
    weight = model.shared_embedding_or_output_weight()
    hidden = torch.randn(tokens.shape[1], tokens.shape[0], weight.shape[1])
    arguments = {"hidden_states": hidden, "output_layer": layer, "output_weight": weight}
    hooked = layer.register_forward_hook(lambda module, inputs, outputs: (outputs[0].tanh(), outputs[1]))
    said = "LogProbs reads hidden states, not logits: its output layer has forward"
    with hooked, pytest.raises(ValueError, match=said):
        NextTokenLogProbs()(**arguments)

    class Adapted(type(layer)):
        def forward(self, x, *args, **kwargs):
            logits, bias = super().forward(x, *args, **kwargs)
            return logits + 1, bias

    layer.__class__ = Adapted
    with pytest.raises(ValueError, match="its output layer is a Adapted with a forward of its own"):
        NextTokenLogProbs()(**arguments)


@on_gpt()
def test_a_models_own_forward_is_not_replaced(model):
    own = model.forward = model.forward
    unpatch(model=model)
    assert model.forward is own
    with pytest.raises(ValueError, match="this GPTModel has a forward of its own, which the patch would replace"):
        patch(model=model)
    assert model.forward is own


class HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Squashed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        squashed = logits.tanh()
        ctx.save_for_backward(squashed)
        return squashed

    @staticmethod
    def backward(ctx, grad):
        (squashed,) = ctx.saved_tensors
        return grad * (1 - squashed**2)


def losses(model, change):
    """Return the losses of a model whose output layer has a hook that gives `change(logits)` on."""
    with model.output_layer.register_forward_hook(lambda module, inputs, outputs: (change(outputs[0]), outputs[1])):
        return run(model, batch()[1])


def assert_as_stock(model, change):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*asks for the logits")
        assert_fused_is_stock(model, lambda model: losses(model, change))


@on_gpt(tied=False)
@pytest.mark.parametrize("function", [HalvedGradient, Squashed])
def test_autograd_function_is_refused_and_served_as_advised(model, function):
    with patched(), pytest.raises(ValueError, match=r"an autograd.Function .* apply it to logits.clone\(\)"):
        losses(model, function.apply).sum().backward()
    with patched(), pytest.raises(ValueError, match=r"an autograd.Function .* apply it to logits.clone\(\)"):
        losses(model, lambda logits: torch.maximum(logits, function.apply(logits)))
    # The second clone is for stock, whose loss works in place.
    assert_as_stock(model, lambda logits: function.apply(logits.clone()).clone())


@on_gpt()
def test_an_autograd_function_beside_the_loss_is_refused(model):
    beside = []

    def change(logits):
        beside.append(Squashed.apply(logits).mean())
        return logits

    with patched():
        losses(model, change).sum().backward()
    with pytest.raises(ValueError, match=r"an autograd.Function .* apply it to logits.clone\(\)"):
        beside[0].backward()


IN_PLACE = {
    "through a transpose": lambda logits: (logits.transpose(0, 1).div_(2.0), logits)[1],
    "a copy": lambda logits: (logits.transpose(0, 1).contiguous().div_(2.0), logits)[1],
    "detached": lambda logits: (logits.detach().div_(2.0), logits * 3)[1],
}


@grouped(1)
@pytest.mark.parametrize("change", IN_PLACE)
def test_logits_that_are_changed_in_place(change):
    assert_as_stock(one_gpt(), IN_PLACE[change])


@torch.no_grad()
def scaled_without_gradients(logits):
    return logits * 0.5


def with_layer_under_no_grad(model):
    class Quiet(type(model)):
        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            with torch.no_grad():
                logits, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight())
            return self.compute_language_model_loss(labels, logits)

    model.__class__ = Quiet
    return run(model, batch()[1])


@grouped(1)
@pytest.mark.parametrize(
    "losses_of",
    [
        partial(losses, change=torch.Tensor.detach),
        partial(losses, change=scaled_without_gradients),
        with_layer_under_no_grad,
    ],
    ids=["detached", "scaled", "layer"],
)
def test_the_loss_of_detached_logits_has_no_gradient(losses_of):
    expected = losses_of(one_gpt())
    with patched():
        loss = losses_of(one_gpt())
    assert not expected.requires_grad
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@grouped(2)
def test_a_collective_reads_the_logits():
    """Megatron's gather is an autograd function that gives logits to C++ as they are."""
    from megatron_on_cpu import megatron_on_cpu

    with megatron_on_cpu():
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    read = []

    def gather(logits):
        with torch.no_grad():
            read.append(gather_from_tensor_model_parallel_region(logits).clone())
        return logits

    assert_as_stock(one_gpt(), gather)
    assert torch.equal(*read)
