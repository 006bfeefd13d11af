"""Megatron's global switch of batch-invariant kernels, and a counter of the head's forwards with fixed bits."""

import types
import warnings
from contextlib import contextmanager
from unittest import mock

from megatron_ext.head.engine.linear import LinearHead
from megatron_ext.numerics import batch_invariance
from tests.stub_modules import stub_modules


@contextmanager
def fixed_calls():
    """Yield a list that grows with each forward of the head with fixed bits; warnings of the mode begin anew."""
    calls, forward = [], LinearHead.forward

    def counted(ctx, plan, *arguments):
        calls.extend([1] if plan.call.fixed else [])
        return forward(ctx, plan, *arguments)

    batch_invariance.say_once.cache_clear()
    with mock.patch.object(LinearHead, "forward", counted):
        yield calls


def switch(on):
    """Replace Megatron's module of kernels, inside the context, by one with the switch and no kernels."""
    kernels = types.SimpleNamespace(is_batch_invariant_mode_enabled=lambda: on)
    return stub_modules({batch_invariance.KERNELS: kernels})


@contextmanager
def switched_on():
    """Turn the switch on inside the context, without the warning that it is on."""
    with switch(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_invariant_mode is on")
        yield
