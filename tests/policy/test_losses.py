"""Losses against their formulas, row by row in plain Python, and parts that add up."""

import math

import pytest
import torch

from megatron_ext.policy import ClippedPGLoss, DPOLoss, NLLLoss
from megatron_ext.policy.losses import valid_counts
from tests.policy.problems import tiny_batch


def problem(rows=6, seed=1):
    data = tiny_batch(rows, seed=seed)
    log_probs = data["prev_logprobs"] + 0.3 * torch.randn(data["prev_logprobs"].shape)
    return log_probs.double().requires_grad_(), data


def whole_loss(loss_fn, log_probs, data):
    return loss_fn(log_probs, data, *counts_for(loss_fn, data))[0]


def counts_for(loss_fn, data):
    return [torch.tensor(n) for n in valid_counts(data, getattr(loss_fn, "unit", 1))]


def counting_tokens(data):
    """For each row that counts, the places of its tokens that do."""
    for b in range(data.size):
        if data["sample_mask"][b]:
            yield b, [t for t in range(1, data["input_ids"].shape[1]) if data["token_mask"][b, t]]


def test_nll():
    log_probs, data = problem()
    found = [-log_probs[b, t].item() for b, places in counting_tokens(data) for t in places]
    assert whole_loss(NLLLoss(), log_probs, data).item() == pytest.approx(sum(found) / len(found), rel=1e-6)


def clipped_pg(log_prob, prev, generation, reference, advantage, o):
    ratio = math.exp(log_prob - prev)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - o.ratio_clip_min), 1 + o.ratio_clip_max))
    if o.ratio_clip_c is not None and advantage < 0:
        loss = min(loss, -advantage * o.ratio_clip_c)
    if o.use_importance_sampling_correction:
        loss *= math.exp(prev - generation)
    d = reference - log_prob
    return loss + o.reference_policy_kl_penalty * (math.exp(d) - d - 1)


@pytest.mark.parametrize(
    "loss_fn",
    [
        ClippedPGLoss(),
        ClippedPGLoss(reference_policy_kl_penalty=0.3, ratio_clip_min=0.1, ratio_clip_max=0.3, ratio_clip_c=1.2),
        ClippedPGLoss(0.1, token_level_loss=False, use_importance_sampling_correction=True),
    ],
)
def test_clipped_policy_gradient(loss_fn):
    log_probs, data = problem()
    keys = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
    rows = [
        [clipped_pg(log_probs[b, t].item(), *(data[key][b, t].item() for key in keys), loss_fn) for t in places]
        for b, places in counting_tokens(data)
    ]
    if loss_fn.token_level_loss:
        wanted = sum(map(sum, rows)) / sum(map(len, rows))
    else:
        wanted = sum(sum(row) / len(row) for row in rows if row) / len(rows)
    assert whole_loss(loss_fn, log_probs, data).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("average", [False, True])
def test_dpo(average):
    log_probs, data = problem()
    loss_fn = DPOLoss(0.2, 1.5, 0.4, preference_average_log_probs=average, sft_average_log_probs=average)
    rows = dict(counting_tokens(data))

    def reduced(values, b):
        found = [values[b, t].item() for t in rows[b]]
        return sum(found) / (len(found) if average else 1)

    reward = log_probs - data["reference_policy_logprobs"]
    wanted, pairs = 0.0, 0
    for chosen in range(0, data.size, 2):
        if chosen in rows and chosen + 1 in rows:
            pairs += 1
            margin = reduced(reward, chosen) - reduced(reward, chosen + 1)
            wanted += 1.5 * math.log1p(math.exp(-0.2 * margin)) - 0.4 * reduced(log_probs, chosen)
    assert pairs == 2  # of the third one row does not count
    assert whole_loss(loss_fn, log_probs, data).item() == pytest.approx(wanted / pairs, rel=1e-6)


@pytest.mark.parametrize("loss_fn", [NLLLoss(), ClippedPGLoss(0.1), ClippedPGLoss(token_level_loss=False), DPOLoss()])
def test_parts_add_up_and_what_does_not_count_has_no_gradient(loss_fn):
    log_probs, data = problem()
    counts = counts_for(loss_fn, data)
    whole, metrics = loss_fn(log_probs, data, *counts)
    [gradient] = torch.autograd.grad(whole, log_probs)
    parts = [loss_fn(log_probs[rows], data.select_indices(rows), *counts) for rows in ([4, 5], [0, 1], [2, 3])]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in metrics.items():
        found = [part[name] for _, part in parts]
        combined = min(found) if "_min" in name else max(found) if "_max" in name else sum(found)
        torch.testing.assert_close(combined, value, msg=name)
    counts_BS = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    counts_BS[:, 0] = False
    assert (gradient[~counts_BS] == 0).all()
    assert gradient[counts_BS].any()


@pytest.mark.parametrize("loss_fn", [NLLLoss(), ClippedPGLoss(0.1), DPOLoss()])
def test_nothing_that_counts_is_zero(loss_fn):
    log_probs, data = problem()
    data["sample_mask"].zero_()
    loss = whole_loss(loss_fn, log_probs, data)
    assert loss == 0
    assert (torch.autograd.grad(loss, log_probs)[0] == 0).all()


def test_large_differences_at_padding_do_no_harm():
    log_probs, data = problem()
    data["prev_logprobs"] = torch.where(data["token_mask"].bool(), data["prev_logprobs"], torch.tensor(-1e4))
    data["reference_policy_logprobs"] = torch.where(
        data["token_mask"].bool(), data["reference_policy_logprobs"], torch.tensor(1e4)
    )
    loss = whole_loss(ClippedPGLoss(0.1), log_probs, data)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


@pytest.mark.parametrize(
    "wrong", [{"ratio_clip_min": -0.1}, {"ratio_clip_c": 1.0}, {"reference_policy_kl_penalty": -1}]
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClippedPGLoss(**wrong)


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
@pytest.mark.parametrize(
    "loss_fn",
    [
        ClippedPGLoss(reference_policy_kl_penalty=0.3, ratio_clip_c=2.0, use_importance_sampling_correction=True),
        DPOLoss(),
    ],
)
def test_what_stands_at_padding_does_not_matter(loss_fn, fill):
    log_probs, data = problem()
    found = whole_loss(loss_fn, log_probs, data)
    outside = (data["token_mask"] * data["sample_mask"][:, None]) == 0
    for name in ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages"):
        data[name] = data[name].masked_fill(outside, fill)
    masked = whole_loss(loss_fn, log_probs, data)
    assert masked.item() == found.item()
    assert torch.autograd.grad(masked, log_probs)[0].isfinite().all()
