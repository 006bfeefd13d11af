"""Chosen ids, top-k, top-p, softmax and KL divergence of vocabulary-parallel logits.

Shapes: `[...]` are leading dims, V the vocabulary, R the ranks of `tp_group`, K ids per token. All results are fp32
(fp64 for fp64), gradients have the logits' dtype. -inf columns have no probability and get no gradient. In a row
of -inf alone every label has -inf, with a filter and without, the entropy is 0, and gradients are not NaN.

What all functions here take:
    tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
        initialised, else no sharding.
    vocab: this rank's columns; None: equal shards in rank order, all columns count.
    chunk_tokens: tokens a chunk; None: chosen from the sizes. It changes memory and speed, not the result.
and raise: ValueError, on every rank, where an argument breaks its rule; the message says which, and the fix.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.cross_entropy_of_logits import token_log_probs
from megatron_ext.head.engine import statistics
from megatron_ext.head.engine.flatten import Flat
from megatron_ext.head.engine.options import HeadOptions, one_of
from megatron_ext.head.readouts.gather import Gather, TopK
from megatron_ext.head.readouts.kl_divergence import Direction, Divergence
from megatron_ext.head.readouts.readout import FromLogits, ReadOut
from megatron_ext.head.readouts.softmax import DenseSoftmax
from megatron_ext.head.readouts.top_k_filter import TopKTopP
from megatron_ext.head.readouts.top_p_filter import TopP
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype
from megatron_ext.head.validation import argument_checks
from megatron_ext.head.validation.sampling_checks import check_ids, check_k, filters


def gather_log_probs(
    logits: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities `[..., K]` of the token ids `indices` `[..., K]` under logits `[..., V/R]`.

    The gradient of the logits is `scatter_add(g) - softmax * sum(g)`; an id may be asked for twice. With
    `return_entropy` a tuple of them and the entropy `[...]` of each distribution, from the same pass; differentiable.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    chosen = {"chunk_tokens": chunk_tokens, "temperature": temperature, "entropy": return_entropy}
    found = _gather(logits, indices, True, tp_group, vocab, **chosen)
    return (found[..., :-1], found[..., -1]) if return_entropy else found


def gather_logits(
    logits: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Logits `[..., K]` of the token ids `indices` `[..., K]`, of logits `[..., V/R]`. Differentiable.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    return _gather(logits, indices, False, tp_group, vocab, chunk_tokens=chunk_tokens)


def vocab_topk(
    logits: Tensor,
    k: int,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest logits `[..., k]` of the whole vocabulary, and their global ids `[..., k]` (int64).

    Values fall; among equals the lowest id comes first, on every device. Values are differentiable.

    Communicates: forward 1 collective at R > 1, each rank's own k largest; backward none.
    """
    options, fault, flat = _sharded(logits, tp_group, vocab, chunk_tokens=chunk_tokens)
    fault = argument_checks.size_fault(vocab, check_k, "k", k, size=options.vocab.size, group=options.group) or fault
    values, ids = _read(logits, TopK(options, False, k), fault, flat)
    return values, ids


def sampled_log_probs(
    logits: Tensor,
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float = 1.0,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Log-probability `[...]` of each label under the distribution that it was sampled from.

    Logits are divided by the temperature. Top-k keeps the k largest and all that equal the k-th. Of these top-p keeps
    every one above which lies less probability (renormalised after top-k) than p: the shortest prefix, largest first,
    that reaches p, and all that equal its last. So what a sampler drew is kept, however it breaks ties: vLLM with
    FlashInfer keeps them all, its PyTorch sampler and NeMo-RL those at the k-th and some of those where p is reached,
    its Triton sampler exactly k.

    A label that is not kept gives -inf and no gradient at all. A kept one gives g on itself, and -g times the
    renormalised probability on all that is kept; nothing reaches what is not.

    Args:
        logits: `[..., V/R]`, this rank's columns.
        labels: `[...]`, integers: global token ids; `ignore_index` gives 0 and no gradient.
        top_k: at least 1; more than the vocabulary keeps all of it; None or -1: off.
        top_p: in (0, 1]; 1: off. Without top-k shards must be of equal width, the last one maybe narrower.

    Communicates, at R > 1: forward 1 collective, k candidates of each rank (above 4096 1 more, a number of each); with
    top-p alone 2 for a single chunk, else 1 a chunk and 2 more, which exchange the logits. Backward none.
    """
    if not filters(top_k, top_p):
        found = token_log_probs(
            logits,
            labels,
            tp_group,
            vocab,
            ignore_index,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )
        assert isinstance(found, Tensor)
        return found
    options, fault, flat = _sharded(
        logits, tp_group, vocab, temperature=temperature, ignore_index=ignore_index, chunk_tokens=chunk_tokens
    )
    size = options.vocab.size
    fault = (
        argument_checks.size_fault(
            vocab, argument_checks.check_labels, labels, ignore_index, size=size, group=options.group
        )
        or fault
    )
    _check_leading("labels", labels.shape, logits)
    if top_k in (None, -1):
        flat = flat if options.ranks == 1 else Flat(logits, as_given=True)  # the ranks exchange rows, chunk by chunk
        return _read(logits, TopP(options, flat(labels.long()), float(top_p)), fault, flat)[0]
    return _read(logits, TopKTopP(options, flat(labels.long()), top_k, float(top_p)), fault, flat)[0]


def vocab_parallel_log_softmax(logits: Tensor, tp_group: Group = None, vocab: VocabShard | None = None) -> Tensor:
    """Log-probabilities `[..., V/R]` of this rank's columns, over the whole vocabulary. Differentiable.

    A tensor of the logits' size in fp32, which is also saved: `gather_log_probs` and `token_log_probs` need neither.
    Columns past the vocabulary are -inf.

    Communicates, at R > 1: forward 1 collective, backward 1.
    """
    return _dense(logits, True, tp_group, vocab)


def vocab_parallel_softmax(logits: Tensor, tp_group: Group = None, vocab: VocabShard | None = None) -> Tensor:
    """Probabilities `[..., V/R]`, else as `vocab_parallel_log_softmax`. Columns past the vocabulary are 0."""
    return _dense(logits, False, tp_group, vocab)


def soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`-sum softmax(teacher) log_softmax(student)`, `[...]`, of logits `[..., V/R]`; its gradient is the student's.

    The temperature divides both. A teacher's dtype may be another one.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    chosen = {"chunk_tokens": chunk_tokens, "temperature": temperature}
    return _divergence("cross entropy", student_logits, teacher_logits, tp_group, vocab, **chosen)


def kl_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    direction: Direction = "forward",
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """KL divergence `[...]` over the whole vocabulary; else as `soft_cross_entropy`.

    "forward" is KL(teacher | student), "reverse" KL(student | teacher). It is infinite where the one on the left gives
    a token probability that the other has at -inf.
    """
    one_of("direction", direction, get_args(Direction))
    chosen = {"chunk_tokens": chunk_tokens, "temperature": temperature}
    return _divergence(direction, student_logits, teacher_logits, tp_group, vocab, **chosen)


def _dense(logits: Tensor, logarithm: bool, tp_group: Group, vocab: VocabShard | None) -> Tensor:
    options, fault, flat = _sharded(logits, tp_group, vocab)
    z_TV = flat(logits)
    if fault is not None:
        if options.ranks > 1:
            statistics.refuse(z_TV.shape[0], options, accumulation_dtype(logits.dtype), logits.device)
        raise fault
    return flat.up(DenseSoftmax.apply(z_TV, logarithm, options, flat.places(logits.device, options.ranks)))


def _divergence(kind: Any, *arguments: Any, **chosen: Any) -> Tensor:
    return apart(lambda options: Divergence(options, kind), *arguments, **chosen)


def apart(
    make: Callable[[HeadOptions], ReadOut],
    student: Tensor,
    teacher: Tensor,
    tp_group: Group,
    vocab: VocabShard | None,
    **chosen: Any,
) -> Tensor:
    """What the read-out that `make` makes of the options says of two distributions; `chosen` are options."""
    options, fault, flat = _sharded(student, tp_group, vocab, "student_logits", **chosen)
    argument_checks.check_floating("teacher_logits", teacher)
    if teacher.shape[:-1] != student.shape[:-1] or teacher.device != student.device:
        raise ValueError(
            f"teacher_logits have shape {tuple(teacher.shape)} on {teacher.device}, student_logits "
            f"{tuple(student.shape)} on {student.device}: both must be logits of the same tokens, on one device"
        )
    if fault is None:
        fault = argument_checks.shard_fault(options.vocab, teacher.shape[-1], "teacher_logits", options.ranks)
    read_out = make(options)
    if read_out.in_step and options.ranks > 1:  # the ranks exchange numbers of the same tokens, chunk by chunk
        flat = Flat(student, as_given=True)
    return flat.up(_flat_results(student, read_out, fault, flat, teacher)[0])


def _gather(logits: Tensor, indices: Tensor, normalised: bool, tp_group: Group, vocab: Any, **chosen: Any) -> Tensor:
    options, fault, flat = _sharded(logits, tp_group, vocab, **chosen)
    fault = argument_checks.size_fault(vocab, check_ids, indices, size=options.vocab.size, group=options.group) or fault
    _check_leading("indices", indices.shape[:-1], logits)
    return _read(logits, Gather(options, normalised, flat(indices.long())), fault, flat)[0]


def _sharded(
    logits: Tensor, tp_group: Group, vocab: VocabShard | None, argument: str = "logits", **chosen: Any
) -> tuple[HeadOptions, ValueError | None, Flat]:
    """The checked options, what only this rank may see wrong with its columns, and how logits become flat."""
    group = tensor_parallel_group(tp_group)
    argument_checks.check_floating(argument, logits)
    columns = logits.shape[-1]
    options = HeadOptions(group=group, vocab=argument_checks.shard_of(vocab, max(columns, 1), group), **chosen)
    return options, argument_checks.shard_fault(options.vocab, columns, argument, options.ranks), Flat(logits)


def _read(logits: Tensor, read_out: ReadOut, fault: ValueError | None, flat: Flat) -> list[Tensor]:
    return [flat.up(x) for x in _flat_results(logits, read_out, fault, flat)]


def _flat_results(logits: Tensor, read_out: ReadOut, fault: ValueError | None, flat: Flat, teacher: Any = None):
    if fault is not None:
        if read_out.options.ranks > 1 and flat.shape.numel():
            read_out.refuse(logits, flat.shape.numel())
        raise fault
    teacher = None if teacher is None else flat.rows(teacher.detach())
    places_T = flat.places(logits.device, read_out.options.ranks)
    return FromLogits.apply(flat.rows(logits), teacher, read_out, places_T)


def _check_leading(argument: str, leading: torch.Size, logits: Tensor) -> None:
    if leading != logits.shape[:-1]:
        raise ValueError(
            f"{argument} has leading dims {tuple(leading)}, logits {tuple(logits.shape[:-1])}: they must be equal, "
            f"a row of logits for each token; reshape one of them"
        )
