"""Megatron's `logit_dtype` and the patch's: the fused head rounds logits where one of them says so."""

from unittest import mock

import pytest
import torch

from megatron_ext.experimental.pipeline_vocabulary.vocabulary_sharing import output_layer_fault
from megatron_ext.head import LmHead
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from tests.gpt import grouped
from tests.megatron.patching import batch, one_gpt, patched, run

FP32, BF16 = torch.float32, torch.bfloat16


@grouped(1)
@pytest.mark.parametrize(
    "layers, patchs, rounds",
    [(None, None, False), (FP32, None, False), (BF16, None, True), (None, BF16, True), (BF16, FP32, False)],
)
def test_the_patchs_dtype_goes_before_the_output_layers(layers, patchs, rounds):
    calls, resolved = [], LmHead.resolved
    model, labels = one_gpt().bfloat16(), batch()[1]
    model.config.params_dtype = BF16
    model.output_layer.output_dtype = layers
    with (
        patched(logit_dtype=patchs),
        mock.patch.object(LmHead, "resolved", lambda head: calls.append(resolved(head)) or calls[-1]),
    ):
        run(model, labels)
        fault = output_layer_fault(model)
    assert {each.rounds for each in calls} == {rounds}
    assert ("logits are rounded to torch.bfloat16" in str(fault)) is rounds


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="logit_dtype is 'bf16': it must be None or torch.float32"):
        HeadSettings(logit_dtype="bf16")
