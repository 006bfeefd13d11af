"""Chosen ids, top-k, top-p, softmax and divergences: from vocabulary-parallel logits, or (`linear_...`) from hidden
states, where at most one chunk of logits exists at a time.

Shapes: `[...]` are leading dims, D the hidden size, V the vocabulary, R the ranks of `tp_group`, K ids per token. All
results are fp32 (fp64 for fp64), the same on every rank; gradients have the logits' dtype. Columns of -inf have no
probability and get no gradient. In a row of -inf alone every label has -inf, with a filter and without, the entropy is
0, and gradients are not NaN.

All functions take
    tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
        initialised, else no sharding.
    vocab: this rank's columns; None: equal shards in rank order, all columns count.
    chunk_tokens: tokens per chunk; None: chosen from the sizes. It changes memory and speed, not the result.
Functions of hidden states also take
    hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0.
    weight: `[V/R, D]`, this rank's vocabulary shard, of the same dtype (any under autocast).
    hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each holds its slice. In either
        layout other arguments and results per token are of the full sequence.
    facts: further keyword arguments of `LmHead`.
All raise ValueError, on every rank, if an argument breaks its rule; the message says which, and the fix.

Functions of hidden states make the logits again in backward: 8 T V D / R FLOPs in all, 12 with a teacher; on one rank
divergences keep their gradient instead, for as many tokens as `cache` says. They communicate, at R > 1: forward 1
collective, backward 1; with the sequence layout 2 and 2.
"""

from typing import Any, Unpack, get_args

from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.head.checks import HiddenLayout, filters, one_of, tells_torchs_names, token_bound
from megatron_ext.head.engine.stored_logits import dense_softmax
from megatron_ext.head.layer_facts import HeadFacts
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.logits import Logits
from megatron_ext.head.readouts.gather import Gather, TopK
from megatron_ext.head.readouts.kept import Kept
from megatron_ext.head.readouts.kl_divergence import KL, Direction
from megatron_ext.head.readouts.normalised_divergences import JensenShannon
from megatron_ext.head.readouts.read_out import LogProbs, ReadOut
from megatron_ext.head.readouts.row_sums import Entropy
from megatron_ext.head.readouts.teacher import Teacher
from megatron_ext.head.readouts.top_k_filter import TopKFiltered
from megatron_ext.head.readouts.top_p_filter import TopPFiltered


def gather_log_probs(
    logits: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities `[..., K]` of the token ids `indices` `[..., K]` under logits `[..., V/R]`.

    The gradient of the logits is `scatter_add(g) - softmax * sum(g)`; an id may come twice. With `return_entropy` the
    result is a tuple of these and the entropy `[...]` of each distribution, from the same pass, differentiable too.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    z = Logits(logits, tp_group, vocab=vocab, chunk_tokens=chunk_tokens, temperature=temperature)
    return z.read(Gather(indices), Entropy()) if return_entropy else z.read(Gather(indices))


def gather_logits(
    logits: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Gather the logits `[..., K]` of the token ids `indices` `[..., K]` from `logits` `[..., V/R]`. Differentiable.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    return Logits(logits, tp_group, vocab=vocab, chunk_tokens=chunk_tokens).read(Gather(indices, normalised=False))


def vocab_topk(
    logits: Tensor,
    k: int,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest logits `[..., k]` of the whole vocabulary, and their global ids `[..., k]` (int64).

    Values fall; among equals the lowest id comes first, on every device. Values are differentiable.

    Communicates: forward 1 collective at R > 1, each rank's own k largest; backward none.
    """
    return Logits(logits, tp_group, vocab=vocab, chunk_tokens=chunk_tokens).read(TopK(k, normalised=False))


def Sampled(
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    ignore_index: int = -100,
    kept: tuple[Tensor, Tensor] | None = None,
) -> ReadOut:
    """Make the read-out of `sampled_log_probs`, whose arguments these are: `[...]`, fp32 (fp64 for fp64).

    Communicates, at several ranks, beside the common exchange: with a `top_k` above 4096 one all-gather of a number of
    each rank; with top-p alone one all-gather of the shards' places, then one exchange of logits per chunk.
    """
    filtered = filters(top_k, top_p)
    if kept is not None:
        if filtered or not isinstance(kept, tuple | list) or len(kept) != 2:
            raise ValueError(
                f"kept is {type(kept).__name__} beside top_k {top_k!r} and top_p {top_p!r}: it must be (offsets, ids), "
                f"and filters off: what is kept has been through them; pass top_k=None and top_p=1.0"
            )
        return Kept(labels, *kept, ignore_index)
    if not filtered:
        return LogProbs(labels, ignore_index)
    if top_k is None or top_k == -1:
        return TopPFiltered(labels, float(top_p), ignore_index)
    return TopKFiltered(labels, top_k, float(top_p), ignore_index)


def sampled_log_probs(
    logits: Tensor,
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float = 1.0,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Log-probability `[...]` of each label under the distribution that it was sampled from.

    Logits are divided by the temperature. Top-k keeps the k largest and all that equal the k-th. Of these top-p keeps
    the shortest prefix, largest first, whose probability (renormalised after top-k) reaches p, and all logits equal to
    its last. So an id that a sampler drew is kept, however the sampler breaks ties: vLLM with FlashInfer keeps all
    equals, its PyTorch sampler and NeMo-RL keep all equals of the k-th and some of those where p is reached, and its
    Triton sampler keeps exactly k ids.

    A label that is not kept gives -inf and no gradient. A kept label gives the gradient g on itself, less g times the
    renormalised probability of each kept id; ids that are not kept get 0.

    Args:
        logits: `[..., V/R]`, this rank's columns.
        labels: `[...]`, integers: global token ids; `ignore_index` gives 0 and no gradient.
        top_k: at least 1; if above the vocabulary's size, all ids are kept; None or -1: off.
        top_p: in (0, 1]; 1: off. Without top-k shards must have equal widths, but the last may be narrower.
        kept: `(offsets, ids)`: the ids that the generator kept at each token, as vLLM returns them, instead of
            filters; see `Kept`. A label that its token did not keep raises an error.

    Communicates, at R > 1: forward 1 collective, of k logits of each rank (with k above 4096 1 more, of a number of
    each); with top-p alone 2 for a single chunk, else 1 a chunk and 2 more, which exchange the logits. Backward none.
    """
    z = Logits(logits, tp_group, vocab=vocab, temperature=temperature, chunk_tokens=chunk_tokens)
    return z.read(Sampled(labels, top_k, top_p, ignore_index, kept))


def vocab_parallel_log_softmax(logits: Tensor, tp_group: Group = None, vocab: VocabShard | None = None) -> Tensor:
    """Log-probabilities `[..., V/R]` of this rank's columns, over the whole vocabulary. Differentiable.

    The result has the logits' size in fp32 and is saved for backward; `gather_log_probs` and `token_log_probs` avoid
    both. Columns past the vocabulary are -inf.

    Communicates, at R > 1: forward 1 collective, backward 1.
    """
    return dense_softmax(Logits(logits, tp_group, vocab=vocab), True)


def vocab_parallel_softmax(logits: Tensor, tp_group: Group = None, vocab: VocabShard | None = None) -> Tensor:
    """Probabilities `[..., V/R]`, otherwise as `vocab_parallel_log_softmax`. Columns past the vocabulary are 0."""
    return dense_softmax(Logits(logits, tp_group, vocab=vocab), False)


def soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`-sum softmax(teacher) log_softmax(student)`: `[...]`, of logits `[..., V/R]`. The student alone gets a gradient.

    The temperature divides the logits of both, whose dtypes may differ.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    z, teacher = _pair(student_logits, teacher_logits, tp_group, vocab, chunk_tokens, temperature)
    return z.read(KL(teacher, "cross entropy"))


def kl_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    direction: Direction = "forward",
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """KL divergence `[...]` over the whole vocabulary, otherwise as `soft_cross_entropy`.

    "forward" is KL(teacher | student), "reverse" KL(student | teacher). KL(p | q) is infinite where p gives probability
    to a token whose logit in q is -inf.
    """
    one_of("direction", direction, get_args(Direction))
    z, teacher = _pair(student_logits, teacher_logits, tp_group, vocab, chunk_tokens, temperature)
    return z.read(KL(teacher, direction))


def js_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    beta: float = 0.5,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Jensen-Shannon divergence `[...]` over the whole vocabulary, of logits `[..., V/R]`, else as `kl_divergence`.

    `beta` in (0, 1) is the teacher's share of the mixture. Near 0 the result is `beta` times KL(teacher | student),
    near 1 `1 - beta` times KL(student | teacher).

    Communicates, at R > 1: forward 1 small collective a chunk and 2 more, backward none.

    Raises:
        ValueError: as `kl_divergence`; `beta` outside (0, 1).
    """
    z, teacher = _pair(student_logits, teacher_logits, tp_group, vocab, chunk_tokens, temperature)
    return z.read(JensenShannon(teacher, beta))


def _pair(
    student: Tensor, teacher: Tensor, group: Group, vocab: Any, chunk_tokens: int | None, temperature: float
) -> tuple[Logits, Logits]:
    """Make the `Logits` of student and teacher, over the same vocabulary shards."""
    z = Logits(student, group, vocab=vocab, name="student_logits", chunk_tokens=chunk_tokens, temperature=temperature)
    return z, Logits(teacher, group, vocab=vocab, name="teacher_logits")


@tells_torchs_names
def linear_gather_log_probs(
    hidden: Tensor,
    weight: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    *,
    return_entropy: bool = False,
    **facts: Unpack[HeadFacts],
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities `[..., K]` of the token ids `indices` `[..., K]`, as `gather_log_probs`."""
    head = LmHead(weight, tp_group, hidden_layout, **facts)
    return head.read(hidden, Gather(indices), Entropy()) if return_entropy else head.read(hidden, Gather(indices))


@tells_torchs_names
def linear_topk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    **facts: Unpack[HeadFacts],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[..., k]` of each token's k likeliest ids, in falling order, and these ids `[..., k]` (int64).

    Among equals the lowest id comes first. Log-probabilities are those of the whole vocabulary, and differentiable. A
    teacher gives these for top-k distillation.
    """
    head = LmHead(weight, tp_group, hidden_layout, **facts)
    return head.read(hidden, TopK(k))


@tells_torchs_names
def linear_sampled_log_probs(  # type: ignore[misc]  # temperature is positional here
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float = 1.0,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    *,
    ignore_index: int = -100,
    kept: tuple[Tensor, Tensor] | None = None,
    skip_ignored: bool | int = False,
    **facts: Unpack[HeadFacts],
) -> Tensor:
    """Log-probability `[...]` of each label under the distribution that it was sampled from, as `sampled_log_probs`.

    Top-p alone sends the logits in forward, as there. Backward makes each chunk of logits again by the same matmul,
    with the same bits on cuBLAS and CPUs; with top-k on a CPU only chunks in which a k-th logit has equals besides the
    candidates: without any, 6 T V D / R FLOPs in all. With `kept` they are 6 T U D for the U columns of a rank that any
    token kept, if at most half of its columns, else 6 T V D / R. `skip_ignored`: as in `linear_cross_entropy`.
    """
    head = LmHead(weight, tp_group, hidden_layout, temperature=temperature, **facts)
    counts = labels.long() != ignore_index if skip_ignored else None
    read_out = Sampled(labels, top_k, top_p, ignore_index, kept)
    return head.read(hidden, read_out, counts=counts, at_most=token_bound(skip_ignored))


def linear_kl_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    direction: Direction = "forward",
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    **facts: Unpack[HeadFacts],
) -> Tensor:
    """KL divergence `[...]` of a student from a teacher over the whole vocabulary, as `kl_divergence`.

    Hidden sizes and dtypes may differ, tokens and vocabulary shards may not. Gradients reach the student only. Costs
    are those of `KL`. `facts` are of the student's head, whose `vocab` and `temperature` hold for the teacher too.
    """
    one_of("direction", direction, get_args(Direction))
    head = LmHead(student_weight, tp_group, hidden_layout, **facts)
    teacher = Teacher(LmHead(teacher_weight, tp_group, hidden_layout, vocab=head.vocab), teacher_hidden)
    return head.read(student_hidden, KL(teacher, direction))


def linear_js_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: float = 0.5,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    **facts: Unpack[HeadFacts],
) -> Tensor:
    """`js_divergence` from hidden states, otherwise as `linear_kl_divergence`.

    Communicates, at R > 1: forward 1 small collective a chunk and 2 more, backward 1; with the sequence layout 1 more
    in each.
    """
    head = LmHead(student_weight, tp_group, hidden_layout, **facts)
    teacher = Teacher(LmHead(teacher_weight, tp_group, hidden_layout, vocab=head.vocab), teacher_hidden)
    return head.read(student_hidden, JensenShannon(teacher, beta))
