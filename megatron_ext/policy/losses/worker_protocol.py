"""The protocols of a loss function and a timer that workers are given, and the counts that normalize a loss.

Legend: B rows, S positions. `token_mask` `[B, S]` says which tokens count, `sample_mask` `[B]` which rows.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor


class LossType(Enum):
    """Unit of a loss's mean: the tokens of the global batch, or its rows (each the mean of its tokens)."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class MetricNormalizer(Enum):
    """Divisor of a metric: tokens or rows of the global batch that count, or nothing."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class LossInputType(Enum):
    """Part of the model's output that a loss reads; see `megatron_ext.policy.worker.reader`."""

    LOGPROB = "logprob"
    LOGIT = "logit"
    DISTILLATION = "distillation"


class LossFunction(Protocol):
    """Loss function that `train` takes. Beside the call it may have `loss_type`, `needs` (keys of the data), `unit`
    (rows that must come together, 1 if absent; they count only if all of them do), `metric_normalizations` (a
    `MetricNormalizer` for each metric that has another one than the loss), and `input_type`: a loss with an
    `input_type` is called as NeMo-RL calls its losses, see `megatron_ext.policy.worker.reader`."""

    def __call__(
        self, log_probs_BS: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the scalar loss, and metrics: numbers or 0-d tensors."""


class Timer(Protocol):
    """Timer that a method takes as `timer=`, such as NeMo-RL's `nemo_rl.utils.timer.Timer`."""

    def time(self, label: str) -> AbstractContextManager[Any]:
        """A context whose duration is recorded under `label`."""


def timed(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    """The context in which `timer` measures `label`; without a timer an empty one."""
    return nullcontext() if timer is None else timer.time(label)


def rows_together(loss_fn: Any) -> int:
    """Count the consecutive rows that must come in one micro-batch: the loss's `unit`.

    NeMo-RL's losses of pairs (`PreferenceLossFn`, `DPOLossFn`) have no `unit`, but a `split_output_tensor`: 2 rows.
    """
    return getattr(loss_fn, "unit", 2 if hasattr(loss_fn, "split_output_tensor") else 1)


def valid_counts(data: Mapping[str, Any], unit: int = 1) -> tuple[float, float]:
    """Rows and tokens of a batch that count, as `train` adds them up over the global batch.

    Of `unit` rows that come together all count, or none.
    """
    unit_weights_U = data["sample_mask"].float().view(-1, unit).prod(1)
    counting = {**data, "sample_mask": unit_weights_U.repeat_interleave(unit)}
    rows = float(counting["sample_mask"].sum())
    if "token_mask" not in data:
        return rows, rows * data["input_ids"].shape[1]
    return rows, float(token_weights(counting).sum())


def token_weights(data: Mapping[str, Any]) -> Tensor:
    """fp32 `[B, S]`: the weight of each token, 0 for the first one."""
    mask_BS = data["token_mask"].float() * data["sample_mask"].float()[:, None]
    return mask_BS.index_fill(1, torch.zeros(1, dtype=torch.int64, device=mask_BS.device), 0.0)
