"""A training step in parts by NeMo-RL's protocol: `begin_train_step`, batches as they arrive, `finish_train_step`.

    begin_train_step(loss_fn) -> train_microbatch(data), any number of times -> finish_train_step()

Until the end nobody knows how many rows and tokens the global batch has. So the loss function is called with 1 in place
of these counts, gradients add up undivided, and the end divides them, the loss and the metrics, each of these by the
count that the loss function names in `metric_normalizations`.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.losses.worker_protocol import LossFunction, LossType
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.data.batch_plan import Counts, MicroBatchBounds, training_steps
from megatron_ext.policy.data.timer import Timer, timed
from megatron_ext.policy.worker.training import Metrics, Training


@dataclass
class OpenStep:
    """Step that is not finished, with what it has gathered. Rows and tokens are those of all data-parallel ranks."""

    loss_fn: LossFunction
    bounds: MicroBatchBounds
    parts: int = 0
    loss: float = 0.0
    valid_seqs: float = 0.0
    valid_toks: float = 0.0
    metrics: Metrics = field(default_factory=list)

    def divisors(self) -> dict[str, float]:
        """By the names of NeMo-RL's `MetricNormalizer`; where nothing counts 1, of sums that are 0."""
        return {"tokens": self.valid_toks or 1.0, "sequences": self.valid_seqs or 1.0, "none": 1.0}

    @property
    def normalizer(self) -> str:
        """Return the name of the count that the loss is a mean over."""
        kind = getattr(getattr(self.loss_fn, "loss_type", None), "value", LossType.TOKEN_LEVEL.value)
        return "sequences" if kind == LossType.SEQUENCE_LEVEL.value else "tokens"

    def scale(self, name: str) -> float:
        """Return the factor of a metric of this name."""
        kinds = getattr(self.loss_fn, "metric_normalizations", None)
        kind = kinds.get(name) if isinstance(kinds, Mapping) else None
        return 1 / self.divisors()[self.normalizer if kind is None else kind.value]


class TrainSteps(Training):
    """A policy whose training steps can be given in parts."""

    _open_step: OpenStep | None = None

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step: gradients are 0.

        Args:
            loss_fn: as for `train`.
            gbs: what NeMo-RL's callers pass; a step has the rows that come before its end.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.

        Raises:
            RuntimeError: a step is open.
            ValueError: the worker cannot train; the loss has a term that is not a sum over the step's counts.
        """
        self._refuse_open_step("begin_train_step()")
        self._check_trains("begin_train_step()")
        if weight := getattr(loss_fn, "positive_example_nll_weight", None):
            raise ValueError(
                f"begin_train_step() with a loss whose positive_example_nll_weight is {weight}: that term is a mean "
                f"over each micro-batch, which the step's counts would divide again; use train(), or set it to 0"
            )
        self.model.train()
        self._zero_grad()
        self._open_step = OpenStep(loss_fn, self._train_bounds(mbs))

    def train_microbatch(self, data: Mapping[str, Any], timer: Timer | None = None) -> None:
        """Forward and backward over some rows of the open step, cut into micro-batches as by `train`.

        Ranks may bring different numbers of rows, each at least one. Communicates as `train` does of one step.

        Raises:
            RuntimeError: no step is open.
            ValueError, RuntimeError: as `train`, on every rank. The step is over then, its gradients are gone.
        """
        step = self._opened("train_microbatch()")
        try:
            with timed(timer, "train_microbatch"):
                part = training_steps(data, step.loss_fn, None, step.bounds, self._coordinates)[0]
                batch = BatchedDataDict(data).to(self.device)
                self.model.train()
                with torch.enable_grad():
                    loss, metrics = self._run_step(step.parts, part, batch, step.loss_fn, Counts(1.0, 1.0))
        except BaseException:
            self.abort_train_step()
            raise
        step.parts += 1
        step.loss += loss
        step.valid_seqs += part.counts.global_valid_seqs
        step.valid_toks += part.counts.global_valid_toks
        step.metrics += metrics

    def finish_train_step(self, timer: Timer | None = None) -> dict[str, Any]:
        """Divides the gradients by the counts of all rows that came, updates the weights, and closes the step.

        Returns:
            What `train` returns of one global batch.

        Raises:
            RuntimeError: no step is open, or nothing came.
            ValueError: the gradients are not finite; on every rank. The step is over, the weights are as before it.
        """
        step = self._opened("finish_train_step()")
        if not step.parts:
            raise RuntimeError(
                "finish_train_step() before any train_microbatch(): there are no gradients; call it first"
            )
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        with timed(timer, "finish_train_step"):
            self._open_step = None
            self._note(metrics, step.metrics, Counts(step.valid_seqs, step.valid_toks), step.scale)
            factor = 1 / step.divisors()[step.normalizer]
            norm = self._update(0, factor)
            assert self.scheduler is not None
            self.scheduler.step()
        return self._report([step.loss * factor], [norm], metrics)

    def abort_train_step(self) -> None:
        """Closes the step without an update, its gradients are gone. Without an open step it does nothing."""
        if self._open_step is not None:
            self._open_step = None
            self._zero_grad()

    def _opened(self, act: str) -> OpenStep:
        if self._open_step is None:
            raise RuntimeError(f"{act} without an open step: call begin_train_step() first")
        self._refuse_reference(act)
        return self._open_step

    def _refuse_open_step(self, act: str) -> None:
        if self._open_step is not None:
            raise RuntimeError(
                f"{act} while a training step is open: call finish_train_step() or abort_train_step() first"
            )
