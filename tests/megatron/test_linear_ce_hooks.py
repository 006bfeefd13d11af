"""Output layers and models that somebody else has changed: hooks that read logits, adapters, forwards of their own."""

import pytest
import torch

from megatron_ext.megatron.output_processors import LogProbs
from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch
from tests.gpt import model_parallel
from tests.megatron.patching import assert_same, batch, grads_of, one_gpt, patched, run
from tests.ranks import ranks


@ranks(1)
def test_logits_that_are_read_without_gradients_still_train():
    """The loss is taken from the logits that somebody asked for, under no_grad as it may be."""
    with model_parallel():
        model, labels = one_gpt(), batch()[1]
        read = []

        def accuracy(module, inputs, outputs):
            with torch.no_grad():
                read.append(outputs[0].argmax(-1))

        model.output_layer.register_forward_hook(accuracy)
        loss = run(model, labels)
        wanted = grads_of(model, loss)
        with patched(), pytest.warns(UserWarning, match="asks for the logits"):
            found = run(model, labels)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
        assert_same(grads_of(model, found), wanted)
        assert torch.equal(*read)


@ranks(1)
def test_processors_refuse_an_output_layer_that_does_more_than_multiply():
    with model_parallel():
        model, tokens = one_gpt(), batch()[0]
        layer = model.output_layer
        weight = model.shared_embedding_or_output_weight()
        weight = layer.weight if weight is None else weight
        hidden = torch.randn(tokens.shape[1], tokens.shape[0], weight.shape[1])
        arguments = {"hidden_states": hidden, "output_layer": layer, "output_weight": weight}
        handle = layer.register_forward_hook(lambda module, inputs, outputs: (outputs[0].tanh(), outputs[1]))
        with pytest.raises(ValueError, match="LogProbs reads hidden states, not logits: its output layer has forward"):
            LogProbs()(**arguments)
        handle.remove()

        class Adapted(type(layer)):
            def forward(self, x, *args, **kwargs):
                logits, bias = super().forward(x, *args, **kwargs)
                return logits + 1, bias

        layer.__class__ = Adapted
        with pytest.raises(ValueError, match="its output layer is a Adapted with a forward of its own"):
            LogProbs()(**arguments)


@ranks(1)
def test_a_models_own_forward_is_not_replaced():
    with model_parallel():
        model = one_gpt()
        own = model.forward = model.forward
        unpatch(model=model)
        assert model.forward is own
        with pytest.raises(ValueError, match="this GPTModel has a forward of its own, which the patch would replace"):
            patch(model=model)
        assert model.forward is own
