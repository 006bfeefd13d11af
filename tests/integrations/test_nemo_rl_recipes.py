"""NeMo-RL's Megatron recipes with the lm head fused and not: tensor and context parallelism, packing, top-k and top-p.

    NEMO_RL_SRC=/path/to/RL python -m pytest tests/integrations/test_nemo_rl_recipes.py

Unfused is all NeMo-RL's: stock Megatron-Core's logits, its post-processors and losses. Fused is its
`use_fused_linear_logprobs` over our patch, where NeMo-RL has that; for what it refuses there (packed documents cut over
context-parallel ranks, top-k and top-p) its losses take log-probabilities that our read-outs give inside the forward.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext.head import LogProbs, Sampled
from megatron_ext.megatron.language_model_patch import forward_with_fused_head
from megatron_ext.megatron.output_processors import ReadOuts
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens
from tests.gpt import causal_mask, model_parallel
from tests.integrations.test_nemo_rl_source import LENGTH, SOURCE, VOCABULARY, batch, samplings, source, valid
from tests.megatron.patching import patched
from tests.megatron.test_linear_ce_log_probs import our_gpt, packing
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(SOURCE is None, reason="NEMO_RL_SRC names no source of NeMo-RL")

STARTS = (0, LENGTH, 2 * LENGTH)


def losses(parts, filtered: bool, fused: bool):
    """Names and losses of NeMo-RL that take log-probabilities; under top-k or top-p only the first."""
    f, settings = parts.losses, {"use_fused_linear_logprobs": fused}
    # The penalty is on log-probabilities without a filter, which NeMo-RL takes from whole logits, never from packs.
    penalty = 0.0 if filtered else 0.02
    shared = {"reference_policy_kl_penalty": penalty}
    yield (
        "grpo",
        f.ClippedPGLossFn(f.ClippedPGLossConfig(use_importance_sampling_correction=True, **shared), **settings),
    )
    if filtered:
        return
    yield "nll", f.NLLLossFn(**settings)
    yield "cispo", f.ClippedPGLossFn(f.ClippedPGLossConfig(use_cispo=True, **shared), **settings)
    rows = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    yield "gspo", f.ClippedPGLossFn(f.ClippedPGLossConfig(**rows, **shared), **settings)


class Recipe:
    """A model, its batch, and the places of the batch on this rank."""

    def __init__(self, parts, packed: bool, sequence_parallel: bool):
        from megatron.core import parallel_state

        self.parts, self.packed = parts, packed
        self.model = our_gpt(vocab_size=VOCABULARY, sequence_parallel=sequence_parallel)
        self.data = batch(parts)[1]
        ids = self.data["input_ids"]
        self.ids = ids.view(1, -1) if packed else ids
        self.params = packing(*STARTS) if packed else None
        self.group = parallel_state.get_context_parallel_group()
        starts = torch.tensor(STARTS, dtype=torch.int32) if packed else None
        self.cut = SequenceParts(self.group, starts)
        self.own = self.cut.split(self.ids, 1)
        positions = torch.arange(LENGTH).repeat(len(ids)) if packed else torch.arange(LENGTH).expand(len(ids), LENGTH)
        self.positions = self.cut.split(positions.view_as(self.ids), 1)
        self.config = {
            "sequence_packing": {"enabled": packed, "fuse_loss": packed},
            "megatron_cfg": {"context_parallel_size": self.group.size()},
        }

    def forward(self, fused: bool = False):
        mask = None if self.packed else causal_mask(LENGTH)
        return self.parts.megatron.model_forward(
            self.model, self.data, self.own, self.positions, mask, self.params, use_fused_linear_logprobs=fused
        )

    def process(self, loss, made, sampling, fused: bool):
        """NeMo-RL's post-processor of what the model returned."""
        config = self.config
        if fused:  # NeMo-RL has log-probabilities of packs taken document by document
            config = config | {"sequence_packing": {"enabled": self.packed, "fuse_loss": False}}
        processor = self.parts.megatron.LossPostProcessor(loss, config, sampling_params=sampling)
        return processor(self.data, self.params, **valid(self.data))(made)[0]

    def unfused(self, loss, sampling):
        made = self.forward() * 1.0
        return self.process(loss, self.parts.megatron.apply_temperature_scaling(made, sampling), sampling, False)

    def fused(self, loss, sampling):
        """Loss by NeMo-RL's own switch."""
        with patched(chunk_size=3, temperature=1.0 if sampling is None else sampling.temperature):
            return self.process(loss, self.forward(fused=True), sampling, True)

    def read(self, loss, sampling):
        """Loss of NeMo-RL on log-probabilities from our read-outs."""
        starts = torch.tensor(STARTS, dtype=torch.int32) if self.packed else None
        labels_SB = self.cut.split(next_tokens(self.ids, starts), 1).transpose(0, 1)
        top_k, top_p, temperature = None, 1.0, 1.0
        if sampling is not None:
            top_k, top_p, temperature = sampling.top_k, sampling.top_p, sampling.temperature
        filtered = self.parts.sampling.need_top_k_or_top_p_filtering(sampling)
        asked = Sampled(labels_SB, top_k, top_p) if filtered else LogProbs(labels_SB)
        processor = ReadOuts(readouts=[asked], temperature=temperature, chunk_tokens=5)
        mask = None if self.packed else causal_mask(LENGTH)
        extra = {"packed_seq_params": self.params} if self.packed else {}
        found = forward_with_fused_head(self.model, self.own, self.positions, mask, output_processor=processor, **extra)
        whole_BS = self.cut.gather(found, 1)
        ids = self.data["input_ids"]
        log_probs = whole_BS.view(ids.shape)[:, :-1]
        if filtered:
            counts = (self.data["token_mask"] * self.data["sample_mask"][:, None])[:, 1:]
            from nemo_rl.algorithms.utils import mask_out_neg_inf_logprobs

            log_probs = mask_out_neg_inf_logprobs(log_probs, counts, "curr_logprobs")
        value, _metrics = loss(data=self.data, next_token_logprobs=log_probs, **valid(self.data))
        return value / self.group.size() ** 2  # as NeMo-RL's post-processor: its own, and against Megatron's

    def gradients(self, value) -> dict:
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        grads = dict(zip(names, torch.autograd.grad(value, parameters), strict=True))
        for grad in grads.values():
            dist.all_reduce(grad, group=self.group)
        return grads


def compare(parts, *, packed: bool, sequence_parallel: bool) -> int:
    """Compares values and gradients with the unfused ones, and returns how many values it compared."""
    compared = 0
    for name, sampling in samplings(parts):
        recipe = Recipe(parts, packed, sequence_parallel)
        filtered = parts.sampling.need_top_k_or_top_p_filtering(sampling)
        theirs_too = not filtered and recipe.group.size() == 1
        ways = [recipe.read, *([recipe.fused] if theirs_too else [])]
        for (loss_name, plain), (_, fusing) in zip(
            losses(parts, filtered, False), losses(parts, filtered, True), strict=True
        ):
            wanted = recipe.unfused(plain, sampling)
            gradients = recipe.gradients(wanted)
            assert any(g.abs().max() > 1e-4 for g in gradients.values())
            for way in ways:
                where = f"{loss_name} {name} {way.__name__}"
                said = partial("{}: {}".format, where)
                found = way(fusing if way == recipe.fused else plain, sampling)
                torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6, msg=said)
                own = recipe.gradients(found)
                for parameter, grad in gradients.items():
                    near = 2e-5 * float(grad.abs().max())
                    torch.testing.assert_close(own[parameter], grad, rtol=2e-5, atol=near, msg=said)
                compared += 1
    return compared


@ranks(1, 2, 4)
def test_fused_and_unfused():
    """Every size, with and without sequence parallelism and packing."""
    world = dist.get_world_size()
    with source() as parts:
        for cp, packed in itertools.product((1, 2), (False, True)):
            if world % cp or (cp > 1 and not packed):  # NeMo-RL packs where it cuts sequences
                continue
            tp = world // cp
            for sequence_parallel in {False, tp > 1}:
                with model_parallel(tp=tp, cp=cp):
                    compared = compare(parts, packed=packed, sequence_parallel=sequence_parallel)
                assert compared == (2 * 4 * (1 if cp > 1 else 2) + 3)
