"""The functions of `distributions_of_logits.py` from hidden states: at most one chunk of logits exists at a time.

Shapes: `[...]` are leading dims, D the hidden size, V the vocabulary, R the ranks of `tp_group`, K ids per token. All
results are fp32 (fp64 for fp64), on every rank alike. Backward makes the logits again: 8 T V D / R FLOPs in all, 12
with a teacher; on one rank divergences keep their gradient instead, for as many tokens as `cache` says.

What all functions here take:
    hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0.
    weight: `[V/R, D]`, this rank's vocabulary shard, of the same dtype (any under autocast).
    tp_group: the ranks that share the vocabulary, as in `distributions_of_logits.py`.
    hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each its slice. What is given or
        returned per token is of the full sequence in either.
    facts: what else there is to say of the head: what `LmHead` takes by keyword.
They communicate, at R > 1: forward 1 collective, backward 1; with the sequence layout 2 and 2. They raise ValueError,
on every rank, where an argument breaks its rule.
"""

from typing import Unpack, get_args

from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.head.layer_facts import FactsBesideTemperature, HeadFacts
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.readouts.gather import Gather, TopK
from megatron_ext.head.readouts.kl_divergence import KL, Direction
from megatron_ext.head.readouts.normalised_divergences import JensenShannon
from megatron_ext.head.readouts.row_sums import Entropy
from megatron_ext.head.readouts.sampling import Sampled
from megatron_ext.head.readouts.teacher import Teacher
from megatron_ext.head.validation.option_checks import HiddenLayout, one_of, tells_torchs_names, token_bound


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
    """Log-probabilities `[..., k]` of each token's k likeliest ids, in falling order, and those ids `[..., k]` (int64).

    Among equals the lowest id comes first. What a teacher gives for top-k distillation; log-probabilities are those of
    the whole vocabulary, and differentiable.
    """
    head = LmHead(weight, tp_group, hidden_layout, **facts)
    return head.read(hidden, TopK(k))


@tells_torchs_names
def linear_sampled_log_probs(
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
    **facts: Unpack[FactsBesideTemperature],
) -> Tensor:
    """Log-probability `[...]` of each label under the distribution that it was sampled from: `sampled_log_probs`.

    Top-p alone sends as much more forward as there. Backward makes each chunk of logits by the same matmul again, bit
    by bit, as cuBLAS and CPUs do; with top-k on CPU only chunks in which a k-th logit has equals that were not sent,
    else 6 T V D / R FLOPs in all. With `kept` 6 T U D for the U columns of a rank that any token kept, if these are at
    most half of its columns, else 6 T V D / R. `skip_ignored` is that of `linear_cross_entropy`.
    """
    head = LmHead(weight, tp_group, hidden_layout, temperature=temperature, **facts)
    counts = labels != ignore_index if skip_ignored else None
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

    Hidden sizes and dtypes may differ, tokens and vocabulary shards may not. Gradients reach the student only. The
    teacher's matmul runs in both passes; with the sequence layout its hidden states travel with the student's. `facts`
    are of the student's head; its `vocab` and `temperature` are the teacher's too.
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
    """`js_divergence` from hidden states, else as `linear_kl_divergence`.

    Communicates, at R > 1: forward 1 small collective a chunk and 2 more, backward 1; with the sequence layout 1 more
    in each.
    """
    head = LmHead(student_weight, tp_group, hidden_layout, **facts)
    teacher = Teacher(LmHead(teacher_weight, tp_group, hidden_layout, vocab=head.vocab), teacher_hidden)
    return head.read(student_hidden, JensenShannon(teacher, beta))
