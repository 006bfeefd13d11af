"""Inputs that a loss function reads of the model, by its `input_type`, and the call of that function.

Without one it is called as `LossFunction` says. With one, of `LossInputType` or NeMo-RL's, which have the same values,
it is called as NeMo-RL calls its losses: `loss_fn(data=..., global_valid_seqs=..., global_valid_toks=..., ...)` with

    "logprob"       next_token_logprobs `[B, S - 1]`
    "logit"         logits `[B, S, V]`, of the whole vocabulary on every rank: they are made, and gathered
                    of a reward model `[B, 1]`, of each row
    "distillation"  student_topk_logprobs, teacher_topk_logprobs `[B, S - 1, K]`, and H_all `[B, S - 1]` (sums of
                    p log p) or None, of the loss's `zero_outside_topk` and `kl_type`

The temperature has divided the logits of all. Under top-k or top-p log-probabilities of tokens that are not kept are 0,
without a gradient, and where the loss has a `reference_policy_kl_penalty` the data get "curr_logprobs_unfiltered",
those of the whole distribution. With `kept_token_ids` `[B, S, K]` among the data, the ids that the generator kept where
it drew each token (-1 for none), log-probabilities are among these; tokens without any have 0.

Legend: B rows, S positions, V vocabulary, K ids per token.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.head import Entropy, Gather, ReadOut
from megatron_ext.policy.backend.base import Read
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.losses.worker_protocol import LossInputType, rows_together
from megatron_ext.policy.worker.reader import MicroBatchReader

Divisors = Mapping[str, Tensor]  # `Counts` by name, in its order
# Of what was read, its micro-batch, and the counts that the loss divides by: loss and metrics.
Call = Callable[[Tensor, BatchedDataDict, Divisors], Any]


class LossInputs(NamedTuple):
    read: Read
    call: Call


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
        if by_keywords:  # NeMo-RL's have none of the first token
            found = found[:, 1:]
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
        ids_BSK = micro_batch["teacher_topk_indices"]
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
