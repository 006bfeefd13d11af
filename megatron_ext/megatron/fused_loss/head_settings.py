"""Options of the fused head inside Megatron, in one frozen dataclass for the patch, the launcher and the layer spec."""

from dataclasses import dataclass

from megatron_ext.head.validation import option_checks
from megatron_ext.head.validation.option_checks import Cache


@dataclass(frozen=True)
class HeadSettings:
    """The options of the fused head, checked when they are made.

    Attributes:
        chunk_tokens: tokens per chunk; None lets the head choose. It changes memory, not results.
        cache: how much of forward's work is kept for backward, as in `linear_cross_entropy`: 1 is fastest, 0 takes
            least memory, "bounded" no more than the weight and its fp32 gradient, "auto" looks at what is
            free, under Megatron's `deterministic_mode` it is "bounded".
        z_loss: factor of `lse^2` in the loss that gradients are of. The losses that the model returns are without it,
            as Megatron's lm loss is without those of experts and of multi-token prediction: see `z_loss_log`.
        label_smoothing: e of `(1 - e) nll - e mean_log_prob`, in [0, 1), as in `torch.nn.functional.cross_entropy`.
        softcap: logits become `softcap * tanh(logits / softcap)` in the loss; None: they stay. An output layer that
            softcaps by itself needs none here.
        temperature: logits are divided by it in the loss, after the softcap.
        nemo_rl_chunk_size: what NeMo-RL's patch calls `chunk_size`: as `chunk_tokens`, in sequence positions.

    The four before the last change the loss alone: without labels a model returns the logits that Megatron makes.

    Raises:
        ValueError: a value breaks its rule; the message says which, and the fix.
    """

    chunk_tokens: int | None = None
    cache: Cache = "bounded"
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    nemo_rl_chunk_size: int | None = None

    def __post_init__(self) -> None:
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
        for check in ("cache", "z_loss", "label_smoothing", "softcap", "temperature"):
            getattr(option_checks, f"check_{check}")(getattr(self, check))

    def chunk(self, batch_size: int) -> int | None:
        """Tokens per chunk."""
        return self.chunk_tokens if self.nemo_rl_chunk_size is None else self.nemo_rl_chunk_size * batch_size

    def changed_loss(self) -> str | None:
        """The options that make the loss another one than Megatron's, as "z_loss=0.0001", or None."""
        usual = HeadSettings()
        names = ("z_loss", "label_smoothing", "softcap", "temperature")
        changed = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return ", ".join(changed) or None
