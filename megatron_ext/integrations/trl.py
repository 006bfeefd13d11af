"""Our log-probabilities in TRL's trainers: from logits, and from hidden states where its version has a fused head.

TRL's trainers know no tensor parallelism: logits and weights are whole. What ours does not compute, or not for a kind
of tensor, is left to TRL's own function, call by call. See docs/rl.md.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import head
from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.integrations.substitution import Seam, Substitution

MODULE = "trl.trainer.utils"
_FUSED = "_ChunkedLogProbFunction"
_FUSED_OUTPUTS = {"log_probs", "entropy", "is_top1"}


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the ids `index`, `[...]` or `[..., K]`, under logits `[..., V]`, divided by the temperature.

    `row_mask`, of the shape of `index`, or a number for each token: results of tokens that have a 0 in it are 0,
    without a gradient.

    Returns:
        The shape of `index`, fp32 (fp64 for fp64); TRL's own has the logits' dtype on CPU. Nothing of vocabulary size
        is saved beside the logits.

    Raises:
        ValueError: a `row_mask` of another shape; what `megatron_ext.token_log_probs` and
            `megatron_ext.head.gather_log_probs` refuse.
    """
    if row_mask is not None:
        row_mask = _of_tokens(row_mask, index, logits)
    if index.dim() == logits.dim():
        picked = head.gather_log_probs(_plain(logits), index, tp_group=UNSHARDED, temperature=temperature)
        assert isinstance(picked, Tensor)
        return picked if row_mask is None else picked.where(row_mask.unsqueeze(-1), 0.0)
    found = head.token_log_probs(_plain(logits), index, tp_group=UNSHARDED, temperature=temperature, loss_mask=row_mask)
    assert isinstance(found, Tensor)
    return found


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax` of one id a token, and the entropy of each distribution, in one pass."""
    if row_mask is not None:
        row_mask = _of_tokens(row_mask, index, logits)
    log_probs, entropy = head.token_log_probs(
        _plain(logits),
        index,
        tp_group=UNSHARDED,
        temperature=temperature,
        loss_mask=row_mask,
        return_entropy=True,
    )
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


def _of_tokens(row_mask: Tensor, index: Tensor, logits: Tensor) -> Tensor:
    """Which tokens have no 0 in the mask, `[...]`."""
    if row_mask.shape == logits.shape[:-1]:
        return row_mask != 0
    if row_mask.shape != index.shape:
        raise ValueError(
            f"row_mask has shape {tuple(row_mask.shape)}, index {tuple(index.shape)}: it must have the same, or a "
            f"number for each token, {tuple(logits.shape[:-1])}"
        )
    return (row_mask != 0).all(-1)


def _plain(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _fused_head(original: Any) -> type:
    """What stands for TRL's autograd function of the fused head: per-token numbers from hidden states."""

    class ChunkedLogProb(torch.autograd.Function):
        """`apply` gives log-probabilities, entropy and whether the label is likeliest, as TRL's own; `linear_log_probs`
        makes them. Other outputs, a ZeRO-3 weight and a scale that is not above 0 are left to TRL's."""

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
            partitioned = hasattr(weight, "ds_id") or isinstance(hidden, DTensor)
            scaled = logit_scale != 1 and (final_logit_softcapping is not None or not logit_scale > 0)
            if partitioned or scaled or not set(outputs) <= _FUSED_OUTPUTS:
                return original.apply(
                    hidden,
                    weight,
                    bias,
                    targets,
                    temperature,
                    chunk_size,
                    final_logit_softcapping,
                    logit_scale,
                    outputs,
                )
            if not torch.is_autocast_enabled(hidden.device.type):  # TRL multiplies in the dtype of the hidden states
                weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
            found = head.linear_log_probs(
                hidden,
                weight,
                targets,
                tp_group=UNSHARDED,
                bias=bias,
                softcap=final_logit_softcapping,
                temperature=temperature / logit_scale,
                return_entropy="entropy" in outputs,
                return_hits="is_top1" in outputs,
            )
            rest = list(found) if isinstance(found, tuple) else [found]
            log_probs = rest.pop(0)
            entropy = rest.pop(0) if "entropy" in outputs else None
            return log_probs, entropy, None, None, rest.pop(0) if "is_top1" in outputs else None

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            return cls.forward(None, *args, **kwargs)

    return ChunkedLogProb


def _seams() -> list[Seam]:
    return [
        Seam(MODULE, "selective_log_softmax", selective_log_softmax),
        Seam(MODULE, "selective_log_softmax_and_entropy", selective_log_softmax_and_entropy, required=False),
        Seam(MODULE, _FUSED, _fused_head, required=False, made=True),
    ]


_substitution = Substitution("trl", _seams)


def apply() -> None:
    """Replaces `selective_log_softmax` and, where TRL has them, its kin with entropy and its fused head.

    Raises:
        ImportError: TRL is not installed.
        ValueError: one of them has other parameters than those known here; nothing is changed then.
    """
    _substitution.apply()


def restore() -> None:
    """TRL's own functions again, everywhere."""
    _substitution.restore()
