"""Numbers that are read of the model's outputs for the rows of a micro-batch: log-probabilities, read-outs, logits.

Legend: B rows of this data-parallel rank, S positions, V vocabulary, K ids per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head import LogProbs, ReadOut, Sampled
from megatron_ext.head.checks import rounds
from megatron_ext.policy.backend.base import Backend, ReadRequest
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.data.kept_ids import KEPT_IDS, replayed
from megatron_ext.policy.data.packed_rows import Rows, inside_rows


class MicroBatchReader:
    """The model's outputs at the tokens of a micro-batch; all ranks of a model ask for the same."""

    def __init__(self, backend: Backend):
        self.backend, self.settings = backend, backend.settings

    def narrows(self, micro_batch: BatchedDataDict) -> bool:
        """Return whether log-probabilities are of tokens that top-k and top-p leave, or that a generator kept. The
        reference's are not: it would leave others."""
        filters = self.settings.top_k is not None or self.settings.top_p < 1
        return (filters or KEPT_IDS in micro_batch) and not self.backend.has_reference_weights

    def log_probs(self, micro_batch: BatchedDataDict, with_plain: bool = False) -> Tensor:
        """fp32 `[B, S]`: of each token given those before it; 0 for the first, behind a row's end, and for tokens that
        the filters do not keep. `with_plain`: `[B, S, 2]`, beside them those of the whole distribution.
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
        if narrowed and KEPT_IDS in micro_batch:  # of what each position predicts: 0 for none, as where it pads
            beside = rows.laid(F.pad(micro_batch[KEPT_IDS][:, 1:] + 1, (0, 0, 0, 1)))
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
        """`[B, S, columns]`: at each position, of its label and of `beside` `[B, S, K]`; see `ReadRequest`. 0
        behind a row's end, and with `beside`, which losses ask for, where the masks leave out what is predicted."""
        rows, given, labels = self.backend.rows(micro_batch), None, None
        if beside is not None:
            given, labels = rows.laid(beside), self._labels_that_count(rows, micro_batch)
        return rows.at_positions(self.backend.read_out(ReadRequest(rows, readouts, columns, given, labels)))

    def logits(self, micro_batch: BatchedDataDict) -> Tensor:
        """fp32 `[B, S, V]`: the logits of each position, of the whole vocabulary on every rank, which holds them all;
        of a reward model `[B, S, 1]`. 0 behind a row's end."""
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
        """`[B]`: the place whose number is a row's, as transformers has it: its last token that is not padding."""
        config: Any = self.backend.model.config
        tokens_BS, counts_BS = data["input_ids"], inside_rows(data)
        if (padding := config.get_text_config().pad_token_id) is not None:
            counts_BS = counts_BS & (tokens_BS != padding)
        return (torch.arange(tokens_BS.shape[1], device=tokens_BS.device) * counts_BS).amax(1)

    def _labels_that_count(self, rows: Rows, micro_batch: BatchedDataDict) -> Tensor | None:
        """The tokens, -100 where the masks leave one out, if products are to be of the others alone. A bound says how
        many the masks leave, and nothing where there are none."""
        skip = self.settings.skip_masked_tokens
        bounded = not isinstance(skip, bool)
        return rows.labels_that_count(micro_batch) if skip and (not bounded or "token_mask" in micro_batch) else None
