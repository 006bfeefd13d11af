"""Helpers of the tests of the GPTModel patch: a small batch, a patch for a while, gradients to compare."""

import functools
import inspect
import itertools
from contextlib import contextmanager
from unittest import mock

import torch

from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch
from tests.gpt import causal_mask, grouped, tiny_batches, tiny_gpt

SEQ = 8
ROUNDING = 2e-6
# Mamba's step sizes and decays sum terms that nearly cancel. Over 24 draws of the loss's weights, their gradients in
# stock differ from those in fp64 by up to 2.4e-6, fused ones by up to 1.9e-6, and stock from itself by up to 2.9e-6
# when the gradient that enters the last layer is rounded otherwise. In fp64 stock and fused differ by 1.4e-15.
DECAYS, ROUNDING_OF_DECAYS = ("A_log", "dt_bias"), 5e-6


@contextmanager
def patched(*, model=None, **settings):
    patch(model=model, **settings)
    try:
        yield
    finally:
        unpatch(model=model)


@contextmanager
def counting_logits(layer):
    """A list that grows with each call of the forward that makes logits of an output layer, which stays a known one."""
    from megatron_ext.megatron.fused_loss import fusion_decision  # Megatron wants Transformer Engine's stand-in first

    kind, made = type(layer), []
    forward, is_own = kind.forward, fusion_decision.is_own

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        if self is layer:
            made.append(1)
        return forward(self, *args, **kwargs)

    own = "forward" in vars(kind)
    kind.forward = counted
    forwards = mock.patch.object(fusion_decision, "_FORWARDS", [*fusion_decision._FORWARDS, counted])
    try:
        with forwards, mock.patch.object(fusion_decision, "is_own", lambda value: value is counted or is_own(value)):
            yield made
    finally:
        if own:
            kind.forward = forward
        else:
            del kind.forward


def one_gpt(**overrides):
    return tiny_gpt(**overrides)[0]


def on_gpt(tp: int = 1, **overrides):
    """`@grouped(tp)` of a body that gets the `model` that `one_gpt` makes of `overrides`, and `labels` if it asks."""

    def decorate(body):
        parameters = dict(inspect.signature(body).parameters)
        asks = parameters.pop("model") and parameters.pop("labels", None)

        @functools.wraps(body)
        def test(**kwargs):
            given = {"labels": batch()[1]} if asks else {}
            body(model=one_gpt(**overrides), **given, **kwargs)

        test.__signature__ = inspect.Signature(list(parameters.values()))
        return grouped(tp)(test)

    return decorate


def later_gpt(**overrides):
    """A GPTModel with what newer Megatrons do between output layer and loss, and arguments that nobody knows yet."""
    from megatron.core.models.gpt import GPTModel

    class Later(GPTModel):
        def forward(self, *args, novelty=None, output_processor=None, **kwargs):
            self.passed_on = {"novelty": novelty, "output_processor": output_processor}
            return super().forward(*args, **kwargs)

        def _postprocess(self, hidden_states, *args, labels=None, runtime_gather_output=None, **kwargs):
            if (process := self.passed_on["output_processor"]) is not None:
                return process(hidden_states, self.output_layer)
            logits, _ = self.output_layer(
                hidden_states,
                weight=self.shared_embedding_or_output_weight(),
                runtime_gather_output=runtime_gather_output,
            )
            scaled = self.change(logits)
            if labels is None:
                return scaled.transpose(0, 1)
            return self.compute_language_model_loss(labels, scaled)

        def change(self, logits):
            return logits * 0.25

    model = one_gpt(**overrides)
    model.__class__ = Later
    return model


def packing(*starts, padded=None):
    """Megatron's parameters of packed documents: where each begins and the last one ends; `padded`: with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, size = torch.tensor(starts, dtype=torch.int32), max(b - a for a, b in itertools.pairwise(padded or starts))
    cu_padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=size,
        max_seqlen_kv=size,
    )


def batch(size: int = 2):
    """Token ids, labels (the tokens one further on) and position ids, each [size, SEQ]."""
    tokens = tiny_batches(batch=size, seq=SEQ)[0]
    return tokens[:, :-1], tokens[:, 1:], torch.arange(SEQ).expand(size, SEQ)


def run(model, labels=None, tokens=None, **kwargs):
    ids, _, positions = batch()
    return model(ids if tokens is None else tokens, positions, causal_mask(SEQ), labels=labels, **kwargs)


def grads_of(model, output, weights=None):
    """Gradients of the (weighted) sum of `output`, by parameter name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    weights = torch.ones_like(output) if weights is None else weights
    grads = torch.autograd.grad(output, parameters, weights.to(output.dtype), allow_unused=True)
    return dict(zip(names, grads, strict=True))


def assert_same(fused: dict, stock: dict, rounding: float = ROUNDING) -> None:
    for name, grad in stock.items():
        if grad is None or not grad.any():
            assert fused[name] is None or not fused[name].any(), name
            continue
        worst = (fused[name] - grad).abs().max() / grad.abs().max()
        limit = max(rounding, ROUNDING_OF_DECAYS) if name.endswith(DECAYS) else rounding
        assert worst <= limit, f"{name}: {worst:.1e}"


def next_token_loss(model):
    return run(model, batch()[1])


def assert_fused_is_stock(model, step=next_token_loss, weights=None, *, patched_model=None) -> dict:
    """The losses that `step(model)` gives, and all gradients of their weighted sum, which are returned."""
    stock = step(model)
    weights = torch.rand_like(stock) if weights is None else weights
    expected = grads_of(model, stock, weights)
    with patched(chunk_size=3, model=patched_model):
        loss = step(model)
        found = grads_of(model, loss, weights)
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
    assert_same(found, expected)
    return found
