"""The fused router: scores, top-k and auxiliary loss. Work is in fp32."""

import torch
from torch import Tensor

_TINY = 1e-20


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (probabilities, 0 where not chosen; the choice; scores saved for backward), each `[tokens, experts]`.

    The scores are a softmax over all experts (`use_pre_softmax`) or over the chosen ones, or sigmoids, which for
    `topk` > 1 are divided by the sum of the chosen ones. `expert_bias` affects the choice only. With groups, only
    experts of the `group_topk` groups with the largest sums of their best `topk / group_topk` scores may be chosen.
    """
    wide = logits.float()
    sigmoid = score_function == "sigmoid"
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1) if use_pre_softmax else wide
    ranked = scores if expert_bias is None else scores + expert_bias.float()
    if num_groups and group_topk and num_groups > 0 and group_topk > 0:
        ranked = _best_groups(ranked, topk, num_groups, group_topk)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, ranked.topk(topk, dim=1).indices, True)
    probs = _probabilities(scores, chosen, topk, sigmoid, use_pre_softmax)
    kept = scores if sigmoid or use_pre_softmax else probs
    probs = probs * (1.0 if scaling_factor is None else scaling_factor)
    return probs.to(logits.dtype), chosen, kept.to(logits.dtype)


def fused_topk_with_score_function_bwd(
    num_tokens: int,
    num_experts: int,
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
) -> Tensor:
    """Return the gradient of the logits."""
    kept = intermediate_output.float()
    grad = grad_probs.float().masked_fill(~routing_map, 0.0) * (1.0 if scaling_factor is None else scaling_factor)
    if score_function == "sigmoid":
        if topk > 1:
            grad = _shares_backward(grad, kept.masked_fill(~routing_map, 0.0)).masked_fill(~routing_map, 0.0)
        grad = grad * kept * (1 - kept)
    else:
        grad = kept * (grad - (grad * kept).sum(-1, keepdim=True))
    return grad.to(intermediate_output.dtype)


def fused_score_for_moe_aux_loss_fwd(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores of all experts; the choice of the top-k; scores saved for backward), each `[tokens, experts]`.

    Scores sum to 1, except sigmoids with `topk` 1."""
    wide = logits.float()
    kept = wide.sigmoid() if score_function == "sigmoid" else wide.softmax(-1)
    scores = _shares(kept) if score_function == "sigmoid" and topk > 1 else kept
    chosen = torch.zeros_like(kept, dtype=torch.bool).scatter_(1, scores.topk(topk, dim=1).indices, True)
    return scores.to(logits.dtype), chosen, kept.to(logits.dtype)


def fused_score_for_moe_aux_loss_bwd(
    num_tokens: int, num_experts: int, intermediate_output: Tensor, grad_scores: Tensor, topk: int, score_function: str
) -> Tensor:
    """Return the gradient of the logits."""
    everyone = torch.ones_like(intermediate_output, dtype=torch.bool)
    return fused_topk_with_score_function_bwd(
        num_tokens, num_experts, everyone, intermediate_output, grad_scores, topk, True, None, score_function
    )


def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """Return (loss, factor): the factor `coeff experts / (topk tokens^2)`, and the loss, which is the factor times the
    sum over experts of the sum of their probabilities times `tokens_per_expert`."""
    tokens = torch.as_tensor(total_num_tokens, dtype=torch.float64).view(())
    factor = (num_experts * coeff / topk / tokens / tokens).float()
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * factor
    return loss.to(probs.dtype), factor


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """Return the gradient of the probabilities, `[num_rows, num_cols]`."""
    row = tokens_per_expert.float() * Const_buf * grad_aux_loss.float()
    return row.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


def _best_groups(ranked: Tensor, topk: int, groups: int, group_topk: int) -> Tensor:
    """Set the scores outside of the best groups of each token to -inf."""
    in_groups = ranked.view(len(ranked), groups, -1)
    best = in_groups.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    open_groups = torch.zeros(len(ranked), groups, dtype=torch.bool).scatter_(1, best, True)
    return in_groups.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)


def _probabilities(scores: Tensor, chosen: Tensor, topk: int, sigmoid: bool, before: bool) -> Tensor:
    if sigmoid:
        found = scores.masked_fill(~chosen, 0.0)
        return _shares(found) if topk > 1 else found
    if before:
        return scores.masked_fill(~chosen, 0.0)
    return scores.masked_fill(~chosen, float("-inf")).softmax(-1)


def _shares(x: Tensor) -> Tensor:
    return x / (x.sum(-1, keepdim=True) + _TINY)


def _shares_backward(grad: Tensor, x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True) + _TINY
    return grad / total - (grad * x).sum(-1, keepdim=True) / total.square()
