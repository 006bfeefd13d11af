"""A sampler for transformers' `generate` that draws from the distribution that training scores.

A token is drawn from the softmax of `logits / temperature` over the tokens that top-k and then top-p keep, ties of the
last one included (as vLLM does): the distribution that `get_logprobs` scores. Every row draws from a random sequence of
its own, so that its draws depend neither on the rows beside it nor on the rank.

Legend: B rows, V vocabulary.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.checks import is_int
from megatron_ext.policy.config import Settings
from megatron_ext.reference import kept


class Stopping(NamedTuple):
    """The settings of NeMo-RL's `generation` configuration that say where a row ends.

    Attributes:
        stop_token_ids: ids that end a row, as its last token; empty: those of the model's own generation config.
        pad_token_id: the id behind the end of a row.
    """

    max_new_tokens: int
    stop_token_ids: list[int]
    pad_token_id: int


def stopping(config: Mapping[str, Any], tokenizer: Any) -> Stopping:
    """Read `Stopping` from a worker's configuration."""
    generation = config.get("generation") or {}
    if generation.get("stop_strings"):
        raise ValueError("generation.stop_strings are set: generate() stops at token ids; set stop_token_ids")
    if generation.get("bad_words"):
        raise ValueError(f"generation.bad_words is {generation['bad_words']!r}: generate() bans no words; leave it out")
    most: Any = generation.get("max_new_tokens")
    if not is_int(most, 1):
        raise ValueError(f"generation.max_new_tokens is {most!r}: generate() needs a positive integer; set it")
    return Stopping(most, list(generation.get("stop_token_ids") or ()), pad_token_of(config, tokenizer))


def pad_token_of(config: Mapping[str, Any], tokenizer: Any) -> int:
    """Return the id of padding: the configuration's, else the tokenizer's, else 0."""
    found = (config.get("generation") or {}).get("_pad_token_id")
    found = getattr(tokenizer, "pad_token_id", None) if found is None else found
    return 0 if found is None else found


class Sampler:
    """A logits processor of transformers that draws the tokens itself: its scores are largest at the drawn ones.

    `generate` must run with `do_sample=False`. Call `log_probs()` at the end.

    Args:
        seeds: the seed of each row's random sequence; None: no sampling, the likeliest token.
    """

    def __init__(self, settings: Settings, seeds: Sequence[int] | None, device: torch.device):
        self._settings = settings
        self._random = None if seeds is None else [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        settings = self._settings
        z_BV = scores.float() / settings.temperature
        z_BV = z_BV.masked_fill(~kept(z_BV, settings.top_k, settings.top_p), -torch.inf)
        if self._random is None:
            drawn_B = z_BV.argmax(-1)
        else:
            drawn_B = torch.stack([_drawn(row, own) for row, own in zip(z_BV, self._random, strict=True)])
        self._log_probs.append(z_BV.log_softmax(-1).gather(-1, drawn_B[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn_B[:, None], 0.0)

    def log_probs(self) -> Tensor:
        """Return the log-probabilities of the drawn tokens, fp32 `[B, steps]`, also behind the end of a row."""
        return torch.stack(self._log_probs, 1)


def row_seeds(seed: int, rows: Sequence[int]) -> list[int]:
    """Make unrelated seeds for rows, of `seed` and the rows' numbers in the whole batch."""
    return [random.Random(f"{seed}, {row}").getrandbits(63) for row in rows]


def _drawn(z_V: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token by its probability: the largest of `p / e`, e exponentially distributed (Gumbel's trick)."""
    noise_V = torch.empty_like(z_V).exponential_(generator=generator)
    return (z_V.softmax(-1) / noise_V).argmax()
