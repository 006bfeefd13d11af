"""Log-probabilities, likeliest tokens and rewards of a batch, by the policy and by its reference.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head import LogSumExp, ReadOut, TopK
from megatron_ext.policy.backend.base import Backend, Read
from megatron_ext.policy.data.batch import KEPT_IDS, BatchedDataDict
from megatron_ext.policy.data.batch_plan import scoring_step
from megatron_ext.policy.losses.worker_protocol import Timer, timed
from megatron_ext.policy.worker.reader import MicroBatchReader


class Scorer:
    """Scores of rows by a policy, without gradients."""

    def __init__(self, backend: Backend):
        self.backend, self.settings, self.reader = backend, backend.settings, MicroBatchReader(backend)

    @torch.no_grad()
    def get_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Compute the log-probabilities of the tokens of right-padded rows.

        Args:
            data: this data-parallel rank's `input_ids` `[B, S]` and `input_lengths` `[B]`. Ranks may have different B.
                `kept_token_ids` `[B, S, K]` are the ids that the generator kept where it drew each token, -1 for none.
            micro_batch_size: rows of a micro-batch; None: `logprob_batch_size`.
            timer: as NeMo-RL's, measures "get_logprobs".

        Returns:
            "logprobs", fp32 `[B, S]` on the CPU: at position t that of token t; 0 for the first, and for padding. With
            `generation.top_k` or `top_p` those of the filtered distribution, 0 for tokens that are not kept; with
            `kept_token_ids` those of the distribution over these ids, 0 for tokens without any, which were not sampled.

        Communicates: beside the model, two collectives of a few bytes.

        Raises:
            ValueError: data that cannot be scored, on every rank.
        """
        with timed(timer, "get_logprobs"):
            return BatchedDataDict(logprobs=self._scored(data, micro_batch_size, self.reader.log_probs))

    @torch.no_grad()
    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Compute the k largest logits of each position, divided by the temperature, for distillation.

        Args:
            data, micro_batch_size: as for `get_logprobs`.
            k: the number of logits, at most the vocabulary's size.
            timer: as NeMo-RL's, measures "get_topk_logits".

        Returns:
            "topk_logits", fp32, and "topk_indices", int64, `[B, S, k]` on the CPU, in descending order, of the token
            after each position; 0 for padding.

        Raises:
            ValueError: k is invalid, or data cannot be scored; on every rank.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.backend.vocabulary:
            raise ValueError(f"k is {k!r}: it must be an int from 1 to the vocabulary's size {self.backend.vocabulary}")

        def readouts(_: Tensor) -> list[ReadOut]:
            return [TopK(k), LogSumExp()]

        with timed(timer, "get_topk_logits"):
            found = self._scored(
                data, micro_batch_size, lambda batch: self.reader.read_outs(batch, readouts, 2 * k + 1)
            )
        log_probs, ids, log_sum = found.split([k, k, 1], -1)
        return BatchedDataDict(topk_logits=(log_probs + log_sum).float(), topk_indices=ids.long())

    @torch.no_grad()
    def score(self, data: Mapping[str, Any], timer: Timer | None = None) -> BatchedDataDict:
        """Compute the rewards of rows by a reward model (`reward_model_cfg.enabled`).

        Args:
            data, timer: as for `get_logprobs`; its label is "score".

        Returns:
            "scores", fp32 `[B]` on the CPU: the head's output at a row's last token that is not the config's
            `pad_token_id`, divided by the temperature, as in NeMo-RL.

        Raises:
            ValueError: the worker has a causal language model, or data that cannot be scored; on every rank.
        """
        if not self.settings.gives_rewards:
            raise ValueError(
                "score() needs a reward model, and this worker has a causal language model: set "
                "reward_model_cfg.enabled, or ask get_logprobs() for log-probabilities"
            )
        with timed(timer, "score"):
            found = self._scored(data, None, self.reader.logits)
        return BatchedDataDict(scores=found[torch.arange(len(found)), self.reader.last_tokens(data).cpu(), 0])

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Return `get_logprobs` of the reference policy, without top-k and top-p, which would keep other tokens of it.
        The key is "reference_logprobs", the timer's label "get_reference_policy_logprobs".
        """
        with timed(timer, "get_reference_policy_logprobs"), self.backend.use_reference_model():
            return BatchedDataDict(reference_logprobs=self.get_logprobs(data, micro_batch_size)["logprobs"])

    def _scored(self, data: Mapping[str, Any], micro_batch_size: int | None, read: Read) -> Tensor:
        """Join what `read` makes of every micro-batch, `[rows, positions, ...]`, to `[B, S, ...]` of all `data` on the
        CPU; 0 behind a micro-batch's positions."""
        batching, backend = self.settings.batching, self.backend
        bounds = backend.bounds(micro_batch_size, batching.logprob_rows, batching.logprob_tokens)
        step = scoring_step(data, bounds, backend.coordinates)
        read_keys = [name for name in ("input_ids", "input_lengths", KEPT_IDS) if name in data]
        batch = BatchedDataDict({name: data[name] for name in read_keys}).to(backend.device)
        backend.model.eval()
        whole: Tensor | None = None

        def keep(found: Tensor, _: BatchedDataDict, rows_: list[int], counts: bool) -> None:
            nonlocal whole
            if whole is None:
                whole = torch.zeros(*batch["input_ids"].shape, *found.shape[2:], dtype=found.dtype)
            if counts:
                whole[rows_, : found.shape[1]] = found.cpu()

        with backend.mode():
            backend.run_passes(step, batch, read, keep)
        backend.end_inference()
        found = backend.from_last_stage(whole)
        assert found is not None
        return found
