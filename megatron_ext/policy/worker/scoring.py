"""Log-probabilities of a batch's tokens, by the policy and by its reference.

Legend: B rows of this data-parallel rank, S positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head import LogProbs, LogSumExp, ReadOut, Sampled, TopK
from megatron_ext.head.validation.option_checks import rounds
from megatron_ext.policy import device_memory
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.data.batch_plan import MicroBatchBounds, Step, scoring_step
from megatron_ext.policy.data.kept_ids import KEPT_IDS, replayed
from megatron_ext.policy.data.packed_rows import Rows, inside_rows
from megatron_ext.policy.data.timer import Timer, timed
from megatron_ext.policy.worker.backend import Backend, ReadRequest

T = TypeVar("T")
Read = Callable[[BatchedDataDict], Tensor]
# Of what was read, its micro-batch, the rows of that, and whether they count: a loss, or None.
Use = Callable[[Tensor, BatchedDataDict, list[int], bool], Tensor | None]


class Scoring(Backend):
    """A policy that says how probable tokens are."""

    @torch.no_grad()
    def get_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Log-probabilities of the tokens of right-padded rows.

        Args:
            data: this data-parallel rank's `input_ids` `[B, S]` and `input_lengths` `[B]`. Ranks may have different B.
                `kept_token_ids` `[B, S, K]` are the ids that the generator kept where it drew each token, -1 for none.
            micro_batch_size: rows of a micro-batch; None: `logprob_batch_size`.
            timer: as NeMo-RL's, measures "get_logprobs".

        Returns:
            "logprobs", fp32 `[B, S]` on the CPU: at position t that of token t; 0 for the first, and for padding. With
            `generation.top_k` or `top_p` of what these leave, and 0 for tokens that they do not keep; with
            `kept_token_ids` among these instead, and 0 for tokens that have none: those were not sampled.

        Communicates: beside the model, two collectives of a few bytes.

        Raises:
            ValueError: data that cannot be scored, on every rank.
        """
        with timed(timer, "get_logprobs"):
            return BatchedDataDict(logprobs=self._scored(data, micro_batch_size, self._row_log_probs))

    @torch.no_grad()
    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """The k largest logits of each position, over the temperature: what a student is distilled from.

        Args:
            data, micro_batch_size: as for `get_logprobs`.
            k: how many; at most the vocabulary.
            timer: as NeMo-RL's, measures "get_topk_logits".

        Returns:
            "topk_logits", fp32, and "topk_indices", int64, `[B, S, k]` on the CPU, falling, of what each position
            predicts; 0 for padding.

        Raises:
            ValueError: k that cannot be, or data that cannot be scored, on every rank.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self._vocabulary:
            raise ValueError(f"k is {k!r}: it must be an int from 1 to the vocabulary's size {self._vocabulary}")

        def readouts(_: Tensor) -> list[ReadOut]:
            return [TopK(k), LogSumExp()]

        with timed(timer, "get_topk_logits"):
            found = self._scored(data, micro_batch_size, lambda batch: self._row_read(batch, readouts, 2 * k + 1))
        log_probs, ids, log_sum = found.split([k, k, 1], -1)
        return BatchedDataDict(topk_logits=(log_probs + log_sum).float(), topk_indices=ids.long())

    @torch.no_grad()
    def score(self, data: Mapping[str, Any], timer: Timer | None = None) -> BatchedDataDict:
        """The rewards of rows, by a reward model (`reward_model_cfg.enabled`).

        Args:
            data, timer: as for `get_logprobs`; its label is "score".

        Returns:
            "scores", fp32 `[B]` on the CPU: what the head says of a row's last token that is not the config's
            `pad_token_id`, over the temperature, as in NeMo-RL.

        Raises:
            ValueError: the worker has a causal language model, or data that cannot be scored; on every rank.
        """
        if not self.settings.gives_rewards:
            raise ValueError(
                f"score() is of reward models, and this {type(self).__name__} has a causal language model: set "
                f"reward_model_cfg.enabled, or ask get_logprobs() for log-probabilities"
            )
        with timed(timer, "score"):
            found = self._scored(data, None, self._row_logits)
        return BatchedDataDict(scores=found[torch.arange(len(found)), self._last_tokens(data), 0])

    def _last_tokens(self, data: Mapping[str, Any]) -> Tensor:
        """`[B]`: the place whose number is a row's, as transformers has it: its last token that is not padding."""
        config: Any = self.model.config
        tokens_BS, counts_BS = data["input_ids"], inside_rows(data)
        if (padding := config.get_text_config().pad_token_id) is not None:
            counts_BS = counts_BS & (tokens_BS != padding)
        return (torch.arange(tokens_BS.shape[1], device=tokens_BS.device) * counts_BS).amax(1)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Return `get_logprobs` of the reference policy, whose distribution is whole: top-k and top-p would leave other
        tokens of it. Key and label are "reference_logprobs" and "get_reference_policy_logprobs".
        """
        with timed(timer, "get_reference_policy_logprobs"), self.use_reference_model():
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
        device_memory.exchange(self._state().items(), self.reference)
        self._is_reference = True
        try:
            yield
        finally:
            device_memory.exchange(self._state().items(), self.reference)
            self._is_reference = False

    def _scored(self, data: Mapping[str, Any], micro_batch_size: int | None, read: Read) -> Tensor:
        """Join what `read` makes of every micro-batch, `[rows, positions, ...]`, to `[B, S, ...]` of all `data` on the
        CPU; 0 behind a micro-batch's positions."""
        batching = self.settings.batching
        rows = batching.logprob_rows if micro_batch_size is None else micro_batch_size
        step = scoring_step(data, self._bounds(rows, batching.logprob_tokens), self._coordinates)
        read_keys = [name for name in ("input_ids", "input_lengths", KEPT_IDS) if name in data]
        batch = BatchedDataDict({name: data[name] for name in read_keys}).to(self.device)
        self.model.eval()
        whole: Tensor | None = None

        def keep(found: Tensor, _: BatchedDataDict, rows_: list[int], counts: bool) -> None:
            nonlocal whole
            if whole is None:
                whole = torch.zeros(*batch["input_ids"].shape, *found.shape[2:], dtype=found.dtype)
            if counts:
                whole[rows_, : found.shape[1]] = found.cpu()

        with self._mode():
            self._run_passes(step, batch, read, keep)
        self._end_inference()
        return self._from_last_stage(whole)

    def _run_passes(self, step: Step, batch: BatchedDataDict, read: Read, use: Use) -> None:
        """Every pass of a step through the model: `read` gives what the model computes of a micro-batch, `use` makes
        of that, where a pipeline ends, a loss to go back from, or None."""
        for rows, counts in step.rows():
            micro_batch = self._micro_batch(batch, rows)
            loss = use(read(micro_batch), micro_batch, rows, counts)
            if loss is not None:
                loss.backward()

    def _from_last_stage(self, found: T | None) -> T:
        """Return on every rank what `_run_passes` left on the last stage of a pipeline."""
        assert found is not None
        return found

    def _bounds(self, rows: int, tokens: int) -> MicroBatchBounds:
        return MicroBatchBounds(self.settings.batching.kind, rows, tokens, self._vocabulary, self._places_multiple)

    def _micro_batch(self, batch: BatchedDataDict, rows: list[int]) -> BatchedDataDict:
        micro_batch = batch.select_indices(rows)
        dynamic = self.settings.batching.kind == "dynamic"
        return micro_batch.cut(max(2, int(micro_batch["input_lengths"].max()))) if dynamic else micro_batch

    def _rows(self, micro_batch: BatchedDataDict) -> Rows:
        return Rows.of(micro_batch, self.settings.batching.kind == "packed", self._places_multiple)

    def _narrowed(self, micro_batch: BatchedDataDict) -> bool:
        """Return whether log-probabilities are of tokens that top-k and top-p leave, or that a generator kept. The
        reference's are not: it would leave others."""
        filters = self.settings.top_k is not None or self.settings.top_p < 1
        return (filters or KEPT_IDS in micro_batch) and not self._is_reference

    def _labels_that_count(self, rows: Rows, micro_batch: BatchedDataDict) -> Tensor | None:
        """The tokens, -100 where the masks leave one out, if products are to be of the others alone. A bound says how
        many the masks leave, and nothing where there are none."""
        skip = self.settings.skip_masked_tokens
        bounded = not isinstance(skip, bool)
        return rows.labels_that_count(micro_batch) if skip and (not bounded or "token_mask" in micro_batch) else None

    def _row_log_probs(self, micro_batch: BatchedDataDict, with_plain: bool = False) -> Tensor:
        """fp32 `[B, S]`: of each token given those before it; 0 for the first, behind a row's end, and for tokens that
        the filters do not keep. `with_plain`: `[B, S, 2]`, beside them those of the whole distribution.
        """
        if self.settings.gives_rewards:
            raise ValueError(
                "this worker has a reward model, which has no log-probabilities: call score(), train it with a loss "
                "whose input_type is 'logit', or leave reward_model_cfg out"
            )
        settings, narrowed, rows = self.settings, self._narrowed(micro_batch), self._rows(micro_batch)

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
        if narrowed and KEPT_IDS in micro_batch:  # of what each position predicts: 0 for none, as where it pads
            beside = rows.laid(F.pad(micro_batch[KEPT_IDS][:, 1:] + 1, (0, 0, 0, 1)))
        found = self._read_out(ReadRequest(rows, readouts, 1 + with_plain, beside, labels))
        if narrowed:
            found = found.where(found > -torch.inf, 0.0)
        return rows.at_tokens(found if with_plain else found[..., 0])

    def _row_read(
        self,
        micro_batch: BatchedDataDict,
        readouts: Callable[..., Sequence[ReadOut]],
        columns: int,
        beside: Tensor | None = None,
    ) -> Tensor:
        """`[B, S, columns]`: read-outs at each position, of its label and of `beside` `[B, S, K]`; see `_read_out`. 0
        behind a row's end, and with `beside`, which losses ask for, where the masks leave out what is predicted."""
        rows, given, labels = self._rows(micro_batch), None, None
        if beside is not None:
            given, labels = rows.laid(beside), self._labels_that_count(rows, micro_batch)
        return rows.at_positions(self._read_out(ReadRequest(rows, readouts, columns, given, labels)))

    def _row_logits(self, micro_batch: BatchedDataDict) -> Tensor:
        """fp32 `[B, S, V]`: the logits of each position, of the whole vocabulary on every rank, which holds them all;
        of a reward model `[B, S, 1]`. 0 behind a row's end."""
        if (bits := self.settings.bits) not in (None, "fast"):
            raise ValueError(
                f'bits is "{bits}", by that key or by batch_invariant_mode, and logits are asked for, which the model '
                f"makes and whose bits may depend on the batch: take a loss of log-probabilities, or leave the key out"
            )
        if rounds(self.settings.logit_dtype):
            raise ValueError(
                f"logit_dtype is {self.settings.logit_dtype}, and logits are asked for, which the model "
                f"makes, in a dtype of its own: take a loss of log-probabilities, or leave the key out"
            )
        rows, columns = self._rows(micro_batch), 1 if self.settings.gives_rewards else self._vocabulary
        return rows.at_positions(self._whole_logits(rows, columns))
