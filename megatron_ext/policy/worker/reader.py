"""Outputs of the model for the rows of a micro-batch, and the inputs of a loss function that are made of them.

A loss function without an `input_type` is called as `LossFunction` says. With one, of `LossInputType` or of NeMo-RL's
enum of the same values, it is called as by NeMo-RL: `loss_fn(data=..., global_valid_seqs=..., ...)` with

    "logprob"       next_token_logprobs `[B, S - 1]`
    "logit"         logits `[B, S, V]`, stored, and gathered to the whole vocabulary on every rank;
                    of a reward model `[B, 1]`, one for each row
    "distillation"  student_topk_logprobs, teacher_topk_logprobs `[B, S - 1, K]`, and H_all `[B, S - 1]` (sums of
                    p log p) or None, depending on the loss's `zero_outside_topk` and `kl_type`

All logits are divided by the temperature. With top-k or top-p the log-probability of a token that is not kept is 0,
without a gradient, and if the loss has a `reference_policy_kl_penalty` the data get "curr_logprobs_unfiltered", the
log-probabilities of the unfiltered distribution. If the data have `kept_token_ids` `[B, S, K]`, the ids that the
generator kept for each draw (-1 for none), probabilities are normalised over these; a token without any has 0.

Legend: B rows, S positions, V vocabulary, K ids per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head import Entropy, Gather, LogProbs, ReadOut, Sampled
from megatron_ext.head.checks import rounds
from megatron_ext.policy.backend.base import Backend, Read, ReadRequest
from megatron_ext.policy.data.batch import KEPT_IDS, BatchedDataDict, Rows, inside_rows, replayed
from megatron_ext.policy.losses.worker_protocol import LossInputType, rows_together

Divisors = Mapping[str, Tensor]  # `Counts` by name, in its order
# Called with the model's output, its micro-batch and the counts that the loss divides by; returns loss and metrics.
MicroBatchLoss = Callable[[Tensor, BatchedDataDict, Divisors], Any]


class MicroBatchReader:
    """Reader of the model's outputs for a micro-batch; all ranks that share the model must read the same."""

    def __init__(self, backend: Backend):
        self.backend, self.settings = backend, backend.settings

    def narrows(self, micro_batch: BatchedDataDict) -> bool:
        """Return whether log-probabilities are normalised over the tokens that top-k and top-p, or a generator, kept.
        The reference's are not: its filters would keep other tokens."""
        filters = self.settings.top_k is not None or self.settings.top_p < 1
        return (filters or KEPT_IDS in micro_batch) and not self.backend.has_reference_weights

    def log_probs(self, micro_batch: BatchedDataDict, with_plain: bool = False) -> Tensor:
        """Return each token's log-probability, fp32 `[B, S]`; 0 for the first token, behind a row's end, and for tokens
        that are not kept. `with_plain`: `[B, S, 2]`, with those of the unfiltered distribution as the second.
        """
        settings = self.settings
        if settings.gives_rewards:
            raise ValueError(
                "this worker has a reward model, which has no log-probabilities: call score(), train it with a loss "
                "whose input_type is 'logit', or leave reward_model_cfg out"
            )
        narrowed, rows = self.narrows(micro_batch), self.backend.rows(micro_batch)

        def readouts(labels: Tensor, kept: Tensor | None = None) -> list[ReadOut]:
            own: ReadOut
            if kept is not None:
                sampled, ids = replayed(labels, kept)
                own = Sampled(sampled, kept=ids)
            else:
                own = Sampled(labels, settings.top_k, settings.top_p) if narrowed else LogProbs(labels)
            return [own, LogProbs(labels)] if with_plain else [own]

        labels = self._labels_that_count(rows, micro_batch)
        beside = None
        if narrowed and KEPT_IDS in micro_batch:  # ids of the next token, plus 1: 0 is none, as in padding
            beside = rows.laid(F.pad(micro_batch[KEPT_IDS][:, 1:].long() + 1, (0, 0, 0, 1)))
        found = self.backend.read_out(ReadRequest(rows, readouts, 1 + with_plain, beside, labels))
        if narrowed:
            found = found.where(found > -torch.inf, 0.0)
        return rows.at_tokens(found if with_plain else found[..., 0])

    def read_outs(
        self,
        micro_batch: BatchedDataDict,
        readouts: Callable[..., Sequence[ReadOut]],
        columns: int,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Return read-outs `[B, S, columns]` of each position's label and `beside` `[B, S, K]`; see `ReadRequest`. 0
        behind a row's end; with `beside`, which losses pass, the labels that masks leave out may be skipped."""
        rows, given, labels = self.backend.rows(micro_batch), None, None
        if beside is not None:
            given, labels = rows.laid(beside), self._labels_that_count(rows, micro_batch)
        return rows.at_positions(self.backend.read_out(ReadRequest(rows, readouts, columns, given, labels)))

    def logits(self, micro_batch: BatchedDataDict) -> Tensor:
        """Return the logits, fp32 `[B, S, V]`, stored for the whole vocabulary on every rank; of a reward model
        `[B, S, 1]`. 0 behind a row's end."""
        if (bits := self.settings.bits) not in (None, "fast"):
            raise ValueError(
                f'bits is "{bits}", by that key or by batch_invariant_mode, and the loss asks for logits of the '
                "model, whose bits may depend on the batch: use a loss of log-probabilities, or leave the key out"
            )
        if rounds(self.settings.logit_dtype):
            raise ValueError(
                f"logit_dtype is {self.settings.logit_dtype}, and the loss asks for logits, which the model computes "
                "in a dtype of its own: use a loss of log-probabilities, or leave the key out"
            )
        rows = self.backend.rows(micro_batch)
        columns = 1 if self.settings.gives_rewards else self.backend.vocabulary
        return rows.at_positions(self.backend.whole_logits(rows, columns))

    def last_tokens(self, data: Mapping[str, Any]) -> Tensor:
        """Return `[B]`, the position whose output is a row's reward, as in transformers: its last non-padding token."""
        config: Any = self.backend.model.config
        tokens_BS, counts_BS = data["input_ids"], inside_rows(data)
        if (padding := config.get_text_config().pad_token_id) is not None:
            counts_BS = counts_BS & (tokens_BS != padding)
        return (torch.arange(tokens_BS.shape[1], device=tokens_BS.device) * counts_BS).amax(1)

    def _labels_that_count(self, rows: Rows, micro_batch: BatchedDataDict) -> Tensor | None:
        """Return the tokens, -100 where masks leave one out, if `skip_masked_tokens` is set; else None. Without a
        `token_mask` a bound skips nothing: it bounds the tokens that masks leave."""
        skip = self.settings.skip_masked_tokens
        bounded = not isinstance(skip, bool)
        return rows.labels_that_count(micro_batch) if skip and (not bounded or "token_mask" in micro_batch) else None


class LossInputs(NamedTuple):
    read: Read
    call: MicroBatchLoss


def loss_inputs(reader: MicroBatchReader, loss_fn: Any) -> LossInputs:
    """Return the functions by which `loss_fn` gets its inputs."""
    kind = getattr(loss_fn, "input_type", None)
    value = getattr(kind, "value", kind)
    if reader.settings.gives_rewards and value != LossInputType.LOGIT.value:
        raise ValueError(
            f"{type(loss_fn).__name__}.input_type is {value!r}, and the worker has a reward model: it must be 'logit', "
            f"as NeMo-RL's PreferenceLossFn has it"
        )
    if value in (None, LossInputType.LOGPROB.value):
        return _log_probs(reader, loss_fn, by_keywords=value is not None)
    if value == LossInputType.LOGIT.value:
        return _logits(reader, loss_fn)
    if value == LossInputType.DISTILLATION.value:
        return _distillation(reader, loss_fn)
    known = ", ".join(repr(known.value) for known in LossInputType)
    raise ValueError(f"{type(loss_fn).__name__}.input_type is {value!r}: a policy worker has only inputs for {known}")


def _log_probs(reader: MicroBatchReader, loss_fn: Any, by_keywords: bool) -> LossInputs:
    penalized = bool(getattr(loss_fn, "reference_policy_kl_penalty", 0))

    def read(micro_batch: BatchedDataDict) -> Tensor:
        return reader.log_probs(micro_batch, penalized and reader.narrows(micro_batch))

    def call(found: Tensor, micro_batch: BatchedDataDict, counts: Divisors) -> Any:
        if by_keywords:  # NeMo-RL's losses take none for the first token
            found = found[:, 1:]
        micro_batch.pop("curr_logprobs_unfiltered", None)  # the user's, of other weights
        if found.dim() == 3:
            micro_batch["curr_logprobs_unfiltered"], found = found[..., 1], found[..., 0]
        if by_keywords:
            return loss_fn(next_token_logprobs=found, data=micro_batch, **counts)
        return loss_fn(found, micro_batch, *counts.values())

    return LossInputs(read, call)


def _logits(reader: MicroBatchReader, loss_fn: Any) -> LossInputs:
    rewards, kind = reader.settings.gives_rewards, reader.settings.batching.kind
    if rewards and kind != "fixed" and not (hasattr(loss_fn, "unit") or rows_together(loss_fn) > 1):
        raise ValueError(
            f"{type(loss_fn).__name__} has no `unit`, and {kind} micro-batches may part rows that belong together: set "
            f"it to 2 for pairs, 1 for rows by themselves, or use fixed micro-batches"
        )

    def call(found: Tensor, micro_batch: BatchedDataDict, counts: Divisors) -> Any:
        if rewards:
            found = found[torch.arange(len(found), device=found.device), reader.last_tokens(micro_batch)]
        return loss_fn(logits=found, data=micro_batch, **counts)

    return LossInputs(reader.logits, call)


def _distillation(reader: MicroBatchReader, loss_fn: Any) -> LossInputs:
    zero = bool(loss_fn.zero_outside_topk)
    with_entropy = zero and loss_fn.kl_type != "forward"

    def of_student(_: Tensor, ids: Tensor) -> list[ReadOut]:
        return [Gather(ids), Entropy()] if with_entropy else [Gather(ids)]

    def read(micro_batch: BatchedDataDict) -> Tensor:
        ids_BSK = micro_batch["teacher_topk_indices"].where(inside_rows(micro_batch)[..., None], 0)
        return reader.read_outs(micro_batch, of_student, ids_BSK.shape[2] + with_entropy, ids_BSK)

    def call(found: Tensor, micro_batch: BatchedDataDict, counts: Divisors) -> Any:
        k = micro_batch["teacher_topk_indices"].shape[2]
        student = found[:, :-1, :k]
        return loss_fn(
            student_topk_logprobs=student if zero else student.log_softmax(-1),
            teacher_topk_logprobs=micro_batch["teacher_topk_logits"].float().log_softmax(-1)[:, :-1],
            H_all=-found[:, :-1, k] if with_entropy else None,
            data=micro_batch,
            **counts,
        )

    return LossInputs(read, call)
