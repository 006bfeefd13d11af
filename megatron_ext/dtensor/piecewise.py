"""Blocks in pieces: whether those of all tensor-parallel ranks add up to the block, tried at small sizes.

Nothing is read in a block's source: its own forward runs with small weights, whole and in the pieces of two ranks.

Legend: B rows, S positions, D hidden size, F intermediate size, R tensor-parallel ranks, H channels of a head.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_D, _F, _R = 6, 8, 2


def adds_up(block: nn.Module, column: Collection[str], row: Collection[str], halves: Collection[str]) -> bool | None:
    """Tell whether pieces of `block` add up to it; None where it cannot be run on a tensor alone.

    Args:
        column, row: names of its linear layers, which ranks cut along their outputs and along their inputs.
        halves: those of `column` whose outputs are two parts in a row, each of which is cut.
    """
    device = next(block.parameters()).device
    draw = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to("cpu" if device.type == "meta" else device)

    whole: dict[str, Tensor] = {}
    pieces: list[dict[str, Tensor]] = [{} for _ in range(_R)]
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        layer, _, kind = name.rpartition(".")
        if layer in column:
            parts = 1 + (layer in halves)
            x = drawn(parts, _F, *([_D] if kind == "weight" else []))
            whole[name] = x.flatten(0, 1)
            own = [piece.flatten(0, 1) for piece in x.chunk(_R, 1)]
        elif layer in row:
            whole[name] = drawn(_D, _F) if kind == "weight" else drawn(_D)
            own = list(whole[name].chunk(_R, 1)) if kind == "weight" else [whole[name] / _R] * _R
        else:
            whole[name] = drawn(*tensor.shape)
            own = [whole[name]] * _R
        for piece, value in zip(pieces, own, strict=True):
            piece[name] = value
    hidden = drawn(1, 3, _D)
    try:
        with _evaluation(block), torch.no_grad():
            expected = _output(block, whole, hidden)
            found = sum(_output(block, piece, hidden) for piece in pieces)
    except Exception:  # a forward may fail in any way on weights that are not its own
        return None
    return torch.allclose(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def heads_add_up(attention: Any, ratio: int, channels: int) -> bool:
    """Tell whether `attention` cuts the outputs of its `qkv_proj` into q, k and v, in this order, by the counts of
    heads in its config, so that pieces with fewer heads add up to it.

    Args:
        ratio: query heads of a key head.
        channels: H.
    """
    device = next(attention.parameters()).device
    draw = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to("cpu" if device.type == "meta" else device) / 3

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

    try:
        with _evaluation(attention), torch.no_grad():
            expected = output(whole, _R)
            found = torch.stack([output(piece, 1) for piece in pieces]).sum(0)
    except Exception:  # a forward may fail in any way on weights that are not its own
        return False
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


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


def _output(block: nn.Module, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    return functional_call(block, dict(weights), (hidden,))


@contextmanager
def _evaluation(block: nn.Module) -> Iterator[None]:
    """Inside, no module of `block` draws random numbers."""
    before = {module: module.training for module in block.modules()}
    block.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
