"""The fused head, with its options, in a layer spec. For Megatron-LM's `--spec` write a module of your own:

from megatron_ext.megatron.layer_specs import gpt_layer_spec
from megatron_ext.megatron.spec_head import with_fused_head

spec = with_fused_head(gpt_layer_spec, z_loss=1e-4)
"""

import copy
from dataclasses import is_dataclass
from typing import Any, TypeVar, Unpack

from megatron_ext.megatron.fused_loss.head_settings import HeadOptions, HeadSettings
from megatron_ext.megatron.fused_loss.model_methods import HEAD
from megatron_ext.megatron.language_model_patch import patch_for_specs

_Spec = TypeVar("_Spec")


def with_fused_head(spec: _Spec, **settings: Unpack[HeadOptions]) -> _Spec:
    """Return a copy of a layer spec; models built from the copy compute losses by the fused head with these options.

    Head, losses, log of the z-loss and refusals are those of `patch_gpt_model_forward_for_linear_ce_fusion`, for these
    models alone. The options of a model's own patch override those of the spec, which override those of a patch of the
    classes. `unpatch_gpt_model_forward_for_linear_ce_fusion()` also takes the heads out that specs name. Communicates
    nothing.

    Args:
        spec: ours, Megatron's or your own, as a model takes it: `ModuleSpec` of a layer or of a hybrid stack, or
            `TransformerBlockSubmodules`.
        settings: the options of `HeadSettings`.

    Raises:
        TypeError: there is no such option; the message lists the options.
        ValueError: an option breaks its rule, or `spec` is not a spec object.
    """
    head = HeadSettings.of(settings)
    if not is_dataclass(spec) or isinstance(spec, type):
        raise ValueError(
            f"spec is {spec!r}: it must be a layer spec object, as GPTModel takes it; if a function makes the spec, "
            "pass its result"
        )
    named: Any = copy.copy(spec)
    setattr(named, HEAD, head)
    patch_for_specs()
    return named
