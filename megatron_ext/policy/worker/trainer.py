"""Training steps on global batches, each at once or in parts: from their passes to the optimizer's step.

The weights change only after all ranks know that the loss of the global batch is finite on every rank.

In parts, by NeMo-RL's protocol:

    begin_train_step(loss_fn) -> train_microbatch(data), any number of times -> finish_train_step()

Only at the end are the rows and tokens of the global batch counted. So the loss function is called with 1 in place
of these counts, gradients add up undivided, and the end divides them, the loss and the metrics, each of these by the
count that the loss function names in `metric_normalizations`.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.dtensor import clip_grad_by_total_norm_
from megatron_ext.head.checks import token_bound
from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.config import check_positive
from megatron_ext.policy.data.agreement_of_ranks import RuntimeErrorElsewhere
from megatron_ext.policy.data.batch import BatchedDataDict
from megatron_ext.policy.data.batch_plan import Counts, MicroBatchBounds, Step, training_steps
from megatron_ext.policy.losses.worker_protocol import LossFunction, LossType, MetricNormalizer, Timer, timed
from megatron_ext.policy.worker.optimizer import LossScale, check_elementwise, make_optimizer, make_scheduler
from megatron_ext.policy.worker.reader import LossInputs, MicroBatchReader, loss_inputs

Metrics = list[dict[str, float]]  # of each micro-batch
MetricsByName = defaultdict[str, list[float]]


@dataclass
class OpenStep:
    """Step that is not finished, with its sums so far. Rows and tokens are those of all data-parallel ranks."""

    loss_fn: LossFunction
    bounds: MicroBatchBounds
    parts: int = 0
    loss: float = 0.0
    counts: Counts = field(default_factory=lambda: Counts(0.0, 0.0))
    metrics: Metrics = field(default_factory=list)

    def add(self, counts: Counts, loss: float, metrics: Metrics) -> None:
        """Add a part to the step."""
        self.parts += 1
        self.loss += loss
        self.counts = Counts(*(a + b for a, b in zip(self.counts, counts, strict=True)))
        self.metrics += metrics

    def scale(self, name: str | None = None) -> float:
        """Return the factor of a metric of this name; None: of the loss, a mean as its `loss_type` says."""
        kinds = getattr(self.loss_fn, "metric_normalizations", None)
        kind = kinds.get(name) if isinstance(kinds, Mapping) else None
        if kind is None:
            of_rows = getattr(getattr(self.loss_fn, "loss_type", None), "value", None) == LossType.SEQUENCE_LEVEL.value
            kind = MetricNormalizer.SEQUENCES if of_rows else MetricNormalizer.TOKENS
        rows, tokens = self.counts
        # NeMo-RL's own enum has the same values. If nothing counts, the sums are 0, and 1 divides them.
        return 1 / {"tokens": tokens or 1.0, "sequences": rows or 1.0, "none": 1.0}[kind.value]


class Trainer:
    """The optimizer of a policy with its schedule, the scale of its losses, and the step that is open."""

    def __init__(self, backend: Backend, init_optimizer: bool = True):
        self.backend, self.settings, self.reader = backend, backend.settings, MicroBatchReader(backend)
        settings, parameters = backend.settings, backend.model.parameters()
        self.optimizer = make_optimizer(parameters, settings.optimizer) if init_optimizer else None
        if self.optimizer is not None and settings.optimizer and backend.plain_shards:
            check_elementwise(settings.optimizer, backend.device)
        self.scheduler = None if self.optimizer is None else make_scheduler(self.optimizer, settings.scheduler)
        self.loss_scale = LossScale(dynamic=settings.dtype == torch.float16)
        self.open_step: OpenStep | None = None

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Take an optimizer step for every global batch in `data`; with `eval_mode` only compute losses.

        Losses and gradients are those of the whole global batch, whatever the micro-batches and the layout of ranks.

        Args:
            data: this data-parallel rank's rows, right-padded: `input_ids` `[B, S]`, `sample_mask` `[B]` (which rows
                count), `input_lengths` `[B]` (needed for dynamic or packed micro-batches), and what the loss reads;
                `kept_token_ids` as for `get_logprobs`.
            loss_fn: see `megatron_ext.policy.losses`; it gets log-probabilities `[rows, S]`, 0 in the first column, or
                what its `input_type` says: see `megatron_ext.policy.worker.reader`. It may be NeMo-RL's own.
            gbs: rows of a global batch over all data-parallel ranks; None: `train_global_batch_size`.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.
            timer: as NeMo-RL's, measures "train".

        Returns:
            "global_loss" `[steps]` on the CPU; "grad_norm" `[steps]`, before clipping (None with `eval_mode`); "rank";
            "all_mb_metrics": for each name the numbers of this rank's micro-batches, scaled to be summed over these and
            over data-parallel ranks, except those whose name has "_min" or "_max" in it.

        Communicates: beside the model, three collectives of a few bytes and one for each step.

        Raises:
            ValueError: data that cannot be trained on, or a loss or gradient that is not finite, on every rank. The
                weights are those after the last good step.
            RuntimeError: `loss_fn` raised on another rank; the rank on which it raised gets that error itself. Or a
                step is open, see `begin_train_step`.
        """
        self.refuse_open_step("train()")
        if not eval_mode:
            self._check_trains("train()")
        backend = self.backend
        global_batch_size = self.settings.global_batch_size if gbs is None else check_positive("gbs", gbs)
        losses, norms, metrics = [], [], MetricsByName(list)
        with timed(timer, "train"), torch.set_grad_enabled(not eval_mode):
            steps = training_steps(data, loss_fn, global_batch_size, self._bounds(mbs), backend.coordinates)
            batch = BatchedDataDict(data).to(backend.device)
            backend.model.train(not eval_mode)
            inputs = loss_inputs(self.reader, loss_fn)
            for number, step in enumerate(steps):
                backend.zero_grad()
                loss, found = self._loss_pass(inputs, number, step, batch, step.counts)
                losses.append(loss)
                self._add_metrics(metrics, found, step.counts, lambda name: 1 / len(steps))
                if not eval_mode:
                    norms.append(self._update(number))
            if eval_mode:
                backend.end_inference()
            elif self.scheduler is not None:
                self.scheduler.step()
        return self._report(losses, None if eval_mode else norms, metrics)

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a step, with gradients of 0.

        Args:
            loss_fn: as for `train`.
            gbs: not read; NeMo-RL's callers pass it. A step has all the rows that come before its end.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.

        Raises:
            RuntimeError: a step is open.
            ValueError: the worker cannot train; the loss has a term that is not a sum over the step's counts.
        """
        self.refuse_open_step("begin_train_step()")
        self._check_trains("begin_train_step()")
        if weight := getattr(loss_fn, "positive_example_nll_weight", None):
            raise ValueError(
                f"begin_train_step() with a loss whose positive_example_nll_weight is {weight}: that term is a mean "
                f"over each micro-batch, which the step's counts would divide again; use train(), or set it to 0"
            )
        self.backend.model.train()
        with torch.enable_grad():
            self.backend.zero_grad()
        self.open_step = OpenStep(loss_fn, self._bounds(mbs))

    def train_microbatch(self, data: Mapping[str, Any], timer: Timer | None = None) -> None:
        """Forward and backward over some rows of the open step, cut into micro-batches as by `train`.

        Ranks may bring different numbers of rows, each at least one. Communicates as `train` does of one step.

        Raises:
            RuntimeError: no step is open.
            ValueError, RuntimeError: as in `train`, on every rank. The step is aborted then, its gradients are gone.
        """
        step, backend = self._opened("train_microbatch()"), self.backend
        try:
            with timed(timer, "train_microbatch"), torch.enable_grad():
                part = training_steps(data, step.loss_fn, None, step.bounds, backend.coordinates)[0]
                batch = BatchedDataDict(data).to(backend.device)
                backend.model.train()
                inputs, counts = loss_inputs(self.reader, step.loss_fn), Counts(1.0, 1.0)
                loss, found = self._loss_pass(inputs, step.parts, part, batch, counts)
        except BaseException:
            self.abort_train_step()
            raise
        step.add(part.counts, loss, found)

    def finish_train_step(self, timer: Timer | None = None) -> dict[str, Any]:
        """Divide the gradients by the counts of all rows that came, update the weights, and close the step.

        Returns:
            What `train` returns of one global batch.

        Raises:
            RuntimeError: no step is open, or no rows came.
            ValueError: the gradients are not finite; on every rank. The step is over, the weights are as before it.
        """
        step = self._opened("finish_train_step()")
        if not step.parts:
            raise RuntimeError(
                "finish_train_step() before any train_microbatch(): there are no gradients; call it first"
            )
        metrics = MetricsByName(list)
        with timed(timer, "finish_train_step"):
            self.open_step = None
            self._add_metrics(metrics, step.metrics, step.counts, step.scale)
            factor = step.scale()
            norm = self._update(0, factor)
            if self.scheduler is not None:
                self.scheduler.step()
        return self._report([step.loss * factor], [norm], metrics)

    def abort_train_step(self) -> None:
        """Close the step without an update, and clear its gradients. Do nothing without an open step."""
        if self.open_step is not None:
            self.open_step = None
            self.backend.zero_grad()

    def refuse_open_step(self, act: str) -> None:
        if self.open_step is not None:
            raise RuntimeError(
                f"{act} while a training step is open: call finish_train_step() or abort_train_step() first"
            )

    def _check_trains(self, act: str) -> None:
        self.backend.refuse_reference(act)
        if self.optimizer is None:
            raise ValueError(f"{act} without an optimizer: the worker was made with init_optimizer=False")

    def _opened(self, act: str) -> OpenStep:
        if self.open_step is None:
            raise RuntimeError(f"{act} without an open step: call begin_train_step() first")
        self.backend.refuse_reference(act)
        return self.open_step

    def _bounds(self, mbs: int | None) -> MicroBatchBounds:
        batching, at_most = self.settings.batching, token_bound(self.settings.skip_masked_tokens)
        return self.backend.bounds(mbs, batching.train_rows, batching.train_tokens, at_most)

    def _loss_pass(
        self, inputs: LossInputs, number: int, step: Step, batch: BatchedDataDict, counts: Counts
    ) -> tuple[float, Metrics]:
        """Run forward and backward over global batch `number`, or a part of it; return its loss, and the metrics of
        this rank's micro-batches. Gradients are those of the loss times the loss scale.

        Args:
            counts: divisors of the loss.

        Raises:
            ValueError, RuntimeError: a loss failed or is not finite; on every rank, with gradients cleared.
        """
        backend = self.backend
        divisors = {name: torch.tensor(n, device=backend.device) for name, n in counts._asdict().items()}
        total = torch.zeros((), dtype=torch.float64, device=backend.device)
        fault: Exception | None = None
        metrics: Metrics = []

        def loss_of(output: Tensor, micro_batch: BatchedDataDict, _: list[int], real: bool) -> Tensor | None:
            nonlocal fault, total
            nothing = output[:0].sum()  # 0, through which backward reaches every weight on every rank
            loss, found = nothing, None
            if real and fault is None:
                try:
                    loss, found = _validated(inputs.call(output, micro_batch, divisors))
                except Exception as error:  # the other ranks wait for this one's share of the model
                    fault = error
            total += loss.detach()
            if found is not None:
                metrics.append(found)
            if not torch.is_grad_enabled():
                return None
            # FSDP2 and Megatron average gradients over the data-parallel ranks, whose losses add up.
            return (loss + nothing) * self.loss_scale.value * backend.dp_size

        with backend.mode():
            backend.run_passes(step, batch, inputs.read, loss_of)
        try:
            return _agreed_loss(backend, number, total, fault), backend.from_last_stage(metrics)
        except Exception:
            backend.zero_grad()
            raise

    def _update(self, number: int, factor: float = 1.0) -> float:
        """Multiply the gradients by `factor`, clip them and step the optimizer; return the norm before clipping."""
        assert self.optimizer is not None
        backend = self.backend
        backend.reduce_gradients()
        factor /= self.loss_scale.value
        if factor != 1:
            for parameter in backend.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        norm = backend.gradient_norm()
        if self.loss_scale.overflowed(norm):
            backend.zero_grad()
            return norm
        if not abs(norm) < float("inf"):
            backend.zero_grad()
            raise ValueError(
                f"the gradient norm of global batch {number} is {norm}: it must be finite; the weights are those "
                f"before it; look into its data, or lower the learning rate"
            )
        if self.settings.max_grad_norm is not None:
            clip_grad_by_total_norm_(backend.model.parameters(), self.settings.max_grad_norm, norm)
        self.optimizer.step()
        backend.zero_grad()
        return norm

    def _add_metrics(
        self, metrics: MetricsByName, found: Metrics, counts: Counts, scale: Callable[[str], float]
    ) -> None:
        """Add metrics of micro-batches, times `scale` of their names; skip micro-batches in which no row counts."""
        for numbers in found:
            valid = numbers.pop("num_valid_samples", 1.0)
            if valid <= 0:
                continue
            row = {}
            for name, value in numbers.items():
                extreme = "_min" in name or "_max" in name  # these are not added up, as in NeMo-RL
                row[name] = value if extreme else value * scale(name)
            rate = {} if self.optimizer is None else {"lr": self.optimizer.param_groups[0]["lr"]}
            for name, value in {**row, "num_valid_samples": valid, **counts._asdict(), **rate}.items():
                metrics[name].append(value)

    def _report(self, losses: list[float], norms: list[float] | None, metrics: MetricsByName) -> dict[str, Any]:
        return {
            "global_loss": torch.tensor(losses),
            "grad_norm": None if norms is None else torch.tensor(norms),
            "rank": self.backend.rank,
            "all_mb_metrics": dict(metrics),
        }


def _agreed_loss(backend: Backend, number: int, own: Tensor, fault: Exception | None) -> float:
    """Return the sum of all data-parallel ranks' losses; raise on every rank if one failed or is not finite."""
    mine = torch.stack([own, own.new_tensor(float(fault is not None))])
    found = all_gather(mine[None], dist.group.WORLD)
    if fault is not None:
        raise fault
    if failed := found[:, 1].nonzero().flatten().tolist():
        raise RuntimeErrorElsewhere(
            f"loss_fn failed on ranks {failed} in global batch {number}; see what it raised there"
        )
    if not bool(torch.isfinite(found[:, 0]).all()):
        wrong = {rank: value for rank, value in enumerate(found[:, 0].tolist()) if not abs(value) < float("inf")}
        raise ValueError(
            f"the loss of global batch {number} is not finite, by rank {wrong}: the weights are those before it; "
            f"look into its data, or lower the learning rate"
        )
    return float(found[list(backend.coordinates.first_ranks(backend.coordinates.stages - 1)), 0].sum())


def _validated(returned: Any) -> tuple[Tensor, dict[str, float]]:
    """Check what a loss function returned; return the loss, and the metrics as Python numbers."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ValueError(
            f"loss_fn returned {_kinds(returned)}: it must return the loss, a 0-d tensor, and a dict of metrics"
        )
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.dim() or (torch.is_grad_enabled() and not loss.requires_grad):
        raise ValueError("loss_fn's loss must be a 0-d tensor with a gradient to the log-probabilities; reduce it")
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"loss_fn's metric {name!r} must be one number, a 0-d tensor or a Python number: {error}"
            ) from None
    return loss, found


def _kinds(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return f"{len(returned)} things ({', '.join(type(one).__name__ for one in returned)})"
    return "None" if returned is None else f"a {type(returned).__name__}"
