"""Softmax of scaled scores `[B, H, Sq, Skv]`, with a mask or none, forward and backward."""

import torch
from torch import Tensor


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the softmax over the last dim of `input * scale_factor`."""
    return (input.float() * scale_factor).softmax(-1).to(input.dtype)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Return the softmax with scores of -10000 where `mask` `[1 or B, 1, Sq, Skv]` is set; rows wholly masked are 0."""
    hidden = mask.bool()
    found = (input.float() * scale_factor).masked_fill(hidden, -10000.0).softmax(-1)
    return found.masked_fill(hidden.all(-1, keepdim=True), 0.0).to(input.dtype)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax in which the last query sees all keys."""
    queries, keys = input.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return (input.float() * scale_factor).masked_fill(later, float("-inf")).softmax(-1).to(input.dtype)


scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward


def scaled_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Tensor:
    """Return the gradient of the input, of each kind of mask alike: masked scores have probability 0."""
    y, dy = softmax_results_.float(), output_grad_.float()
    return (scale_factor * y * (dy - (y * dy).sum(-1, keepdim=True))).to(output_grad_.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward


def scaled_upper_triang_masked_softmax_backward(
    output_grads_: Tensor, softmax_results_: Tensor, scale_factor: float
) -> Tensor:
    """Return the gradient of the input, see `scaled_softmax_backward`."""
    return scaled_softmax_backward(output_grads_, softmax_results_, scale_factor)


scaled_aligned_causal_masked_softmax_backward = scaled_upper_triang_masked_softmax_backward
