"""Megatron's `batch_invariant_mode`: the fused head in a model takes "batch" by itself."""

import sys
import types
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron_ext import linear_cross_entropy
from megatron_ext.head.fixed_bits.linear import FixedHead
from megatron_ext.megatron import fusion_report
from megatron_ext.megatron.fused_loss import batch_invariance
from tests.gpt import model_parallel
from tests.megatron.patching import batch, one_gpt, patched, run
from tests.ranks import ranks


@contextmanager
def fixed_calls():
    """A list that grows with each forward of the head with fixed bits; nothing has been said yet."""
    calls, forward, said = [], FixedHead.forward, fusion_report._said

    def counted(*arguments):
        calls.append(1)
        return forward(*arguments)

    FixedHead.forward, fusion_report._said = staticmethod(counted), set()
    try:
        yield calls
    finally:
        FixedHead.forward, fusion_report._said = staticmethod(forward), said


@ranks(1)
@pytest.mark.parametrize("by", ["config", "global switch"])
def test_the_fused_head_takes_batch_and_says_so(by):
    kernels = types.SimpleNamespace(is_batch_invariant_mode_enabled=lambda: by == "global switch")
    with model_parallel(1), patched(), fixed_calls() as calls:
        model, (tokens, labels, _), seen = one_gpt(), batch(), []
        model.decoder.register_forward_hook(lambda module, inputs, found: seen.append(found.detach()))
        run(model, labels, tokens)
        assert not calls, "off"
        model.config.batch_invariant_mode = by == "config"
        with mock.patch.dict(sys.modules, {batch_invariance._KERNELS: kernels}):
            with pytest.warns(UserWarning, match='batch_invariant_mode is on: the fused head takes bits="batch"'):
                loss = run(model, labels, tokens)
        assert len(calls) == 1
        weight = model.shared_embedding_or_output_weight().detach()
        alone = [
            linear_cross_entropy(seen[-1][i, j], weight, labels[j, i], bits="batch")
            for j in range(labels.shape[0])
            for i in range(labels.shape[1])
        ]
        assert torch.equal(loss.detach().flatten(), torch.stack(alone))
