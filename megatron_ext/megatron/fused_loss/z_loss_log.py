"""The z-loss in Megatron's log, beside the lm loss, without a change to the training script.

A script's loss function tells Megatron what to log, and does not know of a z-loss. After it ran, the schedule's
`forward_step_calc_loss` has the losses that the model returned and the mean that the script made of them; the
gradient of one by the other are the script's weights of the tokens, and with the same weights the z-loss is averaged.
It joins what the script logs, in the same form, so Megatron sums it over micro-batches and data-parallel ranks as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_ext.megatron.fusion_report import ModelFusion

LOGGED = "z loss"
_last: list[Tensor] = []  # [B, S], of the last main loss that nobody has logged


def remember(counters: ModelFusion, z_loss_BS: Tensor, counted_BS: Tensor) -> None:
    """Keep the z-loss per token of a loss; multi-token prediction's come before the main one, which stays."""
    _last[:] = [z_loss_BS.detach()]
    counters.z_loss = z_loss_BS.detach().sum() / counted_BS.sum().clamp(min=1)


def with_z_loss_logged(original: Any) -> Any:
    """`forward_step_calc_loss`, which adds "z loss" to what the script's loss function has logged."""

    def calc_loss(model: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        z_loss_BS = _last.pop() if _last else None
        store = kwargs.get("forward_data_store", args[5] if len(args) > 5 else None)
        before = 0 if store is None else len(store)
        results = original(model, output_tensor, *args, **kwargs)
        if z_loss_BS is not None and store is not None and len(store) > before and isinstance(store[-1], dict):
            _add(store[-1], z_loss_BS, output_tensor, results[0] if isinstance(results, tuple) else results)
        return results

    return calc_loss


def _add(logged: dict[str, Any], z_loss_BS: Tensor, output: Any, mean: Any) -> None:
    losses = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.shape == z_loss_BS.shape]
    if len(losses) != 1 or not losses[0].requires_grad or not isinstance(mean, Tensor) or not mean.requires_grad:
        return  # evaluation: what is logged there stays comparable
    (weights_BS,) = torch.autograd.grad(mean, losses, retain_graph=True, allow_unused=True)
    if weights_BS is None:
        return
    total = weights_BS.sum()
    value = (weights_BS * z_loss_BS).sum() / total.where(total != 0, 1.0)
    like = next((x for x in logged.values() if isinstance(x, Tensor)), None)
    if like is not None and like.numel() == 2:  # a sum and a number of tokens
        like = like.flatten()
        logged[LOGGED] = torch.stack([value.to(like.dtype) * like[1], like[1]])
    else:
        logged[LOGGED] = value
