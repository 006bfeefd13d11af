"""NeMo-RL's own losses, from its source, and ours of the same names: values, gradients and metrics.

NEMO_RL_SRC=/path/to/RL python -m pytest tests/integrations/test_nemo_rl_losses.py
"""

import pytest
import torch

from megatron_ext.policy import (
    BatchedDataDict,
    ClippedPGLoss,
    DistillationLossFn,
    DPOLossFn,
    DTensorPolicyWorker,
    NLLLoss,
)
from megatron_ext.policy.losses import valid_counts
from tests.integrations.test_nemo_rl_source import SOURCE, source
from tests.policy.problems import counts_for, shard, tiny_batch, tiny_config, with_teacher
from tests.policy.test_reward_model import REWARDS, PreferenceLoss, pairs
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(SOURCE is None, reason="NEMO_RL_SRC names no source of NeMo-RL")

CONFIGS = [
    {},
    {"ratio_clip_max": 0.3, "ratio_clip_c": 1.1, "kl_input_clamp_value": 0.2, "kl_output_clamp_value": 0.01},
    {"token_level_loss": False, "reference_policy_kl_type": "k1"},
    {"token_level_loss": False, "sequence_level_importance_ratios": True, "use_importance_sampling_correction": True},
    {"use_cispo": True, "reference_policy_kl_type": "k2"},
    {"disable_ppo_ratio": True, "use_on_policy_kl_approximation": True},
    {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
    {"positive_example_nll_weight": 0.3, "use_kl_in_reward": True},
]
BOUNDS = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.9}
CONFIGS += [
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind, **BOUNDS}
    for kind in ("tis", "icepop", "seq-mask-tis")
]
CONFIGS.append({**CONFIGS[3], "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.1})


def problem(rows=6):
    data = tiny_batch(rows, seed=3)
    data["rewards"] = torch.tensor([1.0, 0.0, 1.0, -1.0, 0.0, 2.0])
    log_probs = data["prev_logprobs"] + 0.3 * torch.randn(data["prev_logprobs"].shape, generator=_seeded(4))
    return data, log_probs.requires_grad_()


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def check(found, wanted, log_probs):
    """`found` and `wanted`: loss and metrics; the first column has no gradient in ours and is not there in theirs."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss, _ in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
    assert not wanted[1].keys() - found[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(float(found[1][name]), float(value), rtol=1e-5, atol=1e-6, msg=name)


def both(loss_fn, theirs, data, log_probs, given=None):
    counts = counts_for(loss_fn, data)
    keywords = dict(zip(("global_valid_seqs", "global_valid_toks"), counts, strict=True))
    wanted = theirs(next_token_logprobs=log_probs[:, 1:], data=given or data, **keywords)
    return loss_fn(log_probs, data, *counts), wanted


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_clipped_policy_gradient(config):
    data, log_probs = problem()
    with source() as nemo_rl:
        theirs = nemo_rl.loss.ClippedPGLossFn(nemo_rl.loss.ClippedPGLossConfig(**config))
        loss_fn = ClippedPGLoss.from_config(nemo_rl.loss.ClippedPGLossConfig(**config))
        assert loss_fn == ClippedPGLoss.from_config(config)
        assert theirs.loss_type.value == loss_fn.loss_type.value
        found, wanted = both(loss_fn, theirs, data, log_probs)
        if loss_fn.sequence_level_importance_ratios:  # there every row's weight counts once for each row
            theirs_alone, rows = wanted[1].pop("sampling_importance_ratio"), data["sample_mask"].sum()
            assert theirs_alone != pytest.approx(float(found[1]["sampling_importance_ratio"]), rel=1e-3)
            assert rows > 1
        check(found, wanted, log_probs)
        for name, kind in theirs.metric_normalizations.items():
            own = "tokens" if config.get("token_level_loss", True) else "sequences"
            found = loss_fn.metric_normalizations.get(name)
            assert kind.value == (own if found is None else found.value), name


def test_nll_and_dpo():
    data, log_probs = problem()
    with source() as nemo_rl:
        check(*both(NLLLoss(), nemo_rl.loss.NLLLossFn(), data, log_probs), log_probs)
        # There a pair counts by its chosen row; reference log-probs come shifted by one.
        data["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
        shifted = {**data, "reference_policy_logprobs": data["reference_policy_logprobs"].roll(-1, 1)}
        for average in (False, True):
            config = {"preference_average_log_probs": average, "sft_average_log_probs": average, "sft_loss_weight": 0.3}
            theirs = nemo_rl.loss.DPOLossFn(nemo_rl.loss.DPOLossConfig(reference_policy_kl_penalty=0.2, **config))
            check(*both(DPOLossFn(0.2, **config), theirs, data, log_probs, shifted), log_probs)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_distillation(kind, zero):
    data, _ = problem()
    logits = torch.randn(6, 12, 20, generator=_seeded(5)).requires_grad_()
    top = torch.randn(6, 12, 20, generator=_seeded(6)).topk(4)
    student = logits.log_softmax(-1).gather(-1, top.indices)
    entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    student = student if zero else student.log_softmax(-1)
    counts = dict(zip(("global_valid_seqs", "global_valid_toks"), map(torch.tensor, valid_counts(data)), strict=True))
    given = {"student_topk_logprobs": student, "teacher_topk_logprobs": top.values.log_softmax(-1), "H_all": entropy}
    with source() as nemo_rl:
        config = nemo_rl.loss.DistillationLossConfig(kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=zero)
        wanted = nemo_rl.loss.DistillationLossFn(config)(**given, data=data, **counts)
    found = DistillationLossFn(kind, 0.3, zero)(**given, data=data, **counts)
    torch.testing.assert_close(found[0], wanted[0])
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss, _ in (found, wanted)]
    torch.testing.assert_close(*grads)


@ranks(2)
def test_their_losses_train_our_worker():
    """Loss and gradient norm of a step are those of our losses, with filters or without, and for a teacher's top-k."""
    for generation in ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}):
        config = tiny_config(tp=2, generation=generation)
        data = with_teacher(tiny_batch(8))
        shifted = BatchedDataDict(data, reference_policy_logprobs=data["reference_policy_logprobs"].roll(-1, 1))
        with source() as nemo_rl:
            clipped = nemo_rl.loss.ClippedPGLossConfig(use_importance_sampling_correction=True)
            distilled = nemo_rl.loss.DistillationLossConfig(zero_outside_topk=True)
            pairs = [
                (nemo_rl.loss.ClippedPGLossFn(clipped), ClippedPGLoss.from_config(clipped), data),
                (nemo_rl.loss.NLLLossFn(), NLLLoss(), data),
                (nemo_rl.loss.DistillationLossFn(distilled), DistillationLossFn(zero_outside_topk=True), data),
                (nemo_rl.loss.DPOLossFn(nemo_rl.loss.DPOLossConfig()), DPOLossFn(0.05), shifted),
            ]
            pairs = pairs[:1] if "top_k" in generation else pairs
            for theirs, loss_fn, given in pairs:
                if given is shifted:
                    data["sample_mask"] = given["sample_mask"] = torch.ones(8)
                found, wanted = (
                    DTensorPolicyWorker(config, init_reference_model=False).train(rows, chosen)
                    for chosen, rows in ((theirs, given), (loss_fn, data))
                )
                for name in ("global_loss", "grad_norm"):
                    torch.testing.assert_close(found[name], wanted[name], rtol=2e-5, atol=1e-6)


@ranks(2)
def test_their_preference_loss_trains_a_reward_model():
    config, results = tiny_config(tp=2, reward_model_cfg=REWARDS), []
    with source() as nemo_rl:
        for loss_fn in (nemo_rl.loss.PreferenceLossFn(), PreferenceLoss()):
            worker = DTensorPolicyWorker(config, init_reference_model=False)
            results.append(worker.train(shard(pairs(), worker), loss_fn))
    for name in ("global_loss", "grad_norm"):
        torch.testing.assert_close(results[0][name], results[1][name], rtol=2e-5, atol=1e-6)
