"""Options of a head that follow from the batch-invariant mode, and from Megatron's deterministic one."""

import os
from typing import Any

from megatron_ext.head.validation.option_checks import Bits, Cache
from megatron_ext.numerics.batch_invariance import is_on, say_once

VLLMS = "VLLM_BATCH_INVARIANT"


def bits_or_mode(asked: Bits | None, config: Any = None) -> Bits:
    """The bits that were asked for; where none were, "batch" if the mode is on or vLLM is asked for it in this process,
    which is said once, else "fast".

    Megatron's own kernels do not reach the head's products. Where the head has no such bits it refuses to run rather
    than give others.
    """
    if asked is not None:
        return asked
    if is_on(config):
        say_once('batch_invariant_mode is on: the fused head takes bits="batch"')
        return "batch"
    if os.environ.get(VLLMS, "") not in ("", "0"):
        say_once(f'{VLLMS} is set in the environment: the fused head takes bits="batch"')
        return "batch"
    return "fast"


def repeatable(cache: Cache, config: Any) -> Cache:
    """`cache`, but for "auto" under Megatron's `deterministic_mode` "bounded", which is said once: what is kept by free
    memory changes the gradients' last bits."""
    if cache != "auto" or not getattr(config, "deterministic_mode", False):
        return cache
    say_once('Megatron\'s deterministic_mode is on: the fused head takes cache="bounded" for "auto"')
    return "bounded"
