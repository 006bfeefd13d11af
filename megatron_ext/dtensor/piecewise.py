"""Blocks in pieces: whether those of all tensor-parallel ranks add up to the block, tried at small sizes.

Nothing is read in a block's source: its own forward runs with small weights, whole and in the pieces of two ranks.

Legend: B rows, S positions, D hidden size, F intermediate size, R tensor-parallel ranks, H channels of a head.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

_D, _F, _R = 6, 8, 2


class Cut(NamedTuple):
    """Names of a block's linear layers that ranks cut.

    Attributes:
        column, row: along their outputs, and along their inputs.
        halves: those of `column` whose outputs are two parts in a row, each of which is cut.
    """

    column: Collection[str]
    row: Collection[str]
    halves: Collection[str]


def adds_up(block: nn.Module, cut: Cut) -> bool | None:
    """Tell whether pieces of `block` add up to it; None where it cannot be run on a tensor alone."""
    whole, pieces, hidden = _small_weights(block, cut)

    def output(weights: Mapping[str, Tensor]) -> Tensor:
        return functional_call(block, dict(weights), (hidden,))

    return _tried(block, lambda: _close(torch.stack([output(piece) for piece in pieces]).sum(0), output(whole)))


def computes_in_pieces(block: nn.Module, cut: Cut) -> bool | None:
    """Tell whether what enters the one layer of `block` that is cut along its inputs is, in the pieces, a piece of what
    enters it in the whole; None where there are several, or it cannot be run on a tensor alone."""
    (whole, pieces, hidden), seen = _small_weights(block, cut), []
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
    """Return what `compared` finds with every module of `block` in eval mode, where none draws random numbers; None
    where it raises: a forward may fail in any way on weights that are not its own."""
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


def _drawing(block: nn.Module, size: float = 1.0) -> Callable[..., Tensor]:
    """A function that draws a tensor of a shape, its numbers of about `size`, where `block` lies, or on the CPU."""
    device, draw = next(block.parameters()).device, torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=draw).to("cpu" if device.type == "meta" else device) * size


def _small_weights(block: nn.Module, cut: Cut) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], Tensor]:
    """Weights for `block` and for each of its pieces, and hidden states."""
    drawn = _drawing(block)
    whole: dict[str, Tensor] = {}
    pieces: list[dict[str, Tensor]] = [{} for _ in range(_R)]
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        layer, _, kind = name.rpartition(".")
        if layer in cut.column:
            parts = 1 + (layer in cut.halves)
            x = drawn(parts, _F, *([_D] if kind == "weight" else []))
            whole[name] = x.flatten(0, 1)
            own = [piece.flatten(0, 1) for piece in x.chunk(_R, 1)]
        elif layer in cut.row:
            whole[name] = drawn(_D, _F) if kind == "weight" else drawn(_D)
            own = list(whole[name].chunk(_R, 1)) if kind == "weight" else [whole[name] / _R] * _R
        else:
            whole[name] = drawn(*tensor.shape)
            own = [whole[name]] * _R
        for piece, value in zip(pieces, own, strict=True):
            piece[name] = value
    return whole, pieces, drawn(1, 3, _D)


def heads_add_up(attention: Any, ratio: int, channels: int) -> bool:
    """Tell whether `attention` cuts the outputs of its `qkv_proj` into q, k and v, in this order, by the counts of
    heads in its config, so that pieces with fewer heads add up to it.

    Args:
        ratio: query heads of a key head.
        channels: H.
    """
    drawn = _drawing(attention, 1 / 3)

    def cut(x: Tensor) -> list[Tensor]:
        """Each rank's rows of q, k and v together."""
        parts = [part.chunk(_R) for part in x.split([ratio * _R * channels, *[_R * channels] * 2])]
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]

    whole = {name: drawn(*x.shape) for name, x in [*attention.named_parameters(), *attention.named_buffers()]}
    rows = (ratio + 2) * _R * channels
    small = {"qkv_proj.weight": (rows, _D), "qkv_proj.bias": (rows,), "o_proj.bias": (_D,)}
    small["o_proj.weight"] = (_D, ratio * _R * channels)
    whole |= {name: drawn(*shape) for name, shape in small.items() if name in whole}
    pieces = [dict(whole) for _ in range(_R)]
    for rank, piece in enumerate(pieces):
        piece |= {name: cut(x)[rank] for name, x in whole.items() if name.startswith("qkv_proj.")}
        piece["o_proj.weight"] = whole["o_proj.weight"].chunk(_R, 1)[rank]
        if "o_proj.bias" in whole:
            piece["o_proj.bias"] = whole["o_proj.bias"] / _R
    hidden, rotary = drawn(1, 3, _D), (drawn(1, 3, channels), drawn(1, 3, channels))

    def output(weights: Mapping[str, Tensor], groups: int) -> Tensor:
        given = {"hidden_states": hidden, "position_embeddings": rotary, "attention_mask": None}
        return functional_call(_with_heads(attention, groups * ratio, groups), dict(weights), kwargs=given)[0]

    def compared() -> bool:
        return _close(torch.stack([output(piece, 1) for piece in pieces]).sum(0), output(whole, _R))

    return _tried(attention, compared) is True


def _with_heads(attention: Any, heads: int, groups: int) -> nn.Module:
    """`attention` as a rank has it with so many heads, on the same children: see `styles.AttentionHeads`."""
    own = copy.copy(attention)
    own.config = copy.copy(attention.config)
    own.config.num_attention_heads, own.config.num_key_value_heads = heads, groups
    own.config._attn_implementation = "eager"
    for name, count in (("num_heads", heads), ("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if isinstance(own.__dict__.get(name), int):
            own.__dict__[name] = count
    return own
