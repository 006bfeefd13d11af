"""The choice of the tokens that count: a call makes logits for no other tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.checks import check_at_most
from megatron_ext.numerics.tensors import has_values, raise_if


class CountedTokens(NamedTuple):
    """The tokens of a call that count. A part is one rank's slice with the sequence layout, else all tokens.

    Attributes:
        kept_T: int64 indices of the kept tokens among all tokens, part after part; a filler's index is past the end.
        mine_T: int64 indices of this rank's kept tokens in its part; a filler's index is past the part's end.
        sizes: number of kept tokens and fillers of each part; None if there is one part and no bound.
        fills: whether there may be fillers, which bring each part up to the bound.
        fault: more tokens count than the bound allows; the caller raises it where other ranks learn of it.
    """

    kept_T: Tensor
    mine_T: Tensor
    sizes: list[int] | None
    fills: bool
    fault: ValueError | None = None

    def of_all(self, x_T: Tensor) -> Tensor:
        """Select the kept tokens from a tensor of all tokens; fillers have the last token's values."""
        return x_T[self.kept_T.clamp(max=x_T.shape[0] - 1) if self.fills else self.kept_T]

    def of_mine(self, x_TD: Tensor) -> Tensor:
        """Select the kept tokens of this rank's hidden states; fillers have 0."""
        if not self.fills:
            return x_TD.index_select(0, self.mine_T)
        there_T1 = (self.mine_T < x_TD.shape[0]).unsqueeze(1)
        return x_TD.index_select(0, self.mine_T.clamp(max=x_TD.shape[0] - 1)).where(there_T1, 0.0)

    def spread(self, x_T: Tensor, tokens: int) -> Tensor:
        """Return results of all tokens from those of the kept tokens: 0 where a token was left out."""
        room_T = x_T.new_zeros(tokens + self.fills, *x_T.shape[1:])
        return room_T.index_copy(0, self.kept_T, x_T)[:tokens]


def left_in(counts_RP: Tensor, part: int, at_most: int | None) -> CountedTokens:
    """Choose the tokens of each part that count; `part` is this rank's. `at_most`: a bound on the tokens of a part, up
    to which fillers are added; None: no fillers, and the host waits for the device.

    Raises:
        ValueError: `at_most` is no positive int.

    If more tokens count than `at_most`, the result has a `fault`; on CUDA a device-side assertion fails.
    """
    check_at_most(at_most)
    parts, width = counts_RP.shape
    if at_most is None or not width:
        sizes = counts_RP.sum(1).tolist() if parts > 1 else None
        of_all_T, own_T = (counts.nonzero().squeeze(1) for counts in (counts_RP.reshape(-1), counts_RP[part]))
        return CountedTokens(of_all_T, own_T, sizes, False)
    size, fault = min(at_most, width), None
    if has_values(counts_RP):
        try:
            raise_if(
                (counts_RP.sum(1) > at_most).any(),
                f"at_most, or skip_ignored, is {at_most}, and more tokens count: it must bound them, with the sequence "
                f"layout in each rank's slice; pass a larger one, or none",
            )
        except ValueError as found:
            fault = found
    places_T = [counts_P.nonzero_static(size=size, fill_value=width).squeeze(1) for counts_P in counts_RP]
    whole_T = [(x + i * width).masked_fill(x == width, parts * width) for i, x in enumerate(places_T)]
    return CountedTokens(torch.cat(whole_T), places_T[part], [size] * parts, True, fault)
