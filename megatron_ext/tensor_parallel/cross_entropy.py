"""Cross entropy of logits that are sharded along the vocabulary. Drop-in for Megatron's module, on the head's engine.

Legend: V columns of this rank's vocabulary shard, R ranks. Logits `[..., V]`, targets and losses `[...]`.
"""

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, require_tensor_parallel_group
from megatron_ext.head import CrossEntropy, Logits
from megatron_ext.tensor_parallel._replaced_functions import refuse_replaced
from megatron_ext.tensor_parallel.utils import VocabUtility as VocabUtility


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group = None
) -> Tensor:
    """Compute the per-token cross entropy, equal on every rank.

    Args:
        vocab_parallel_logits: `[..., V]`, this rank's columns, any floating dtype; never written to. -inf columns of a
            token do not count.
        target: `[...]`, integers: global token ids; -100 for tokens that get 0 and no gradient.
        label_smoothing: e in [0, 1), Megatron's (and NeMo's): the target keeps 1 - e, and all the other tokens of the
            whole vocabulary share e. PyTorch, and the rest of this package, count the target among those that share.
        tp_group: None for Megatron's tensor-parallel group.

    Returns:
        `[...]`, fp32 (fp64 for fp64). Its gradient has the dtype of the logits; a second derivative is an error.

    Communicates: 1 collective forward where R > 1, none backward. Nothing of vocabulary size is kept but the logits.

    Raises:
        ValueError: targets out of the vocabulary, shapes that do not fit, label smoothing out of range, no group to be
            found, or (on every rank) logits that were gathered before: each rank must pass its own columns.
        RuntimeError: a class was replaced that Megatron's function looks up, or a method of one.
    """
    refuse_replaced("losses of logits")
    logits = Logits(vocab_parallel_logits, require_tensor_parallel_group(tp_group))
    return logits.read(CrossEntropy(target, label_smoothing=label_smoothing, smooth_others=True))


class _VocabParallelCrossEntropy:
    """Megatron's autograd function, for code that calls its `apply`."""

    apply = staticmethod(vocab_parallel_cross_entropy)


class VocabParallelCrossEntropy:
    """The local steps of a cross entropy whose caller does the communication, as Megatron's fused loss does.

    `vocab_parallel_cross_entropy` needs none of this. The steps compute in fp32 (fp64 for fp64) and, unlike Megatron's,
    write none of their arguments: backward can run twice, and the logits stay as they were.
    """

    @staticmethod
    def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
        """`(logits, their maximum)`. The caller takes the maximum over all ranks."""
        if vocab_parallel_logits.dtype != torch.float64:
            vocab_parallel_logits = vocab_parallel_logits.float()
        return vocab_parallel_logits, vocab_parallel_logits.amax(dim=-1)

    @staticmethod
    def calculate_predicted_logits(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        logits_max: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`(target_mask, masked_target_1d, predicted_logits, sum_exp_logits, exp_logits)`.

        The mask is True where another rank owns the target; there the column is 0 and the predicted logit 0. Logits are
        those below the maximum. The caller sums predicted logits and sums of exponentials over all ranks.
        """
        below = vocab_parallel_logits - logits_max.unsqueeze(-1)
        elsewhere = (target < vocab_start_index) | (target >= vocab_end_index)
        column = (target - vocab_start_index).masked_fill(elsewhere, 0)
        predicted = below.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exp = below.exp()
        return elsewhere, column.reshape(-1), predicted, exp.sum(dim=-1), exp

    @staticmethod
    def calculate_cross_entropy_loss(
        exp_logits: Tensor, predicted_logits: Tensor, sum_exp_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`(softmax, loss)`, from sums over all ranks."""
        return exp_logits / sum_exp_logits.unsqueeze(-1), sum_exp_logits.log() - predicted_logits

    @staticmethod
    def prepare_gradient_calculation_operands(
        softmax: Tensor, target_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(softmax_2d, row numbers, 1 where the target is this rank's, softmax)`."""
        softmax_2d = softmax.reshape(-1, softmax.shape[-1])
        rows = torch.arange(softmax_2d.shape[0], device=softmax.device)
        return softmax_2d, rows, (~target_mask).reshape(-1).to(softmax.dtype), softmax

    @staticmethod
    def calculate_gradients(
        grad_2d: Tensor,
        arange_1d: Tensor,
        masked_target_1d: Tensor,
        softmax_update: Tensor,
        grad_input: Tensor,
        grad_output: Tensor,
    ) -> Tensor:
        """The logits' gradient, from what `prepare_gradient_calculation_operands` gave and the losses' gradient."""
        minus_target = grad_2d.index_put((arange_1d, masked_target_1d), -softmax_update, accumulate=True)
        return minus_target.view_as(grad_input) * grad_output.unsqueeze(-1)
