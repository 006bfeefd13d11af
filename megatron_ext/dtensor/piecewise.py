"""Blocks in pieces: checks whether the pieces of all tensor-parallel ranks add up to the block, at small sizes.

The checks read no source code: they run the block's own forward with small weights, whole and as two ranks' pieces.

Legend: B rows, S positions, D hidden size, F intermediate size, R tensor-parallel ranks, H channels of a head.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_ext.dtensor.styles import give_heads

_D, _F, _R = 6, 8, 2


class Cut(NamedTuple):
    """Names of the linear layers of a block that are cut over ranks.

    Attributes:
        column, row: the layers cut along their outputs, and along their inputs.
        halves: the layers among `column` whose outputs are two parts in a row, each of which is cut.
    """

    column: Collection[str]
    row: Collection[str]
    halves: Collection[str]


def adds_up(block: nn.Module, cut: Cut) -> bool | None:
    """Tell whether the outputs of pieces of `block` add up to its output; None if it cannot run on a tensor alone."""
    whole, pieces, hidden = _small_mlp(block, cut)

    def output(weights: Mapping[str, Tensor]) -> Tensor:
        return functional_call(block, dict(weights), (hidden,))

    return _tried(block, lambda: _close(torch.stack([output(piece) for piece in pieces]).sum(0), output(whole)))


def computes_in_pieces(block: nn.Module, cut: Cut) -> bool | None:
    """Tell whether the layer of `block` that is cut along its inputs gets, in the pieces, pieces of its whole input.

    None if there is not exactly one such layer, or if the block cannot run on a tensor alone.
    """
    (whole, pieces, hidden), seen = _small_mlp(block, cut), []
    if len(cut.row) != 1:
        return None
    hook = block.get_submodule(next(iter(cut.row))).register_forward_pre_hook(lambda layer, args: seen.append(args[0]))

    def compared() -> bool:
        for weights in (whole, *pieces):
            functional_call(block, dict(weights), (hidden,))
        expected, *found = seen
        return _close(torch.cat(found, -1), expected)

    with hook:
        return _tried(block, compared)


def _tried(block: nn.Module, compared: Callable[[], bool]) -> bool | None:
    """Return the result of `compared` with all of `block` in eval mode, so that no module draws random numbers; None if
    it raises, as a forward may fail in any way on weights that are not its own."""
    before = {module: module.training for module in block.modules()}
    block.eval()
    try:
        with torch.no_grad():
            return compared()
    except Exception:
        return None
    finally:
        for module, training in before.items():
            module.training = training


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


Weights = dict[str, Tensor]


def _drawing(block: nn.Module, size: float = 1.0) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, with numbers of about `size`, on the device of `block` (CPU if
    that is meta)."""
    device, draw = next(block.parameters()).device, torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=draw).to("cpu" if device.type == "meta" else device) * size


def _small_mlp(block: nn.Module, cut: Cut) -> tuple[Weights, list[Weights], Tensor]:
    """Draw weights for `block` and for each of its pieces, and hidden states."""
    drawn = _drawing(block)
    column = {name: (_F,) * (1 + (name in cut.halves)) for name in cut.column}
    return *_small_weights(block, column, dict.fromkeys(cut.row, _F), drawn), drawn(1, 3, _D)


def _small_weights(
    block: nn.Module, column: Mapping[str, Sequence[int]], row: Mapping[str, int], drawn: Callable[..., Tensor]
) -> tuple[Weights, list[Weights]]:
    """Draw weights for `block` and for each of its pieces.

    Args:
        column: the layers that are cut along their outputs, with the sizes of the parts of which each rank has a piece.
        row: the layers that are cut along their inputs, with the number of inputs.
    """
    whole: dict[str, Tensor] = {}
    pieces: list[dict[str, Tensor]] = [{} for _ in range(_R)]
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        layer, _, kind = name.rpartition(".")
        if layer in column:
            whole[name] = drawn(sum(column[layer]), *([_D] if kind == "weight" else []))
            parts = [part.chunk(_R) for part in whole[name].split(list(column[layer]))]
            own = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        elif layer in row:
            whole[name] = drawn(_D, row[layer]) if kind == "weight" else drawn(_D)
            own = list(whole[name].chunk(_R, 1)) if kind == "weight" else [whole[name] / _R] * _R
        else:
            whole[name] = drawn(*tensor.shape)
            own = [whole[name]] * _R
        for piece, value in zip(pieces, own, strict=True):
            piece[name] = value
    return whole, pieces


def heads_add_up(attention: Any, ratio: int, channels: int) -> bool:
    """Tell whether `attention` splits the outputs of its `qkv_proj` into q, k and v, in this order, by the head counts
    in its config, so that the outputs of pieces with fewer heads add up to the whole output.

    Args:
        ratio: query heads per key head.
        channels: H, the channels of a head.
    """
    drawn, queries, keys = _drawing(attention, 1 / 3), ratio * _R * channels, _R * channels
    column, row = {"qkv_proj": (queries, keys, keys)}, {"o_proj": queries}
    whole, pieces = _small_weights(attention, column, row, drawn)
    hidden, rotary = drawn(1, 3, _D), (drawn(1, 3, channels), drawn(1, 3, channels))

    def output(weights: Mapping[str, Tensor], groups: int) -> Tensor:
        given = {"hidden_states": hidden, "position_embeddings": rotary, "attention_mask": None}
        own = copy.copy(attention)  # on the same children
        give_heads(own, groups * ratio, groups)
        own.config._attn_implementation = "eager"
        return functional_call(own, dict(weights), kwargs=given)[0]

    def compared() -> bool:
        return _close(torch.stack([output(piece, 1) for piece in pieces]).sum(0), output(whole, _R))

    return _tried(attention, compared) is True
