"""Checks of the head's options: numbers and names that every rank gives alike, an error before it computes; and
options that follow from the batch-invariant mode, and from Megatron's deterministic one."""

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from megatron_ext.head.call.resolved_head import Bits as Bits
from megatron_ext.head.call.resolved_head import Cache as Cache
from megatron_ext.numerics.batch_invariance import is_on, say_once

HiddenLayout = Literal["replicated", "sequence"]
Reduction = Literal["none", "sum", "mean"]
P = ParamSpec("P")
R = TypeVar("R")

VLLMS = "VLLM_BATCH_INVARIANT"
LOGIT_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)

LEAST_BYTES = 1024  # as `cache`: what is between 1 and this is meant as a percentage or a factor, and is neither

# Of each option that is a number: what else it may be, the rule, whether a number keeps it, and the fix.
_RULES: dict[str, tuple[tuple[str | None, ...], str, Callable[[float], bool], str]] = {
    "label_smoothing": ((), "in [0, 1)", lambda x: 0 <= x < 1, "0.0 turns it off"),
    "z_loss": ((), "at least 0 and finite", lambda x: 0 <= x < math.inf, "0.0 turns it off"),
    "temperature": ((), "above 0 and finite", lambda x: 0 < x < math.inf, "1.0 leaves the logits as they are"),
    "logit_scale": ((), "above 0 and finite", lambda x: 0 < x < math.inf, "1.0 leaves the logits as they are"),
    "softcap": ((None,), "above 0 and finite", lambda x: 0 < x < math.inf, "None turns it off"),
    "cache": (
        ("bounded", "auto"),
        f"in [0, 1], a fraction of the columns, or at least {LEAST_BYTES}, bytes",
        lambda x: 0 <= x <= 1 or LEAST_BYTES <= x < math.inf,
        '"bounded" goes by the sizes, "auto" by free memory',
    ),
}

# Names of arguments in torch, and of the chunk in NeMo-RL, each with the names that this package has for it.
_OURS = {
    "input": ("hidden", "logits"),
    "linear_weight": ("weight",),
    "target": ("labels",),
    "linear_bias": ("bias",),
    "chunk_size": ("chunk_tokens",),
}


def tells_torchs_names(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises TypeError for an argument by torch's or NeMo-RL's name, and says its name here."""
    parameters = inspect.signature(function).parameters
    renamed = {torchs: name for torchs, ours in _OURS.items() for name in ours if name in parameters}
    text = ", ".join(f"{torchs} is {ours}" for torchs, ours in renamed.items())
    if "reduction" in parameters:
        text += '; and reduction is "none" unless it is given, where torch takes the mean'

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name in renamed:
                raise TypeError(f"{function.__name__} takes {name} by another name: {text}")
        return function(*given, **named)

    return call


def one_of(argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the allowed words."""
    words = ", ".join(map(repr, allowed))
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(
            f"{argument} is a {type(value).__name__}: it must be one of {words}; if it was meant for another "
            "argument, pass it by that argument's name, a bias as bias="
        )
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}: it must be one of {words}")


def check_ignore_index(value: Any) -> None:
    if not is_int(value):
        raise ValueError(f"ignore_index is {value!r}: it must be an int; PyTorch's default is -100")


def check_option(argument: str, value: Any) -> None:
    words, rule, holds, fix = _RULES[argument]
    if not ((value is None or isinstance(value, str)) and value in words):
        check_number(argument, value, rule, holds, fix)


def check_options(options: Any, defaults: dict[str, Any]) -> None:
    """Raises ValueError unless the attributes of `options` keep their rules; what has its default does."""
    for name, usual in defaults.items():
        value = getattr(options, name)
        if value is not usual and (type(value) is not type(usual) or value != usual):
            check_option(name, value)


def check_teachers_temperature(name: str, value: float, students: float) -> None:
    if value not in (1.0, students):
        raise ValueError(
            f"{name} has temperature {value}: the student's, {students}, divides the logits of both; leave the "
            f"teacher's at 1.0"
        )


def check_logit_dtype(value: Any) -> None:
    if value is not None and value not in LOGIT_DTYPES:
        raise ValueError(
            f"logit_dtype is {value!r}: it must be None or torch.float32 for logits as they are summed, or "
            f"torch.bfloat16 or torch.float16 for logits rounded as inference engines round them"
        )


def rounds(logit_dtype: torch.dtype | None) -> bool:
    """Return whether logits are rounded to 16 bits."""
    return logit_dtype is not None and logit_dtype.itemsize == 2


def logit_dtype_fault(logit_dtype: torch.dtype | None, computed: torch.dtype, name: str) -> ValueError | None:
    """Return the fault of a dtype of logits where products have operands of `computed`."""
    if not rounds(logit_dtype) or logit_dtype == computed:
        return None
    return ValueError(
        f"logit_dtype is {logit_dtype} and {name} is multiplied in {computed}: logits are rounded to the dtype that "
        f"the model computes in; pass {computed if computed.itemsize == 2 else None}"
    )


def check_chunk_tokens(value: Any) -> None:
    if value is not None and not is_int(value, 1):
        raise ValueError(f"chunk_tokens is {value!r}: it must be a positive int; None lets the head choose")


def check_number(argument: str, value: Any, rule: str, holds: Callable[[float], bool], fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ValueError(f"{argument} is {value!r}: it must be a number {rule}; {as_number(value) or fix}")


def as_number(value: Any) -> str | None:
    """Return how to write a number that a configuration has as text; None: it is none.

    YAML 1.1 takes 3e-4 and 1.0e5 for text: a number with an exponent has a dot and the exponent a sign there.
    """
    try:
        if not isinstance(value, str) or not math.isfinite(float(value)):
            return None
    except ValueError:
        return None
    mantissa, exponent_sign, exponent = value.strip().lower().partition("e")
    if not exponent_sign:
        return f"write {value.strip()} without quotes, this is text"
    mantissa += "" if "." in mantissa else ".0"
    exponent = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f"write {mantissa}e{exponent}: without its dot and the exponent's sign it is text to YAML"


def is_int(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def check_at_most(at_most: Any) -> None:
    if at_most is not None and not is_int(at_most, 1):
        raise ValueError(f"at_most, or skip_ignored, is {at_most!r}: a bound of tokens must be a positive int, or None")


def check_no_bound(at_most: Any) -> None:
    check_at_most(at_most)
    if at_most is not None:
        raise ValueError(f"at_most is {at_most}, and counts is None: it bounds the tokens that count; pass counts too")


def token_bound(skip_ignored: bool | int) -> int | None:
    """The `at_most` that an int says, where it is not a bool."""
    return None if isinstance(skip_ignored, bool) else skip_ignored


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


def filters(top_k: Any, top_p: Any) -> bool:
    """Return whether top-k or top-p is on, which are checked."""
    if top_k is not None and not (is_int(top_k, -1) and top_k != 0):
        raise ValueError(f"top_k is {top_k!r}: it must be an int of at least 1; None or -1 turns it off")
    check_number("top_p", top_p, "in (0, 1]", lambda x: 0 < x <= 1, "1.0 turns it off")
    return top_k not in (None, -1) or top_p < 1


def repeatable(cache: Cache, config: Any) -> Cache:
    """`cache`, but for "auto" under Megatron's `deterministic_mode` "bounded", which is said once: what is kept by free
    memory changes the gradients' last bits."""
    if cache != "auto" or not getattr(config, "deterministic_mode", False):
        return cache
    say_once('Megatron\'s deterministic_mode is on: the fused head takes cache="bounded" for "auto"')
    return "bounded"
