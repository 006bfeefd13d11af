"""Megatron's `batch_invariant_mode`, and the bits that heads take by themselves where it is on."""

import functools
import sys
import warnings
from typing import Any

from megatron_ext.head.validation.option_checks import Bits

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def is_on(config: Any = None) -> bool:
    """Whether Megatron's global switch is on, or the `batch_invariant_mode` of a config."""
    kernels = sys.modules.get(KERNELS)
    return (kernels is not None and kernels.is_batch_invariant_mode_enabled()) or bool(
        getattr(config, "batch_invariant_mode", False)
    )


def bits_or_mode(asked: Bits | None, config: Any = None) -> Bits:
    """The bits that were asked for; where none were, "batch" if Megatron's mode is on, which is said once, else "fast".

    Megatron's own kernels do not reach the head's products. Where the head has no such bits it refuses to run rather
    than give others.
    """
    if asked is not None:
        return asked
    if not is_on(config):
        return "fast"
    say_once('Megatron\'s batch_invariant_mode is on: the fused head takes bits="batch"')
    return "batch"


@functools.cache
def say_once(text: str) -> None:
    """Warn of it the first time in this process."""
    warnings.warn(text, stacklevel=3)
