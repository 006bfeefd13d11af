"""The functions of `distributions_of_logits.py` from hidden states: at most one chunk of logits exists at a time.

Shapes: `[...]` are leading dims, D the hidden size, V the vocabulary, R the ranks of `tp_group`, K ids per token. All
results are fp32 (fp64 for fp64), on every rank alike. Backward makes the logits again: 8 T V D / R FLOPs in all.

What all functions here take:
    hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0.
    weight: `[V/R, D]`, this rank's vocabulary shard, of the same dtype (any under autocast).
    tp_group, vocab, chunk_tokens: as in `distributions_of_logits.py`.
    hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each its slice. What is given or
        returned per token is of the full sequence in either.
    temperature: logits are divided by it.
    gradient_accumulation_fusion: backward adds the weight gradient into `weight.main_grad`, by Megatron's protocol.
They communicate, at R > 1: forward 1 collective, backward 1; with the sequence layout 2 and 2. They raise ValueError,
on every rank, where an argument breaks its rule.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.cross_entropy_of_hidden_states import linear_log_probs
from megatron_ext.head.engine.options import HeadOptions, Layout, one_of
from megatron_ext.head.readouts.gather import Gather, TopK
from megatron_ext.head.readouts.kl_divergence import Direction, Divergence
from megatron_ext.head.readouts.readout import FromHidden, ReadOut, gather_tokens
from megatron_ext.head.readouts.top_k_filter import TopKTopP
from megatron_ext.head.readouts.top_p_filter import TopP
from megatron_ext.head.validation import argument_checks
from megatron_ext.head.validation.sampling_checks import check_ids, check_k, filters


class SharedArguments(NamedTuple):
    """What all functions here take beside hidden states and weight, as it was given."""

    tp_group: Group
    hidden_layout: Layout
    vocab: VocabShard | None
    temperature: float
    chunk_tokens: int | None
    gradient_accumulation_fusion: bool


def linear_gather_log_probs(
    hidden: Tensor,
    weight: Tensor,
    indices: Tensor,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    vocab: VocabShard | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities `[..., K]` of the token ids `indices` `[..., K]`, as `gather_log_probs`."""
    shared = SharedArguments(tp_group, hidden_layout, vocab, temperature, chunk_tokens, gradient_accumulation_fusion)
    head = _Hidden(hidden, weight, shared)
    head.check_size(check_ids, indices)
    head.check_leading(indices[..., 0])
    ids_TK = indices.long().reshape(-1, indices.shape[-1])
    options = replace(head.options, entropy=return_entropy)
    found_TK = head.read(Gather(options, True, ids_TK))[0]
    if not return_entropy:
        return found_TK.reshape(indices.shape)
    return found_TK[:, :-1].reshape(indices.shape), found_TK[:, -1].reshape(indices.shape[:-1])


def linear_topk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    vocab: VocabShard | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[..., k]` of each token's k likeliest ids, in falling order, and those ids `[..., k]` (int64).

    Among equals the lowest id comes first. What a teacher gives for top-k distillation; log-probabilities are those of
    the whole vocabulary, and differentiable.
    """
    shared = SharedArguments(tp_group, hidden_layout, vocab, temperature, chunk_tokens, gradient_accumulation_fusion)
    head = _Hidden(hidden, weight, shared)
    head.check_size(check_k, "k", k)
    log_probs_TK, ids_TK = head.read(TopK(head.options, True, k))
    return log_probs_TK.reshape(*head.leading, k), ids_TK.reshape(*head.leading, k)


def linear_sampled_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float = 1.0,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    vocab: VocabShard | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Log-probability `[...]` of each label under the distribution that it was sampled from: `sampled_log_probs`.

    Top-p alone sends as much more forward as there. Backward makes each chunk of logits by the same matmul again, bit
    by bit, as cuBLAS and CPUs do; with top-k on CPU only chunks in which a k-th logit has equals that were not sent,
    else 6 T V D / R FLOPs in all.
    """
    if not filters(top_k, top_p):
        found = linear_log_probs(
            hidden,
            weight,
            labels,
            tp_group,
            hidden_layout,
            vocab=vocab,
            ignore_index=ignore_index,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
        )
        assert isinstance(found, Tensor)
        return found
    shared = SharedArguments(tp_group, hidden_layout, vocab, temperature, chunk_tokens, gradient_accumulation_fusion)
    head = _Hidden(hidden, weight, shared, ignore_index)
    head.check_size(argument_checks.check_labels, labels, ignore_index)
    head.check_leading(labels)
    labels_T = labels.long().flatten()
    if top_k is None or top_k == -1:
        return head.read(TopP(head.options, labels_T, float(top_p)))[0].reshape(labels.shape)
    return head.read(TopKTopP(head.options, labels_T, top_k, float(top_p)))[0].reshape(labels.shape)


def linear_kl_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    direction: Direction = "forward",
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    vocab: VocabShard | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """KL divergence `[...]` of a student from a teacher over the whole vocabulary, as `kl_divergence`.

    Hidden sizes and dtypes may differ, tokens and vocabulary shards may not. Gradients reach the student only. The
    teacher's matmul runs in both passes; with the sequence layout its hidden states travel with the student's.
    """
    one_of("direction", direction, get_args(Direction))
    return linear_apart(
        lambda options: Divergence(options, direction),
        (student_hidden, student_weight),
        (teacher_hidden, teacher_weight),
        SharedArguments(tp_group, hidden_layout, vocab, temperature, chunk_tokens, gradient_accumulation_fusion),
    )


def linear_apart(
    make: Callable[[HeadOptions], ReadOut],
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    shared: SharedArguments,
) -> Tensor:
    """What the read-out that `make` makes of the options says of two heads, each its hidden states and weight."""
    (student_hidden, student_weight), (teacher_hidden, teacher_weight) = student, teacher
    argument_checks.check_floating("teacher_hidden", teacher_hidden)
    head = _Hidden(student_hidden, student_weight, shared)
    fault = argument_checks.linear_fault(teacher_hidden, teacher_weight, None, head.options.vocab, head.options.ranks)
    if teacher_hidden.shape[:-1] != student_hidden.shape[:-1] or teacher_hidden.device != student_hidden.device:
        fault = ValueError(
            f"teacher_hidden has shape {tuple(teacher_hidden.shape)} on {teacher_hidden.device}, student_hidden "
            f"{tuple(student_hidden.shape)} on {student_hidden.device}: both must be hidden states of the same tokens, "
            f"on one device"
        )
    head.fault = head.fault or fault
    found_T = head.read(make(head.options), teacher_hidden, teacher_weight)[0]
    return found_T.reshape(head.leading)


class _Hidden:
    """The checked hidden states, weight and options of one call."""

    def __init__(self, hidden: Tensor, weight: Tensor, shared: SharedArguments, ignore_index: int = -100):
        group, vocab, hidden_layout = tensor_parallel_group(shared.tp_group), shared.vocab, shared.hidden_layout
        rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 1
        self.options = HeadOptions(
            group=group,
            vocab=argument_checks.shard_of(vocab, max(rows, 1), group),
            hidden_layout=hidden_layout,
            ignore_index=ignore_index,
            temperature=shared.temperature,
            chunk_tokens=shared.chunk_tokens,
            fuse_main_grad=shared.gradient_accumulation_fusion,
        )
        argument_checks.check_floating("hidden", hidden)
        self.hidden, self.weight, self.vocab = hidden, weight, vocab
        self.fault = argument_checks.linear_fault(hidden, weight, None, vocab, self.options.ranks)
        if shared.gradient_accumulation_fusion and torch.is_grad_enabled():
            self.fault = self.fault or argument_checks.main_grad_fault(weight)
        self.in_slices = hidden_layout == "sequence" and self.options.ranks > 1
        lead = hidden.shape[:-1]
        self.leading = torch.Size((lead[0] * self.options.ranks, *lead[1:])) if self.in_slices else lead

    def check_size(self, check: Callable[..., None], *arguments: Any) -> None:
        """Raises or notes what `check` finds for the vocabulary's size."""
        fault = argument_checks.size_fault(
            self.vocab, check, *arguments, size=self.options.vocab.size, group=self.options.group
        )
        self.fault = fault or self.fault

    def check_leading(self, labels: Tensor) -> None:
        """Raises or notes it if hidden states do not fit the tokens of `labels`, which says how many there are."""
        in_slices = self.options.hidden_layout == "sequence"
        fault = argument_checks.layout_fault(self.hidden, labels, in_slices, self.options.ranks)
        self.fault = fault or self.fault
        self.leading = labels.shape

    def read(self, read_out: ReadOut, *teacher: Tensor) -> Any:
        """The flat results of `read_out`; `teacher`: its hidden states and weight."""
        tokens, ranks, group = self.leading.numel(), self.options.ranks, self.options.group
        sizes = [tokens // ranks] * ranks if self.in_slices else None
        sides = [_computed(x) for x in (self.hidden, *(x.detach() for x in teacher[:1]))]
        if self.fault is not None:
            if ranks > 1 and tokens:
                if sizes:
                    gather_tokens([x.new_zeros(tokens // ranks, x.shape[1]) for x in sides], group, sizes)
                read_out.refuse(sides[0], tokens)
            raise self.fault
        if self.options.fuse_main_grad:
            main_grad.promise(self.weight)
        teacher_sides = (sides[1], teacher[1].detach()) if teacher else (None, None)
        return FromHidden.apply(sides[0], self.weight, *teacher_sides, read_out, sizes)


def _computed(hidden: Tensor) -> Tensor:
    """`[T, D]` in the dtype to compute in: autocast's where it is on."""
    kind = hidden.device.type
    narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if narrow else hidden.dtype
    return hidden.to(dtype).reshape(-1, hidden.shape[-1])
