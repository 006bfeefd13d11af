"""Megatron's global switch of batch-invariant kernels, and the calls of the head that has fixed bits."""

import types
import warnings
from contextlib import contextmanager
from unittest import mock

from megatron_ext.head.engine.linear import LinearHead
from megatron_ext.numerics import batch_invariance
from tests.stub_modules import stub_modules


@contextmanager
def fixed_calls():
    """A list that grows with each forward of the head with fixed bits; nothing has been said yet."""
    calls, forward = [], LinearHead.forward

    def counted(ctx, plan, *arguments):
        calls.extend([1] if plan.call.fixed else [])
        return forward(ctx, plan, *arguments)

    batch_invariance.say_once.cache_clear()
    with mock.patch.object(LinearHead, "forward", counted):
        yield calls


def switch(on):
    """Megatron's module of kernels with its switch on or off, and without its kernels, while this lasts."""
    kernels = types.SimpleNamespace(is_batch_invariant_mode_enabled=lambda: on)
    return stub_modules({batch_invariance.KERNELS: kernels})


@contextmanager
def switched_on():
    """The same, on, and nothing is said of it."""
    with switch(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_invariant_mode is on")
        yield
