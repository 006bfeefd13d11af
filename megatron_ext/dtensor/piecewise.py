"""Feed-forward blocks in pieces: whether those of all tensor-parallel ranks add up to the block, tried at small sizes.

Nothing is read in a block's source: its own forward runs with small weights, whole and in the pieces of two ranks.

Legend: D hidden size, F intermediate size, R tensor-parallel ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

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
