"""The z-loss, the entropy and the counts of fused losses in Megatron's log, without a change to the training script.

A script's loss function tells Megatron what to log, and knows neither z-loss nor entropy. After that function ran, the
schedule's `forward_step_calc_loss` has the losses that the model returned and the script's mean of them. The gradient
of the mean with respect to the losses is the script's weight of each token; with the same weights z-loss and entropy
are averaged. They are added to the script's values in the same form, so Megatron sums them over micro-batches and
data-parallel ranks, prints them and writes them as it does the loss.

The counts of a step are this rank's alone. They go straight to the TensorBoard and wandb writers of `megatron.training`
where a script has made one: Megatron makes them on the last rank, which has the last stage of the pipeline.

From 0.19 on Megatron counts, for each layer of multi-token prediction, how many labels have the largest logit, by an
argmax over logits. The head finds these labels in its pass over the vocabulary, and communicates nothing more for them.
"""

import sys
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits
from megatron_ext.megatron.fused_loss.training_loss import TrainingLoss
from megatron_ext.megatron.fusion_report import ModelFusion, counts_since_last_call

COUNTS = "_compute_mtp_acceptance_counts"

_last: dict[str, Tensor] = {}  # [B, S] by name in the log: values of the last main loss, until they are logged


def remember(counters: ModelFusion, found: TrainingLoss, counted_BS: Tensor) -> None:
    """Keep a loss's z-loss and entropy for the log. The main loss comes after those of multi-token prediction and
    replaces them; values of a loss without a gradient (a reference model's) go into the counters alone."""
    trains = found.loss.requires_grad
    if trains:
        _last.clear()
    for name, value_SB in (("z_loss", found.z_loss), ("entropy", found.entropy)):
        if value_SB is not None:
            value_BS = value_SB.detach().transpose(0, 1)
            setattr(counters, name, value_BS.sum() / counted_BS.sum().clamp(min=1))
            if trains:
                _last[name.replace("_", " ")] = value_BS


def with_head_logged(original: Any) -> Any:
    """Return `forward_step_calc_loss` that also adds to what the script logs, and writes a step's counts."""

    def calc_loss(model: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = dict(_last)
        _last.clear()
        store = kwargs.get("forward_data_store", args[5] if len(args) > 5 else None)
        before = 0 if store is None else len(store)
        results = original(model, output_tensor, *args, **kwargs)
        if store is not None and len(store) > before:
            if found and isinstance(store[-1], dict):
                _add(store[-1], found, output_tensor, results[0] if isinstance(results, tuple) else results)
            if len(store) == kwargs.get("num_microbatches", args[4] if len(args) > 4 else None):
                _write(counts_since_last_call())
        return results

    return calc_loss


def _add(logged: dict[str, Any], found: dict[str, Tensor], output: Any, mean: Any) -> None:
    shape = next(iter(found.values())).shape
    losses = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.shape == shape]
    if len(losses) != 1 or not losses[0].requires_grad or not isinstance(mean, Tensor) or not mean.requires_grad:
        return  # in evaluation the log stays comparable with that of other runs
    (weights_BS,) = torch.autograd.grad(mean, losses, retain_graph=True, allow_unused=True)
    if weights_BS is None:
        return
    total = weights_BS.sum()
    like = next((x for x in logged.values() if isinstance(x, Tensor)), None)
    for name, value_BS in found.items():
        value = (weights_BS * value_BS).sum() / total.where(total != 0, 1.0)
        if like is not None and like.numel() == 2:  # a sum and a number of tokens
            _, tokens = like.flatten()
            logged[name] = torch.stack([value.to(like.dtype) * tokens, tokens])
        else:
            logged[name] = value


def _write(counts: dict[str, int]) -> None:
    """Write the counts of a training step to Megatron's writers, at the steps at which Megatron writes too."""
    script: Any = sys.modules.get("megatron.training.global_vars")
    if script is None or not torch.is_grad_enabled():  # evaluation
        return
    board, wandb = script.get_tensorboard_writer(), script.get_wandb_writer()
    if board is None and wandb is None:
        return
    args = script.get_args()
    step = getattr(args, "curr_iteration", None)  # the number of steps that are done
    if step is None or (step + 1) % args.tensorboard_log_interval:
        return
    if board is not None:
        for name, count in counts.items():
            board.add_scalar(name, count, step + 1)
    if wandb is not None:
        wandb.log(counts, step + 1)


def counts_acceptance() -> bool:
    """Return whether this Megatron-Core counts, for multi-token prediction, the labels with the largest logit."""
    return hasattr(multi_token_prediction, COUNTS)


def counts_by_hits(original: Any) -> Any:
    """Return a function that calls Megatron's only if the loss of promised logits has not found the hits."""

    def counts(mtp_logits: Tensor, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = mtp_logits.terms.hits if isinstance(mtp_logits, PromisedLogits) else None
        if found is None or found[0] is not mtp_labels:
            return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        with torch.no_grad():
            valid_SB = loss_mask.transpose(0, 1).bool()
            return (found[1] & valid_SB).sum().float(), valid_SB.sum().float()

    return counts
