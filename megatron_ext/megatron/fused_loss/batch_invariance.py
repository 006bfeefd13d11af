"""Megatron's `batch_invariant_mode`: the bits that the fused head takes by itself where it is on."""

import sys
from typing import Any

from megatron_ext.head.validation.option_checks import Bits
from megatron_ext.megatron.fusion_report import say_once

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def bits_of(config: Any) -> Bits:
    """ "batch" where a config's `batch_invariant_mode` or Megatron's global switch of that name is on, else "fast".

    Megatron's own kernels do not reach the head's products. Where the head has no such bits, as for read-outs of whole
    logits on CUDA, it refuses to run rather than give others.
    """
    kernels = sys.modules.get(_KERNELS)
    switched = kernels is not None and kernels.is_batch_invariant_mode_enabled()
    if not switched and not getattr(config, "batch_invariant_mode", False):
        return "fast"
    say_once('Megatron\'s batch_invariant_mode is on: the fused head takes bits="batch"')
    return "batch"
