"""Log-probabilities of a batch's tokens, by the policy and by its reference.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_ext.policy import memory
from megatron_ext.policy.backend import Backend
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.plan import Shape, scoring_step
from megatron_ext.policy.rows import row_log_probs


class Scoring(Backend):
    """A policy that says how probable tokens are."""

    @torch.no_grad()
    def get_logprobs(self, data: Mapping[str, Any], micro_batch_size: int | None = None) -> BatchedDataDict:
        """Log-probabilities of the tokens of right-padded rows.

        Args:
            data: this data-parallel rank's `input_ids` `[B, S]` and `input_lengths` `[B]`. Ranks may have different B.
            micro_batch_size: rows of a micro-batch; None: `logprob_batch_size`.

        Returns:
            "logprobs", fp32 `[B, S]` on the CPU: at position t that of token t; 0 for the first, and for padding.

        Communicates: beside the model, two collectives of a few bytes.

        Raises:
            ValueError: data that cannot be scored, on every rank.
        """
        batching = self.settings.batching
        rows = batching.logprob_rows if micro_batch_size is None else micro_batch_size
        step = scoring_step(data, self._shape(rows, batching.logprob_tokens), self._place)
        batch = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")}).to(self.device)
        self.model.eval()
        log_probs_BS = torch.zeros(batch["input_ids"].shape)
        for rows_, counts in step.rows():
            found = self._row_log_probs(self._micro_batch(batch, rows_))
            if counts:
                log_probs_BS[rows_, : found.shape[1]] = found.cpu()
        self._end_inference()
        return BatchedDataDict(logprobs=log_probs_BS)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """As `get_logprobs`, of the reference policy; the key is "reference_logprobs"."""
        with self.use_reference_model():
            return BatchedDataDict(reference_logprobs=self.get_logprobs(data, micro_batch_size)["logprobs"])

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """While it lasts, the model has the reference policy's weights, and host memory those of the model.

        Inside it may be entered again, to no effect; nothing can be trained, saved, loaded or handed on.
        """
        if self.reference is None:
            raise ValueError("there is no reference policy: the worker was made with init_reference_model=False")
        if self._is_reference:
            yield
            return
        memory.exchange(self._state().items(), self.reference)
        self._is_reference = True
        try:
            yield
        finally:
            memory.exchange(self._state().items(), self.reference)
            self._is_reference = False

    def _shape(self, rows: int, tokens: int) -> Shape:
        return Shape(self.settings.batching.kind, rows, tokens, self._vocabulary, self._places_multiple)

    def _micro_batch(self, batch: BatchedDataDict, rows: list[int]) -> BatchedDataDict:
        micro_batch = batch.select_indices(rows)
        dynamic = self.settings.batching.kind == "dynamic"
        return micro_batch.cut(max(2, int(micro_batch["input_lengths"].max()))) if dynamic else micro_batch

    def _row_log_probs(self, micro_batch: BatchedDataDict) -> Tensor:
        packed = self.settings.batching.kind == "packed"
        return row_log_probs(self._next_token_log_probs, micro_batch, packed, self._places_multiple)
