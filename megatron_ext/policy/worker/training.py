"""Training steps on global batches: forward and backward, what all ranks agree on, and the update.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.dtensor import clip_grad_by_total_norm_
from megatron_ext.head.validation.option_checks import token_bound
from megatron_ext.losses.worker_protocol import LossFunction
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.data.agreement_of_ranks import RuntimeErrorElsewhere
from megatron_ext.policy.data.batch_plan import Counts, MicroBatchBounds, Step, training_steps
from megatron_ext.policy.data.timer import Timer, timed
from megatron_ext.policy.worker.loss_inputs import inputs_of
from megatron_ext.policy.worker.scoring import Scoring

Metrics = list[dict[str, float]]  # of each micro-batch


class Training(Scoring):
    """A policy that learns from losses on its log-probabilities."""

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for every global batch in `data`; with `eval_mode` none, only losses.

        Losses and gradients are those of the global batch in one piece, whatever the micro-batches and the layout.

        Args:
            data: this data-parallel rank's rows, right-padded: `input_ids` `[B, S]`, `sample_mask` `[B]` (which rows
                count), `input_lengths` `[B]` (needed for dynamic or packed micro-batches), and what the loss reads;
                `kept_token_ids` as for `get_logprobs`.
            loss_fn: see `megatron_ext.policy.losses`; it gets log-probabilities `[rows, S]`, 0 in the first column, or
                what its `input_type` says: see `megatron_ext.policy.worker.loss_inputs`. NeMo-RL's own may be given.
            gbs: rows of a global batch over all data-parallel ranks; None: `train_global_batch_size`.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.
            timer: as NeMo-RL's, measures "train".

        Returns:
            "global_loss" `[steps]` on the CPU; "grad_norm" `[steps]`, before clipping (None with `eval_mode`); "rank";
            "all_mb_metrics": for each name the numbers of this rank's micro-batches, made to be summed over these and
            over data-parallel ranks, but for those whose name has "_min" or "_max" in it.

        Communicates: beside the model, three collectives of a few bytes and one for each step.

        Raises:
            ValueError: data that cannot be trained on, or a loss or gradient that is not finite, on every rank. The
                weights are those after the last good step.
            RuntimeError: `loss_fn` raised; on other ranks than its own, where that error appears itself. Or a step is
                open, see `begin_train_step`.
        """
        self._refuse_open_step("train()")
        if not eval_mode:
            self._check_trains("train()")
        global_batch_size = self.settings.global_batch_size if gbs is None else gbs
        losses, norms = [], []
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        with timed(timer, "train"):
            steps = training_steps(data, loss_fn, global_batch_size, self._train_bounds(mbs), self._coordinates)
            batch = BatchedDataDict(data).to(self.device)
            self.model.train(not eval_mode)
            for number, step in enumerate(steps):
                with torch.set_grad_enabled(not eval_mode):
                    self._zero_grad()
                    loss, found = self._run_step(number, step, batch, loss_fn, step.counts)
                losses.append(loss)
                self._note(metrics, found, step.counts, lambda name: 1 / len(steps))
                if not eval_mode:
                    norms.append(self._update(number))
            if eval_mode:
                self._end_inference()
            else:
                assert self.scheduler is not None
                self.scheduler.step()
        return self._report(losses, None if eval_mode else norms, metrics)

    def _check_trains(self, act: str) -> None:
        self._refuse_reference(act)
        if self.optimizer is None:
            raise ValueError(f"{act} without an optimizer: the worker was made with init_optimizer=False")

    def _refuse_open_step(self, act: str) -> None:
        """Refuse `act` while a step is open: `TrainSteps` alone has open steps."""

    def _train_bounds(self, mbs: int | None) -> MicroBatchBounds:
        batching = self.settings.batching
        bounds = self._bounds(batching.train_rows if mbs is None else mbs, batching.train_tokens)
        return replace(bounds, at_most=token_bound(self.settings.skip_masked_tokens))

    def _report(
        self, losses: list[float], norms: list[float] | None, metrics: Mapping[str, list[float]]
    ) -> dict[str, Any]:
        return {
            "global_loss": torch.tensor(losses),
            "grad_norm": None if norms is None else torch.tensor(norms),
            "rank": self.rank,
            "all_mb_metrics": dict(metrics),
        }

    def _run_step(
        self, number: int, step: Step, batch: BatchedDataDict, loss_fn: LossFunction, counts: Counts
    ) -> tuple[float, Metrics]:
        """Forward and backward over a global batch, or a part of it: its loss, once all ranks know that it is one, and
        what `loss_fn` measured of this rank's micro-batches. `counts`: what the loss divides by.
        """
        divisors = {name: torch.tensor(n, device=self.device) for name, n in counts._asdict().items()}
        inputs = inputs_of(self, loss_fn)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
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
            return (loss + nothing) * self._loss_scale.value * self.dp_size

        with self._mode():
            self._run_passes(step, batch, inputs.read, loss_of)
        return self._agreed_loss(number, total, fault), self._from_last_stage(metrics)

    def _note(
        self,
        metrics: defaultdict[str, list[float]],
        found: Metrics,
        counts: Counts,
        scale: Callable[[str], float],
    ) -> None:
        """Adds the metrics of micro-batches, times `scale` of their names, without those of which no row counts."""
        for numbers in found:
            valid = numbers.pop("num_valid_samples", 1.0)
            if valid <= 0:
                continue
            row = {}
            for name, value in numbers.items():
                extreme = "_min" in name or "_max" in name  # these are not added up, as in NeMo-RL
                row[name] = value if extreme else value * scale(name)
            row |= {"num_valid_samples": valid, **counts._asdict()}
            if self.optimizer is not None:
                row["lr"] = self.optimizer.param_groups[0]["lr"]
            for name, value in row.items():
                metrics[name].append(value)

    def _agreed_loss(self, number: int, own: Tensor, fault: Exception | None) -> float:
        """The sum of all data-parallel ranks' losses, unless one of them is none."""
        mine = torch.stack([own, own.new_tensor(float(fault is not None))])
        found = all_gather(mine[None], dist.group.WORLD)
        if not bool(torch.isfinite(found[:, 0]).all()) or bool(found[:, 1].any()):
            self._zero_grad()
            if fault is not None:
                raise fault
            if failed := found[:, 1].nonzero().flatten().tolist():
                raise RuntimeErrorElsewhere(
                    f"loss_fn failed on ranks {failed} in global batch {number}; see what it raised there"
                )
            wrong = {rank: value for rank, value in enumerate(found[:, 0].tolist()) if not abs(value) < float("inf")}
            raise ValueError(
                f"the loss of global batch {number} is not finite, by rank {wrong}: the weights are those before it; "
                f"look into its data, or lower the learning rate"
            )
        return float(found[list(self._coordinates.first_ranks(self._coordinates.stages - 1)), 0].sum())

    def _update(self, number: int, factor: float = 1.0) -> float:
        """Multiplies the gradients by `factor`, clips them and steps the optimizer. The norm before clipping."""
        assert self.optimizer is not None
        self._reduce_gradients()
        factor /= self._loss_scale.value
        if factor != 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        norm = self._gradient_norm()
        if self._loss_scale.overflowed(norm):
            self._zero_grad()
            return norm
        if not abs(norm) < float("inf"):
            self._zero_grad()
            raise ValueError(
                f"the gradient norm of global batch {number} is {norm}: it must be finite; the weights are those "
                f"before it; look into its data, or lower the learning rate"
            )
        if self.settings.max_grad_norm is not None:
            clip_grad_by_total_norm_(self.model.parameters(), self.settings.max_grad_norm, norm)
        self.optimizer.step()
        self._zero_grad()
        return norm


def _validated(returned: Any) -> tuple[Tensor, dict[str, float]]:
    """Return what a loss function returned, if it can be trained on and its metrics are numbers."""
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
