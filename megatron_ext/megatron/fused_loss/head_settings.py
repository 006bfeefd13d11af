"""Options of the fused head inside Megatron, in one frozen dataclass for the patch, the launcher and the layer spec."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict, get_args

import torch
from torch import Tensor

from megatron_ext.head import checks
from megatron_ext.head.checks import Bits, Cache, bits_or_mode
from megatron_ext.head.layer_facts import head_facts
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.logits import Logits
from megatron_ext.megatron.fused_loss.promised_logits import Terms, tp_group
from megatron_ext.numerics.batch_invariance import say_once
from megatron_ext.proof import ProofMode, proof_mode


class HeadOptions(TypedDict, total=False):
    """The fields of `HeadSettings` as keyword arguments of functions, for completion and type checkers."""

    chunk_tokens: int | None
    cache: Cache
    logit_dtype: torch.dtype | None
    z_loss: float
    label_smoothing: float
    softcap: float | None
    temperature: float
    entropy: bool
    skip_ignored: bool | int
    bits: Bits | None
    proof: ProofMode | None
    verify: int


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The options of the fused head, checked when they are made.

    Attributes:
        chunk_tokens: tokens per chunk; None lets the head choose. It changes memory, not results.
        cache: how much of forward's work is kept for backward, as in `LmHead`; under Megatron's `deterministic_mode`
            "auto" is "bounded".
        logit_dtype: as in `LmHead`, but None: as Megatron's own setting of that name says, else not rounded.
        z_loss: factor of `lse^2` (lse: log of the sum of a token's exponentials) in the loss that backward
            differentiates. The returned losses leave it out, as Megatron's lm loss leaves out the losses of experts and
            of multi-token prediction: see `megatron_log`.
        label_smoothing: e of `(1 - e) nll - e mean_log_prob`, in [0, 1), as in `torch.nn.functional.cross_entropy`.
        softcap: logits become `softcap * tanh(logits / softcap)` in the loss; None: they stay. An output layer that
            softcaps by itself needs none here.
        temperature: logits are divided by it in the loss, after the softcap.
        entropy: the entropy of each token's distribution is logged beside the loss, from the same pass; no gradient.
        skip_ignored: tokens with a label of -100, and those that a `loss_mask` given to the model's forward leaves
            out, take no part in the head's products; their losses are 0. True: their number is read, one host sync a
            loss. An int: the largest number of tokens that count (under sequence parallelism, of each rank's slice);
            then there are no syncs and no changing shapes; see `at_most` of `LmHead.read`. For multi-token prediction
            add one for each row and layer, as Megatron rolls labels of 0 in. False: all tokens are computed.
        bits: which bits are reproducible, as in `LmHead`; None: "batch" where Megatron's `batch_invariant_mode` is on,
            by the model's config or by the global switch, else "fast".
        proof: when the head is compared with the model's own output layer and loss, on a few tokens. "first": at the
            first call, and after each change, of a model whose layer or loss is not Megatron's own code. "always": at
            every call. "off": never, and such a model keeps its own loss. None: as MEGATRON_EXT_PROOF says, or "first".
        verify: how many losses of each model, in training, are also computed by its own output layer and loss, of all
            tokens and with gradients; the memory of its logits must be free. `fusion_report()` shows both side by
            side, and a warning says if they differ by more than rounding explains.
        nemo_rl_chunk_size: the `chunk_size` of NeMo-RL's patch: `chunk_tokens` in sequence positions.

    `z_loss`, `label_smoothing`, `softcap` and `temperature` change only the loss: without labels a model returns the
    logits that Megatron makes.

    Raises:
        ValueError: a value breaks its rule; the message says which, and the fix.
    """

    chunk_tokens: int | None = None
    cache: Cache = "bounded"
    logit_dtype: torch.dtype | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    skip_ignored: bool | int = False
    bits: Bits | None = None
    proof: ProofMode | None = None
    verify: int = 0
    nemo_rl_chunk_size: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make the settings that a user gave by name.

        Raises:
            TypeError: a name is no option; the message lists the options.
            ValueError: as for the class.
        """
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            listed, hint = ", ".join(name for name in names if name != "nemo_rl_chunk_size"), ""
            if "chunk_size" in unknown:
                hint = "; chunk_tokens counts tokens: pass chunk_size times the batch size"
            raise TypeError(f"{', '.join(unknown)}: the fused head has no such setting. It has {listed}{hint}")
        return cls(**given)

    def __post_init__(self) -> None:
        checks.check_logit_dtype(self.logit_dtype)
        chunk_size = self.nemo_rl_chunk_size
        for name, value, unit in (
            ("chunk_tokens", self.chunk_tokens, "tokens"),
            ("chunk_size", chunk_size, "sequence positions"),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is {value!r}: it must be a positive number of {unit}, or None for the head to choose"
                )
        if chunk_size is not None and self.chunk_tokens is not None:
            raise ValueError(
                f"chunk_size is {chunk_size} and chunk_tokens {self.chunk_tokens}: they say the same thing in "
                f"sequence positions and in tokens; pass one of them"
            )
        for name in ("cache", "z_loss", "label_smoothing", "softcap", "temperature"):
            checks.check_option(name, getattr(self, name))
        checks.check_at_most(checks.token_bound(self.skip_ignored))
        if type(self.entropy) is not bool:
            raise ValueError(f"entropy is {self.entropy!r}: it must be True or False; True logs it beside the loss")
        proof_mode(self.proof)
        if type(self.verify) is not int or self.verify < 0:
            raise ValueError(f"verify is {self.verify!r}: it must be a number of losses; 0 compares none")
        if self.bits is not None:
            checks.one_of("bits", self.bits, get_args(Bits))

    def lm_head(self, terms: Terms, weight: Tensor, config: Any = None, batch_size: int = 1) -> LmHead:
        """Return the head for the logits of `terms` under these settings. `weight` is the layer's, gathered or cast.

        The layer must be known or proved to be linear, and settings with a softcap must have passed `check_layer`.
        """
        own = getattr(terms.layer, "softcap", None)
        facts = {
            "weight": weight,
            "logit_scale": terms.scale,
            # The model scales after the layer's softcap: s c tanh(z / c) = (s c) tanh(s z / (s c)).
            "softcap": self.softcap if own is None else own * terms.scale,
            "temperature": self.temperature,
            "logit_dtype": self.logit_dtype,
            "cache": _repeatable(self.cache, config),
            "chunk_tokens": self._chunk(batch_size),
            "gradient_accumulation_fusion": terms.adds_to_main_grad(weight),
            "bits": bits_or_mode(self.bits, config),
        }
        return LmHead(**head_facts(terms.layer, facts))

    def check_layer(self, layer: Any) -> None:
        """Raise ValueError if both the layer and the settings have a softcap."""
        own = getattr(layer, "softcap", None)
        if own is not None and self.softcap is not None:
            raise ValueError(
                f"softcap is {self.softcap} and the output layer has a softcap of {own} already: logits would be "
                f"softcapped twice; pass softcap=None"
            )

    def of_made(self, logits: Tensor, layer: Any) -> Logits:
        """Return `Logits` under these settings of logits `[S, B, V/R]` that exist, scaled and capped by the model."""
        return Logits(
            logits,
            tp_group(layer),
            softcap=self.softcap,
            temperature=self.temperature,
            chunk_tokens=self._chunk(logits.shape[1]),
        )

    def _chunk(self, batch_size: int) -> int | None:
        """Return the tokens per chunk; None lets the head choose."""
        return self.chunk_tokens if self.nemo_rl_chunk_size is None else self.nemo_rl_chunk_size * batch_size

    def loss(self) -> dict[str, Any]:
        """Return the options of `training_loss`, without `hits`."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "entropy": self.entropy}

    def beyond_megatron(self) -> str | None:
        """Return the options given that Megatron's own loss lacks, as "z_loss=0.0001, bits='batch'", or None."""
        bits = None if self.bits in (None, "fast") else f"bits={self.bits!r}"
        rounded = f"logit_dtype={self.logit_dtype}" if checks.rounds(self.logit_dtype) else None
        return ", ".join(filter(None, (self.changed_loss(), bits, rounded))) or None

    def changed_loss(self) -> str | None:
        """Return the options given that need our loss instead of Megatron's, as "z_loss=0.0001", or None."""
        usual = HeadSettings()
        names = ("z_loss", "label_smoothing", "softcap", "temperature", "entropy")
        changed = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return ", ".join(changed) or None


def _repeatable(cache: Cache, config: Any) -> Cache:
    """`cache`, but for "auto" under Megatron's `deterministic_mode` "bounded", which is said once: what is kept by free
    memory changes the gradients' last bits."""
    if cache != "auto" or not getattr(config, "deterministic_mode", False):
        return cache
    say_once('Megatron\'s deterministic_mode is on: the fused head takes cache="bounded" for "auto"')
    return "bounded"
