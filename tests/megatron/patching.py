"""What the tests of the GPTModel patch share: a small batch, a patch for a while, gradients to compare."""

import functools
from contextlib import contextmanager

import torch

from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch
from tests.gpt import causal_mask, tiny_batches, tiny_gpt

SEQ = 8
ROUNDING = 2e-6


@contextmanager
def patched(*, model=None, **settings):
    patch(model=model, **settings)
    try:
        yield
    finally:
        unpatch(model=model)


@contextmanager
def counting_logits(layer):
    """A list that grows with each call of the forward that makes logits of an output layer."""
    kind, made = type(layer), []
    forward = kind.forward

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        if self is layer:
            made.append(1)
        return forward(self, *args, **kwargs)

    own = "forward" in vars(kind)
    kind.forward = counted
    try:
        yield made
    finally:
        if own:
            kind.forward = forward
        else:
            del kind.forward


def one_gpt(**overrides):
    return tiny_gpt(**overrides)[0]


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
        assert worst <= rounding, f"{name}: {worst:.1e}"
