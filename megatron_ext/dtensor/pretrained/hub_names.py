"""Weights under the names of files on the Hugging Face Hub, which generators such as vLLM read.

transformers 5 keeps the experts of a layer in two tensors, and some weights under names of its own; files have each
expert by itself. transformers 4 has the names of files.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

# A weight by transformers' name, as one or more by the Hub's names: views where they can be.
Rename = Callable[[str, Tensor], list[tuple[str, Tensor]]]


def hub_rename(make_empty: Callable[[], nn.Module]) -> Rename:
    """The renaming for models as `make_empty` makes them, of which only the structure is used.

    The mapping is transformers' own, which `save_pretrained` takes.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return lambda name, weight: [(name, weight)]
    with torch.device("meta"):
        model = make_empty()

    def rename(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        return list(revert_weight_conversion(model, {name: weight}).items())

    return rename


def renamed(weights: Iterable[tuple[str, Tensor]], rename: Rename) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        yield from rename(name, weight)
