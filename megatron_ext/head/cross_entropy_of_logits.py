"""Cross entropy, log-probabilities and entropy of labels from vocabulary-parallel logits.

Shapes: `[...]` are the leading dims of the labels, D the hidden size, V the vocabulary, R the ranks of `tp_group`.
"""

from typing import get_args

from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.lm_head import Logits
from megatron_ext.head.readouts.labels import CrossEntropy
from megatron_ext.head.readouts.row_sums import Entropy
from megatron_ext.head.reduction import log_prob_readouts, masked, reduced
from megatron_ext.head.validation.option_checks import Reduction, one_of, tells_torchs_names


@tells_torchs_names
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "none",
    chunk_tokens: int | None = None,
    loss_mask: Tensor | None = None,
    gradient_into_logits: bool = False,
) -> Tensor:
    """Cross entropy of vocabulary-sharded logits: `linear_cross_entropy` for callers who have the logits already.

    Args:
        logits: `[..., V/R]`, this rank's columns, any floating dtype. -inf columns of a token do not count.
        labels: `[...]`, integers: global token ids.
        gradient_into_logits: backward writes the gradient into the memory of `logits` instead of new memory; it runs
            once then, and who needs the logits afterwards gets an error from autograd. Not into a leaf's memory.

    The other arguments, the result and the errors as for `linear_cross_entropy`. Nothing of vocabulary size is saved
    beside the logits. The gradient has the logits' dtype.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    one_of("reduction", reduction, get_args(Reduction))
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    loss = z.read(CrossEntropy(masked(labels, loss_mask, ignore_index), ignore_index, label_smoothing, z_loss))
    return reduced(loss, labels, loss_mask, ignore_index, reduction)


@tells_torchs_names
def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    loss_mask: Tensor | None = None,
    gradient_into_logits: bool = False,
    return_entropy: bool = False,
    return_hits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`linear_log_probs` for callers who have the vocabulary-sharded logits already.

    Arguments, communication and errors as for `vocab_parallel_cross_entropy`, results as for `linear_log_probs`.
    """
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    asked = masked(labels, loss_mask, ignore_index)
    counts = asked != ignore_index if return_entropy else None
    return z.read(*log_prob_readouts(asked, ignore_index, counts, return_hits))


@tells_torchs_names
def token_entropy(
    logits: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_into_logits: bool = False,
) -> Tensor:
    """Entropy `-sum p log p` of each token's distribution, from vocabulary-sharded logits `[..., V/R]`.

    Returns:
        `[...]`, fp32 (fp64 for fp64), differentiable.

    Communicates: forward 1 collective at R > 1, backward none. Raises as `vocab_parallel_cross_entropy`.
    """
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    return z.read(Entropy())
