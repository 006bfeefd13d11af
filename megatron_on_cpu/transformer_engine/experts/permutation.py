"""Permutation of tokens to experts and back by indices, as in TE's compiled module, and padding of groups of rows.

`row_id_map`, `[k * tokens]` int32, has the row of the permuted tokens for each (choice, token), with the choice as the
outer index; -1 where the token was dropped.
"""

from typing import Any

import torch
from torch import Tensor


def moe_permute_fwd(
    input: Tensor,
    dtype: Any,
    indices: Tensor,
    num_out_tokens: int,
    workspace: list[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (tokens sorted by expert, row_id_map, workspace); `indices` `[tokens, k]` has each token's experts."""
    tokens, choices = indices.shape
    order = indices.flatten().argsort(stable=True)
    wanted = num_out_tokens if num_out_tokens > 0 else tokens * choices
    row_id_map = torch.full((tokens * choices,), -1, dtype=torch.int32)
    source = order % choices * tokens + order // choices
    row_id_map[source[:wanted]] = torch.arange(min(wanted, len(order)), dtype=torch.int32)
    return input[order[:wanted] // choices], row_id_map, workspace


def moe_unpermute_fwd(
    input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """Return `[tokens, hidden]`, the sums of each token's rows, weighted by `prob` `[tokens, k]` (empty: by 1)."""
    rows = row_id_map.view(topK, num_tokens).long()
    found = input[rows.clamp(min=0)].float().masked_fill((rows < 0)[..., None], 0.0)
    if prob.numel():
        found = found * prob.t()[..., None].float()
    return found.sum(0).to(input.dtype)


moe_permute_bwd = moe_unpermute_fwd  # the gradient of the tokens, from that of the sorted ones


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (gradient of `input_fwd`, the sorted tokens; gradient of `prob`) from the gradient of the sums."""
    choices = prob.shape[1] if prob.numel() else 1
    rows = row_id_map.view(choices, -1).long()
    kept = rows >= 0
    grad = input_bwd.float().expand(choices, *input_bwd.shape)
    weighted = grad * prob.t()[..., None].float() if prob.numel() else grad
    activations = input_bwd.new_zeros(input_fwd.shape)
    activations[rows[kept]] = weighted[kept].to(input_bwd.dtype)
    forward = input_fwd[rows.clamp(min=0)].float().masked_fill(~kept[..., None], 0.0)
    return activations, (grad * forward).sum(-1).t().contiguous()


def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Write groups of rows into `output`, each padded with zeros to its length there."""
    output.zero_()
    groups = zip(input.split(input_row_list), output.split(padded_input_row_list), strict=True)
    for source, target in groups:
        target[: len(source)] = source


def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    """Write the front rows of each padded group into `output`, without the padding."""
    groups = zip(input.split(input_row_list), output.split(unpadded_input_row_list), strict=True)
    for source, target in groups:
        target.copy_(source[: len(target)])
