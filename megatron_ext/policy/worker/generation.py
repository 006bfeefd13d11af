"""Sequences from the policy, by transformers' own `generate` on a whole copy of the model on every rank.

For small models, tests and examples, without another engine; for a server such as vLLM see `policy/refit`.

Legend: B rows, S positions of prompts, T of prompts and answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.backend.model_factories import model_factories
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.data.batch import BatchedDataDict
from megatron_ext.policy.data.batch_plan import checked
from megatron_ext.policy.worker.refitter import Refitter
from megatron_ext.policy.worker.sampling import Sampler, Stopping, row_seeds, stopping

_NEEDS = ("input_ids", "input_lengths")


class Generation:
    """Answers of a policy, and the copy of its model that makes them. The methods are those of NeMo-RL's
    `GenerationInterface`."""

    def __init__(self, backend: Backend, refitter: Refitter, config: Mapping[str, Any], tokenizer: Any):
        self.backend, self.settings, self._refitter = backend, backend.settings, refitter
        self.config, self.tokenizer = config, tokenizer
        self.generator: nn.Module | None = None
        self._generations = 0

    @torch.no_grad()
    def prepare_for_generation(self) -> None:
        """Make an unsharded copy of the model on every rank, in `precision`, with the current weights.

        Memory: the whole model on every rank, until `finish_generation`.

        Communicates: the all-gathers that make each weight whole; two collectives of a few bytes.
        """
        if self.settings.gives_rewards:
            raise ValueError("this worker has a reward model, which samples nothing: leave reward_model_cfg out")
        generator = self.generator

        def build() -> None:
            nonlocal generator
            if generator is None:
                with torch.random.fork_rng(devices=[]):
                    generator = model_factories(
                        self.settings.model, overrides=self.settings.config_overrides
                    ).make_empty()
                generator.to(self.backend.device, self.settings.dtype).eval()
                _keep_stops(generator)

        agree(build)  # memory may be short on one rank
        assert generator is not None
        state = generator.state_dict()
        for name, weight in self._refitter.iter_weights(hub_names=False):
            state[name].copy_(weight)
        self.generator = generator

    def finish_generation(self) -> None:
        """Free the copy of the model."""
        self.generator = None

    @torch.no_grad()
    def generate(
        self,
        data: Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> BatchedDataDict:
        """Generate answers to prompts by the settings in `generation`: `max_new_tokens`, `temperature`, `top_k`,
        `top_p`, `stop_token_ids`.

        Args:
            data: this rank's right-padded prompts, `input_ids` `[B, S]` and `input_lengths` `[B]`. Every rank may have
                rows of its own: each has the whole model.
            greedy: the likeliest tokens, instead of drawn ones.
            seed: the seed of the draws; None: a new one for each call, derived from the configuration's.
            rows: the rows' numbers in the whole batch, which with the seed determine the draws; None: 0, 1, ...

        Returns:
            On the CPU, "output_ids" `[B, T]`: prompts and answers, right-padded; "generation_lengths" and
            "unpadded_sequence_lengths" `[B]`: tokens of the answers, and of both; "logprobs" fp32 `[B, T]`: those of
            the answers' tokens, equal to `get_logprobs` up to rounding in `precision`, 0 elsewhere.

        Communicates: nothing after `prepare_for_generation`; without it, first what that communicates.

        Raises:
            ValueError: prompts or settings cannot be used; for prompts, on this rank alone.
        """
        ends = stopping(self.config, self.tokenizer)
        prepared = self.generator is not None
        if not prepared:
            self.prepare_for_generation()
        try:
            prompts = {name: data[name] for name in _NEEDS if name in data}
            batch = checked(prompts, _NEEDS, self.backend.vocabulary, least=1)
            self._generations += 1
            seed = self.settings.seed * 1_000_003 + self._generations if seed is None else seed
            numbers = range(batch.size) if rows is None else rows
            sampler = Sampler(self.settings, None if greedy else row_seeds(seed, numbers), self.backend.device)
            assert self.generator is not None
            with self.backend.mode():
                return _generated(self.generator, batch.to(self.backend.device), ends, sampler)
        finally:
            if not prepared:
                self.finish_generation()


def _generated(model: Any, batch: BatchedDataDict, ends: Stopping, sampler: Sampler) -> BatchedDataDict:
    lengths_B, width = batch["input_lengths"], batch["input_ids"].shape[1]
    column_S = torch.arange(width, device=lengths_B.device)
    # transformers appends at the right end: prompts are left-padded while it runs.
    shift_B1 = (width - lengths_B)[:, None]
    is_token_BS = column_S >= shift_B1
    place_BS = (column_S - shift_B1).clamp(min=0)
    prompts_BS = batch["input_ids"].gather(1, place_BS).where(is_token_BS, ends.pad_token_id)
    out_BT: Tensor = model.generate(
        input_ids=prompts_BS,
        attention_mask=is_token_BS.long(),
        logits_processor=[sampler],
        do_sample=False,
        num_beams=1,
        max_new_tokens=ends.max_new_tokens,
        pad_token_id=ends.pad_token_id,
        **({"eos_token_id": ends.stop_token_ids} if ends.stop_token_ids else {}),
        temperature=None,
        top_p=None,
        top_k=None,
    )
    answers_BN = out_BT[:, width:]
    own = model.generation_config.eos_token_id  # None, one, or a list
    stops = answers_BN.new_tensor(ends.stop_token_ids or ([] if own is None else own))
    stopped_BN = torch.isin(answers_BN, stops)
    # A token counts if no token before it ended the row.
    counts_BN = (stopped_BN.long().cumsum(1) - stopped_BN.long()) == 0
    new_B = counts_BN.sum(1)
    total_B = lengths_B + new_B
    shape = (len(lengths_B), width + answers_BN.shape[1])
    output_BT = torch.full(shape, ends.pad_token_id, device=answers_BN.device, dtype=answers_BN.dtype)
    log_probs_BT = torch.zeros(shape, device=answers_BN.device)
    output_BT[:, :width] = batch["input_ids"].where(column_S < lengths_B[:, None], ends.pad_token_id)
    row, step = counts_BN.nonzero(as_tuple=True)
    output_BT[row, lengths_B[row] + step] = answers_BN[row, step]
    log_probs_BT[row, lengths_B[row] + step] = sampler.log_probs()[row, step]
    found = {
        "output_ids": output_BT,
        "generation_lengths": new_B,
        "unpadded_sequence_lengths": total_B,
        "logprobs": log_probs_BT,
    }
    longest = int(total_B.max())
    return BatchedDataDict({name: x[:, :longest].cpu() if x.dim() > 1 else x.cpu() for name, x in found.items()})


def _keep_stops(model: Any) -> None:
    """Reduce the model's generation config to its stop tokens and its kind of cache: penalties and the like would
    change the draws, and not the scores."""
    own = model.generation_config
    kept = {"eos_token_id": own.eos_token_id, "cache_implementation": getattr(own, "cache_implementation", None)}
    model.generation_config = type(own)(**kept)
