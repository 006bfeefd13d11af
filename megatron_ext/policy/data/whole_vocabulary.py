"""Vocabulary-parallel logits gathered to the whole vocabulary, for losses that need whole distributions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group, VocabShard, group_rank, tensor_parallel_group


def whole_vocabulary(logits: Tensor, tp_group: Group, vocab: VocabShard) -> Tensor:
    """`[..., V]` of this rank's `[..., V/R]`, on every rank of `tp_group`, which go on with it alike.

    Communicates: forward 1 all-gather, backward nothing.
    """
    found: Tensor = _WholeVocabulary.apply(logits, tensor_parallel_group(tp_group), vocab)
    return found


class _WholeVocabulary(torch.autograd.Function):
    """The gradient of each rank is its own shard's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, vocab: VocabShard) -> Tensor:
        ctx.vocab = vocab
        width = -(-vocab.start // group_rank(group)) if group_rank(group) else vocab.columns
        padded = F.pad(logits, (0, width - logits.shape[-1]))
        return collectives.all_gather(padded, group, dim=logits.dim() - 1)[..., : vocab.size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = grads[0][..., ctx.vocab.start : ctx.vocab.stop]
        return F.pad(own, (0, ctx.vocab.columns - own.shape[-1])), None, None
