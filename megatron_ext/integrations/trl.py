"""Our log-probabilities in TRL's trainers, from logits, and from hidden states if the TRL version has a fused head; and
the divergence from a teacher that its distillation computes from hidden states.

TRL's trainers have no tensor parallelism: logits and weights are whole. A call of TRL's fused head that ours cannot
compute, such as one with a weight partitioned by DeepSpeed ZeRO-3, is left to TRL's own function, with a warning that
says why. See docs/rl.md.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import head
from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.integrations.substitution import FrameworkSubstitution, ReplacedName
from megatron_ext.model_utils.functions import PlainFunction

MODULE = "trl.trainer.utils"
_FUSED = "_ChunkedLogProbFunction"
_DIVERGENCE = "trl.kernels.chunked_divergence"
_FUSED_OUTPUTS = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"}


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the ids `index`, `[...]` or `[..., K]`, under logits `[..., V]` divided by the temperature.

    `row_mask`: of the shape of `index`, or with one number for each token. The results of a token whose mask has a 0
    are 0, without a gradient.

    Returns:
        A tensor of the shape of `index`, fp32 (fp64 for fp64 logits); TRL's own has the logits' dtype on CPU. Beside
        the logits no tensor of the vocabulary's size is saved for backward.

    Raises:
        ValueError: a `row_mask` of another shape; what `megatron_ext.token_log_probs` and
            `megatron_ext.head.gather_log_probs` refuse.
    """
    row_mask = _of_tokens(row_mask, index, logits)
    if index.dim() == logits.dim():
        picked = cast(Tensor, head.gather_log_probs(_plain(logits), index, tp_group=UNSHARDED, temperature=temperature))
        return picked if row_mask is None else picked.where(row_mask.unsqueeze(-1), 0.0)
    options: Any = {"tp_group": UNSHARDED, "temperature": temperature, "loss_mask": row_mask}
    return cast(Tensor, head.token_log_probs(_plain(logits), index, **options))


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities as by `selective_log_softmax`, of one id a token, and entropies, in one pass; `[...]`, fp32."""
    log_probs, entropy = head.token_log_probs(
        _plain(logits),
        index,
        tp_group=UNSHARDED,
        temperature=temperature,
        loss_mask=_of_tokens(row_mask, index, logits),
        return_entropy=True,
    )
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


def _of_tokens(row_mask: Tensor | None, index: Tensor, logits: Tensor) -> Tensor | None:
    """Return which tokens count, bool `[...]`: those without a 0 in the mask; None: all."""
    if row_mask is None:
        return None
    if row_mask.shape == logits.shape[:-1]:
        return row_mask != 0
    if row_mask.shape != index.shape:
        raise ValueError(
            f"row_mask has shape {tuple(row_mask.shape)}, index {tuple(index.shape)}: row_mask must have index's "
            f"shape, or one number for each token, {tuple(logits.shape[:-1])}"
        )
    return (row_mask != 0).all(-1)


def _plain(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _fused_head(original: Any) -> type:
    """Make the replacement of TRL's autograd function of the fused head: per-token numbers from hidden states."""

    class ChunkedLogProb(PlainFunction):
        """Per-token numbers as TRL's own function has, by `LmHead.read` unless `_left_to_theirs` gives a reason."""

        @staticmethod
        def forward(
            ctx: Any,
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
        ) -> tuple[Tensor | None, ...]:
            why = _left_to_theirs(hidden, weight, logit_scale, outputs)
            if why is not None:
                warnings.warn(f"TRL's own fused head runs, not megatron_ext's: {why}", stacklevel=3)
                given = hidden, weight, bias, targets, temperature, chunk_size
                return original.apply(*given, final_logit_softcapping, logit_scale, outputs)
            lm_head = _lm_head(hidden, weight, bias, logit_scale, final_logit_softcapping, temperature)
            return _per_token(lm_head, hidden, targets, outputs)

    return ChunkedLogProb


def _fused_divergence(original: Any) -> type:
    """Make the replacement of TRL's autograd function of distillation: a divergence and the student's entropy."""

    class ChunkedDivergence(PlainFunction):
        """Divergences as TRL's own function has, by `LmHead.read` unless `_left_to_theirs` gives a reason."""

        @staticmethod
        def forward(
            ctx: Any,
            student_hidden: Tensor,
            student_weight: Tensor,
            student_bias: Tensor | None,
            teacher_hidden: Tensor,
            teacher_weight: Tensor,
            teacher_bias: Tensor | None,
            beta: float,
            temperature: float = 1.0,
            student_logit_scale: float = 1.0,
            student_final_logit_softcapping: float | None = None,
            teacher_logit_scale: float = 1.0,
            teacher_final_logit_softcapping: float | None = None,
        ) -> tuple[Tensor, Tensor]:
            student = student_hidden, student_weight, student_bias
            teacher = teacher_hidden, teacher_weight, teacher_bias
            of_student = student_logit_scale, student_final_logit_softcapping
            of_teacher = teacher_logit_scale, teacher_final_logit_softcapping
            found = (_left_to_theirs(*x[:2], scale) for x, (scale, _) in ((student, of_student), (teacher, of_teacher)))
            why = next((reason for reason in found if reason is not None), None)
            if why is not None:
                warnings.warn(f"TRL's own fused divergence runs, not megatron_ext's: {why}", stacklevel=3)
                return original.apply(*student, *teacher, beta, temperature, *of_student, *of_teacher)
            # The student's temperature divides both models' logits.
            guide = head.Teacher(_lm_head(*teacher, *of_teacher, 1.0), teacher_hidden)
            limits: dict[float, head.ReadOut] = {0.0: head.KL(guide), 1.0: head.KL(guide, "reverse")}
            asked = limits[beta] if beta in limits else head.JensenShannon(guide, beta)
            divergence, entropy = _lm_head(*student, *of_student, temperature).read(
                student_hidden, asked, head.Entropy()
            )
            return divergence, entropy.detach()

    return ChunkedDivergence


def _left_to_theirs(hidden: Tensor, weight: Tensor, logit_scale: float, outputs: tuple[str, ...] = ()) -> str | None:
    """Return why the head cannot do a call; None if it can."""
    if hasattr(weight, "ds_id"):
        return "the lm head's weight is partitioned by DeepSpeed ZeRO-3; use another ZeRO stage, or FSDP"
    if isinstance(hidden, DTensor):
        return "the hidden states are a DTensor; use a model whose last layer gives whole tensors"
    if not logit_scale > 0:
        return f"the model's logits are multiplied by {logit_scale}, which is not above 0"
    unknown = sorted(set(outputs) - _FUSED_OUTPUTS)
    return f"the outputs {', '.join(unknown)} are not known here" if unknown else None


def _lm_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> head.LmHead:
    if not torch.is_autocast_enabled(hidden.device.type):  # TRL multiplies in the dtype of the hidden states
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return head.LmHead(weight, UNSHARDED, bias=bias, logit_scale=scale, softcap=softcap, temperature=temperature)


def _per_token(
    lm_head: head.LmHead, hidden: Tensor, targets: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor | None, ...]:
    """Compute log-probabilities, entropy, log of the sum of squared probabilities, mean logit, and whether the target
    is likeliest, `[T]` each; None for a number that is not among `outputs`. The third and fourth have no gradient.
    """
    asked: dict[str, head.ReadOut] = {"log_probs": head.LogProbs(targets)}
    makers: dict[str, Callable[[], head.ReadOut]] = {
        "entropy": head.Entropy,
        "log_sum_sq_probs": head.SumOfSquares,
        "mean_logits": head.MeanLogit,
        "is_top1": lambda: head.IsArgmax(targets),
    }
    asked |= {name: make() for name, make in makers.items() if name in outputs}
    results = lm_head.read(hidden, *asked.values())
    found: dict[str, Tensor] = dict(zip(asked, results if len(asked) > 1 else (results,), strict=True))
    squares, means = found.get("log_sum_sq_probs"), found.get("mean_logits")
    return (
        found["log_probs"],
        found.get("entropy"),
        None if squares is None else squares.detach().log(),
        None if means is None else means.detach(),
        found.get("is_top1"),
    )


def _replaced_names() -> list[ReplacedName]:
    return [
        ReplacedName(MODULE, "selective_log_softmax", selective_log_softmax),
        ReplacedName(MODULE, "selective_log_softmax_and_entropy", selective_log_softmax_and_entropy, required=False),
        ReplacedName(MODULE, _FUSED, _fused_head, required=False, made=True),
        ReplacedName(_DIVERGENCE, "ChunkedDivergenceFunction", _fused_divergence, needs=_DIVERGENCE, made=True),
    ]


_substitution = FrameworkSubstitution("trl", _replaced_names)
apply, report, restore = _substitution.apply, _substitution.report, _substitution.restore
