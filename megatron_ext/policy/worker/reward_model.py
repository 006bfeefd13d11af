"""Reward models: transformers' sequence classifiers, read at every token of a sequence.

Then their head is to the rest of the model what an lm head is: sharded, read and trained like one of few columns.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class _OfEachToken:
    """In front of a class of transformers: its forward without the choice of a row's last token."""

    def get_output_embeddings(self: Any) -> nn.Module:
        return self.score

    def forward(self: Any, input_ids: Tensor, **inputs: Any) -> Any:
        hidden = getattr(self, self.base_model_prefix)(input_ids=input_ids, **inputs)[0]
        return SimpleNamespace(logits=self.score(hidden))


def of_each_token(model: nn.Module) -> nn.Module:
    """`model`, whose forward from now on gives `logits` `[B, S, labels]`, of each token given those before it.

    Raises:
        ValueError: it is not a decoder with a linear `score`, which has a number for every token.
    """
    decoder = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if decoder is None or not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{type(model).__name__} is not a reward model that is known here: it must be one of transformers' for "
            f"sequence classification with a decoder and a linear layer `score`"
        )
    cls = type(model)
    model.__class__ = type(cls.__name__, (_OfEachToken, cls), {"__module__": cls.__module__})
    return model


def last_tokens(tokens_BS: Tensor, lengths_B: Tensor, padding: int | None) -> Tensor:
    """`[B]`: the place whose number is a row's, as transformers has it: its last token that is not padding."""
    place_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    counts_BS = place_S < lengths_B[:, None]
    if padding is not None:
        counts_BS = counts_BS & (tokens_BS != padding)
    return (place_S * counts_BS).amax(1)
