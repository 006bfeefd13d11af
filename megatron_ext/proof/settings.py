"""When a proof is made, by an option or an environment variable, and the switch that turns all fusion off."""

import os
from typing import Literal, cast, get_args

ProofMode = Literal["first", "always", "off"]

SAMPLE_TOKENS = 64  # at most, of a batch's first ones
PROOF_VARIABLE = "MEGATRON_EXT_PROOF"
FUSION_VARIABLE = "MEGATRON_EXT_FUSION"


def proof_mode(option: str | None = None) -> ProofMode:
    """The mode that a way in was given, or else the one in the environment, or else "first".

    "first": at the first call, and when what the proof rests on has changed; "always": at every call; "off": never, so
    that the fusion is trusted.

    Raises:
        ValueError: the option, or the variable, is none of these.
    """
    said = os.environ.get(PROOF_VARIABLE) or "first"
    name, value = ("proof", option) if option is not None else (PROOF_VARIABLE, said)
    if value not in get_args(ProofMode):
        raise ValueError(
            f'{name} is {value!r}: it must be "first" (the first call compares the fused loss with the model\'s own), '
            f'"always" or "off" (the fused loss is trusted); pass one of them'
        )
    return cast(ProofMode, value)


def fusion_is_on() -> bool:
    """The value of MEGATRON_EXT_FUSION; with "off" every model computes its loss as if this package were not there.

    Raises:
        ValueError: the variable is neither "on" nor "off".
    """
    return why_fusion_is_off() is None


def why_fusion_is_off() -> str | None:
    """The reason for reports and refusals; None where fusion is on. Raises as `fusion_is_on`."""
    value = os.environ.get(FUSION_VARIABLE) or "on"
    if value not in ("on", "off"):
        raise ValueError(f'{FUSION_VARIABLE} is {value!r}: it must be "on" or "off"; set one of them, or unset it')
    return None if value == "on" else f"{FUSION_VARIABLE}=off is set in the environment"
