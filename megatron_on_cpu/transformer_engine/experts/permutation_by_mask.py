"""Permutation of tokens to experts and back by a mask, which replaces TE's Triton kernels, as these need a GPU.

`row_id_map` `[tokens, 2 experts + 1]` int32 has in its first columns, one for each expert, the token's row among the
permuted tokens, or -1 if the mask does not send it there; the last column has the number of the token's experts.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.cuda_graphs import read_by_the_host

Optional = Tensor | None


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Make the `row_id_map` that sorts rows by expert, and those of an expert by token."""
    mask = routing_map.view(num_tokens, num_experts).bool()
    rows = mask.t().flatten().cumsum(0).view(num_experts, num_tokens).t() - 1
    found = torch.zeros(num_tokens, 2 * num_experts + 1, dtype=torch.int32)
    found[:, :num_experts] = rows.masked_fill(~mask, -1)
    found[:, -1] = mask.sum(1)
    return found


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Optional,
    scale: Optional,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, Optional, Optional]:
    """Return (permuted tokens, their scales or None, their probabilities or None)."""
    tokens, experts, rows = _places(row_id_map, num_experts)

    def put(source: Tensor) -> Tensor:
        target = source.new_zeros(num_out_tokens, *source.shape[1:])
        target[rows] = source
        return target

    permuted_probs = None if probs is None else put(probs.view(num_tokens, num_experts)[tokens, experts])
    return put(inp[tokens]), None if scale is None else put(scale[tokens]), permuted_probs


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Optional,
    permuted_probs: Optional,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Optional]:
    """Return (the sums `[tokens, hidden]` of each token's rows, weighted by `merging_probs`; `permuted_probs` as
    `[tokens, experts]`, or None)."""
    tokens, experts, rows = _places(row_id_map, num_experts)
    parts = inp[rows].float()
    if merging_probs is not None:
        parts = parts * merging_probs[tokens, experts, None].float()
    summed = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, parts).to(inp.dtype)
    if permuted_probs is None:
        return summed, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs.flatten()[rows]
    return summed, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Return (gradient of the permuted tokens, gradient of `merging_probs`)."""
    tokens, experts, rows = _places(row_id_map, num_experts)
    grad = fwd_output_grad[tokens].float()
    activations = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    activations[rows] = (grad * merging_probs[tokens, experts, None].float()).to(activations.dtype)
    probs = merging_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = (grad * fwd_input[rows].float()).sum(-1).to(probs.dtype)
    return activations, probs


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Return `[tokens]` int32, each token's row after chunks of `split_sizes` are put in the order `sorted_indices`."""
    chunks = torch.arange(num_tokens).split(read_by_the_host(split_sizes, "split_sizes"))
    order = torch.cat([chunks[i] for i in read_by_the_host(sorted_indices, "sorted_indices")])
    rows = torch.empty(num_tokens, dtype=torch.int32)
    rows[order] = torch.arange(num_tokens, dtype=torch.int32)
    return rows


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Optional, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Optional]:
    """Return tokens and probabilities in the order of `row_id_map`, or back in the order before (not `is_forward`)."""
    rows: Any = row_id_map.long()
    rows = rows.argsort() if is_forward else rows
    return inp[rows], None if probs is None else probs[rows]


def _places(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (token, expert, row) of every pair of token and expert that the mask has."""
    rows = row_id_map[:, :num_experts].long()
    tokens, experts = (rows >= 0).nonzero(as_tuple=True)
    return tokens, experts, rows[tokens, experts]
