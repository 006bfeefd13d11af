"""Training steps on global batches: forward and backward, what all ranks agree on, and the update.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.policy.agreement import RuntimeErrorElsewhere
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.losses import LossFunction
from megatron_ext.policy.plan import Step, training_steps
from megatron_ext.policy.scoring import Scoring


class Training(Scoring):
    """A policy that learns from losses on its log-probabilities."""

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for every global batch in `data`; with `eval_mode` none, only losses.

        Losses and gradients are those of the global batch in one piece, whatever the micro-batches and the layout.

        Args:
            data: this data-parallel rank's rows, right-padded: `input_ids` `[B, S]`, `sample_mask` `[B]` (which rows
                count), `input_lengths` `[B]` (needed for dynamic or packed micro-batches), and what the loss reads.
            loss_fn: see `megatron_ext.policy.losses`; it gets log-probabilities `[rows, S]`, 0 in the first column.
            gbs: rows of a global batch over all data-parallel ranks; None: `train_global_batch_size`.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.

        Returns:
            "global_loss" `[steps]` on the CPU; "grad_norm" `[steps]`, before clipping (None with `eval_mode`); "rank";
            "all_mb_metrics": for each name the numbers of this rank's micro-batches, made to be summed over these and
            over data-parallel ranks.

        Communicates: beside the model, three collectives of a few bytes and one for each step.

        Raises:
            ValueError: data that cannot be trained on, or a loss or gradient that is not finite, on every rank. The
                weights are those after the last good step.
            RuntimeError: `loss_fn` raised; on other ranks than its own, where that error appears itself.
        """
        if not eval_mode:
            self._refuse_reference("train()")
            if self.optimizer is None:
                raise ValueError("train() without an optimizer: the worker was made with init_optimizer=False")
        batching = self.settings.batching
        shape = self._shape(batching.train_rows if mbs is None else mbs, batching.train_tokens)
        global_batch_size = self.settings.global_batch_size if gbs is None else gbs
        steps = training_steps(data, loss_fn, global_batch_size, shape, self._place)
        batch = BatchedDataDict(data).to(self.device)
        losses, norms = [], []
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.model.train(not eval_mode)
        for number, step in enumerate(steps):
            with torch.set_grad_enabled(not eval_mode):
                losses.append(self._run_step(number, step, batch, loss_fn, metrics, len(steps)))
            if not eval_mode:
                norms.append(self._update(number))
        if eval_mode:
            self._end_inference()
        else:
            assert self.scheduler is not None
            self.scheduler.step()
        return {
            "global_loss": torch.tensor(losses),
            "grad_norm": None if eval_mode else torch.tensor(norms),
            "rank": self.rank,
            "all_mb_metrics": dict(metrics),
        }

    def _run_step(
        self,
        number: int,
        step: Step,
        batch: BatchedDataDict,
        loss_fn: LossFunction,
        metrics: defaultdict[str, list[float]],
        steps: int,
    ) -> float:
        """Forward and backward over a global batch: its loss, once all ranks know that it is one."""
        counts = [torch.tensor(n, device=self.device) for n in (step.valid_seqs, step.valid_toks)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        fault: Exception | None = None
        self._zero_grad()
        for rows, real in step.rows():
            micro_batch = self._micro_batch(batch, rows)
            log_probs = self._row_log_probs(micro_batch)
            nothing = log_probs[:0].sum()  # 0, through which backward reaches every weight on every rank
            loss, found = nothing, None
            if real and fault is None:
                try:
                    loss, found = _validated(*loss_fn(log_probs, micro_batch, *counts))
                except Exception as error:  # the other ranks wait for this one's share of the model
                    fault = error
            total += loss.detach()
            if torch.is_grad_enabled():
                self._backward((loss + nothing) * self._loss_scale.value)
            if found is not None:
                self._note(metrics, found, step, steps)
        return self._agreed_loss(number, total, fault)

    def _backward(self, loss: Tensor) -> None:
        """FSDP2 averages gradients over the data-parallel ranks, whose losses add up."""
        (loss * self.dp_size).backward()

    def _note(self, metrics: defaultdict[str, list[float]], numbers: dict[str, float], step: Step, steps: int) -> None:
        """Adds a micro-batch's metrics, unless no row of it counts."""
        valid = numbers.pop("num_valid_samples", 1.0)
        if valid <= 0:
            return
        numbers = {name: value / steps for name, value in numbers.items()}
        numbers |= {
            "num_valid_samples": valid,
            "global_valid_seqs": step.valid_seqs,
            "global_valid_toks": step.valid_toks,
        }
        if self.optimizer is not None:
            numbers["lr"] = self.optimizer.param_groups[0]["lr"]
        for name, value in numbers.items():
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
        return float(found[:: self._place.copies, 0].sum())

    def _update(self, number: int) -> float:
        """Clips the gradients and steps the optimizer. The norm before clipping."""
        assert self.optimizer is not None
        self._reduce_gradients()
        self._loss_scale.unscale(self.model.parameters())
        norm = self._clip_gradients(self.settings.max_grad_norm)
        if self._loss_scale.overflowed(norm):
            self._zero_grad()
            return norm
        if not abs(norm) < float("inf"):
            self._zero_grad()
            raise ValueError(
                f"the gradient norm of global batch {number} is {norm}: it must be finite; the weights are those "
                f"before it; look into its data, or lower the learning rate"
            )
        self.optimizer.step()
        self._zero_grad()
        return norm


def _validated(loss: Tensor, metrics: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """What a loss function returned, if it can be trained on and its metrics are numbers."""
    if not isinstance(loss, Tensor) or loss.dim() or (torch.is_grad_enabled() and not loss.requires_grad):
        raise ValueError("loss_fn's loss must be a 0-d tensor with a gradient to the log-probabilities; reduce it")
    return loss, {name: float(value) for name, value in metrics.items()}
