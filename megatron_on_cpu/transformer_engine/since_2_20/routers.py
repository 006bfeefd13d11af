"""The fused router as Transformer Engine 2.20 calls it.

Routing maps hold a boolean for each token and expert; maps packed in bits, and choices by index, are refused.
"""

from torch import Tensor

from megatron_on_cpu.transformer_engine.experts import router
from megatron_on_cpu.transformer_engine.since_2_20.enums import NVTERoutingMapFormat

_BYTEMAP = int(NVTERoutingMapFormat.BYTEMAP)


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = _BYTEMAP,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route as the function of 2.11, for any leading dims; the scores saved for backward are in fp32."""
    _refuse_other_maps(routing_map_format, topk_indices is not None)
    _refuse_other_scores(score_function)
    wide = logits.float().flatten(0, -2)
    found = router.fused_topk_with_score_function_fwd(
        wide, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
    )
    probs, routing_map, kept = (x.view(logits.shape) for x in found)
    return probs.to(logits.dtype), routing_map, kept


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = _BYTEMAP,
) -> None:
    """Write the gradient of the logits into `grad_logits`."""
    _refuse_other_maps(routing_map_format, use_dense_indices)
    chosen, kept, grad = (x.flatten(0, -2) for x in (routing_map, intermediate_output, grad_probs))
    found = router.fused_topk_with_score_function_bwd(
        kept.shape[0], kept.shape[1], chosen, kept, grad, topk, use_pre_softmax, scaling_factor, score_function
    )
    grad_logits.copy_(found.view_as(grad_logits))


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: int = _BYTEMAP
) -> tuple[Tensor, Tensor, Tensor]:
    """Score as the function of 2.11, for any leading dims; scores, also those saved for backward, are in fp32."""
    _refuse_other_maps(routing_map_format, False)
    _refuse_other_scores(score_function)
    found = router.fused_score_for_moe_aux_loss_fwd(logits.float().flatten(0, -2), topk, score_function)
    scores, routing_map, kept = (x.view(logits.shape) for x in found)
    return scores, routing_map, kept


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: int, score_function: str
) -> None:
    """Write the gradient of the logits into `grad_logits`."""
    kept, grad = intermediate_output.flatten(0, -2), grad_scores.flatten(0, -2)
    found = router.fused_score_for_moe_aux_loss_bwd(kept.shape[0], kept.shape[1], kept, grad, topk, score_function)
    grad_logits.copy_(found.view_as(grad_logits))


def _refuse_other_maps(routing_map_format: int, by_index: bool) -> None:
    if by_index or int(routing_map_format) != _BYTEMAP:
        raise NotImplementedError(
            "the fused router is asked for choices by index or for a routing map of bits: the CPU emulation of "
            "Transformer Engine has maps of booleans; leave routing_map_format and topk_indices at their defaults"
        )


def _refuse_other_scores(score_function: str) -> None:
    if score_function not in ("softmax", "sigmoid"):
        raise NotImplementedError(
            f"score_function is {score_function!r}: the CPU emulation of Transformer Engine's fused router has "
            "'softmax' and 'sigmoid'; use one of them, or turn moe_router_fusion off"
        )
