"""GRPO and its variants against their formulas in plain PyTorch, on one and two ranks."""

import pytest
import torch

from megatron_ext.losses import GRPOLoss, grpo
from megatron_ext.losses.policy_gradient import kl_estimate, sampling_weights
from tests.fuzz.losses import true_grpo
from tests.losses.problems import B, S, check_rows, drawn, head, rows
from tests.ranks import ranks

VARIANTS = {
    "dapo": {"epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo", "beta": 0.3},
    "bnpo": {"loss_type": "bnpo", "delta": 1.3},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 9},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.4},
    "kl clamps": {"beta": 0.3, "kl_input_clamp": 0.4, "kl_output_clamp": 0.05},
    "corrected k1": {"beta": 0.3, "kl_estimator": "k1", "use_bias_correction_kl": True},
    "k2": {"beta": 0.3, "kl_estimator": "k2"},
}
SAMPLED = [
    "token",
    "token_truncate",
    "token_mask",
    "sequence",
    "sequence_truncate",
    "sequence_mask",
    "sequence_mean_mask",
]
BOUNDS = 1.0, 1.7  # between the weights of tokens, of rows, and between the rows' means


def sample_weights(kind, drift_BS, counts_BS):
    """Of tokens by their own difference of log-probabilities, or by their row's."""
    level, _, cut = kind.partition("_")
    of_row = (drift_BS * counts_BS).sum(1, keepdim=True)
    value = (drift_BS if level == "token" or cut == "mean_mask" else of_row).exp()
    if not cut:
        return value
    if cut == "truncate":
        return value.clamp(*BOUNDS)
    judged = (of_row / counts_BS.sum(1, keepdim=True)).exp() if cut == "mean_mask" else value
    return value.where((judged >= BOUNDS[0]) & (judged <= BOUNDS[1]), 0.0)


@ranks(1, 2)
def test_variants():
    for name, o in VARIANTS.items():
        given = rows(drawn(B, S, seed=7) if name in ("dapo", "sapo") else drawn(B, seed=8))
        check_rows(
            lambda o=o, **head: GRPOLoss(**o, **head),
            true_grpo(o, given),
            given.advantages,
            mask=given.mask,
            **{name: given.others[name] for name in ("old_log_probs", "reference_log_probs")},
        )


@ranks(2)
def test_weights_of_samples():
    given = rows(drawn(B, seed=8))
    old, sampled = given.others["old_log_probs"], given.others["sampling_log_probs"]
    bounds = dict(zip(("sampling_ratio_min", "sampling_ratio_max"), BOUNDS, strict=True))
    for kind in SAMPLED:
        level, truncation = grpo._CORRECTIONS[kind]
        outside = sampling_weights(old, sampled, given.weights, level, truncation or "mask", *BOUNDS)[1]
        assert outside.any()
        assert not outside.all()
        check_rows(
            lambda kind=kind, **head: GRPOLoss(sampling_correction=kind, **bounds, **head),
            true_grpo({}, given, sample_weights(kind, old - sampled, given.weights)),
            given.advantages,
            mask=given.mask,
            **given.others,
        )


def test_skipped_tokens_are_not_read():
    """Hidden states of NaN where the mask is 0 or the label does not count."""
    given = rows()
    counted_BS = given.weights > 0
    results = []
    for skip in (False, True):
        hidden, weight = (x.requires_grad_() for x in head())
        read = hidden.masked_fill(~counted_BS.unsqueeze(-1), torch.nan) if skip else hidden
        loss, _ = GRPOLoss(skip_ignored=skip)(read, weight, given.labels, drawn(B, S, seed=7), mask=given.mask)
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight])])
    torch.testing.assert_close(results[1], results[0])


def test_without_old_log_probs_the_ratio_is_1():
    log_probs = drawn(B, S, seed=3).requires_grad_()
    advantages = drawn(B, seed=8)
    found, metrics = GRPOLoss().from_log_probs(log_probs, advantages)
    torch.testing.assert_close(found, -advantages.mean())
    torch.testing.assert_close(torch.autograd.grad(found, log_probs)[0], -advantages[:, None].expand(B, S) / (B * S))
    assert metrics["ratio"] == 1
    assert metrics["clip_ratio"] == 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_parts_add_up_with_a_count(loss_type):
    """Micro-batches, with what the whole is divided by."""
    mask_BS, (old_BS, log_probs_BS, _) = rows().mask, rows().others.values()
    loss = GRPOLoss(loss_type=loss_type, max_completion_length=9)
    advantages = drawn(B, seed=8)
    whole, _ = loss.from_log_probs(log_probs_BS, advantages, mask_BS, old_BS)
    count = mask_BS.sum() if loss_type == "dapo" else B
    parts = [
        loss.from_log_probs(log_probs_BS[at], advantages[at], mask_BS[at], old_BS[at], count=count)[0]
        for at in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_what_stands_at_masked_tokens_does_not_matter():
    mask_BS, clean = rows().mask, rows().others
    loss = GRPOLoss(beta=0.3)
    dirty = {
        name: x.masked_fill(mask_BS == 0, fill)
        for (name, x), fill in zip(clean.items(), (-9e9, 9e9, torch.nan), strict=True)
    }
    log_probs = drawn(B, S, scale=0.1, seed=9).requires_grad_()
    spoilt = log_probs.detach().masked_fill(mask_BS == 0, -torch.inf).requires_grad_()
    want, _ = loss.from_log_probs(log_probs, drawn(B, S, seed=7), mask_BS, **clean)
    found, metrics = loss.from_log_probs(
        spoilt, drawn(B, S, seed=7).masked_fill(mask_BS == 0, torch.nan), mask_BS, **dirty
    )
    assert found == want
    torch.testing.assert_close(*(torch.autograd.grad(*pair)[0] for pair in ((found, spoilt), (want, log_probs))))
    assert all(x.isfinite() for x in metrics.values())


def test_metrics():
    """Two rows of two tokens: ratios 2 and 1/2, e^-0.1 and e^0.1."""
    old = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
    new = old + torch.tensor([[2.0, 0.5], [torch.e**-0.1, torch.e**0.1]]).log()
    ref = new + torch.tensor([[0.3, 0.0], [0.0, 0.0]])
    _, metrics = GRPOLoss(beta=0.1).from_log_probs(new, torch.tensor([1.0, -1.0]), None, old, ref, old - 0.1)
    ratios = torch.tensor([2.0, 0.5, torch.e**-0.1, torch.e**0.1])
    torch.testing.assert_close(metrics["ratio"], ratios.mean())
    torch.testing.assert_close(metrics["clip_ratio"], torch.tensor(0.25))  # 2 with an advantage; 1/2 has one too
    torch.testing.assert_close(metrics["kl"], torch.tensor((torch.e**0.3 - 0.3 - 1) / 4))
    torch.testing.assert_close(metrics["sampling_ratio"], torch.tensor(0.1).exp())
    assert metrics["sampling_outside"] == 0


def test_an_overflowing_weight_is_0():
    weights, outside = sampling_weights(torch.tensor([[900.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    assert weights.tolist() == [[0.0, 1.0]]
    assert not outside.any()


def test_clamped_kl_lets_no_gradient_through_its_weights():
    apart = torch.tensor([0.1, 5.0], requires_grad=True)
    weights = torch.tensor([2.0, 2.0], requires_grad=True)
    kl_estimate(apart, "k3", 1.0, None, weights).sum().backward()
    assert apart.grad[1] == 0
    assert weights.grad[1] == 0
    torch.testing.assert_close(weights.grad[0], (torch.tensor(0.1).exp() - 1.1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "vespo"}, "loss_type is 'vespo': it must be one of"),
        ({"epsilon": -1}, "epsilon is -1: it must be at least 0"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos is 0"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "which weighs tokens; use 'token'"),
        ({"loss_type": "dr_grpo"}, "max_completion_length is None"),
        ({"loss_type": "dr_grpo", "max_completion_length": -3}, "max_completion_length is -3"),
        ({"loss_type": "dr_grpo", "max_completion_length": 2.5}, "max_completion_length is 2.5"),
        ({"loss_type": "dr_grpo", "max_completion_length": True}, "max_completion_length is True"),
        ({"epsilon": None}, "epsilon is None: it must be at least 0$"),
        ({"epsilon": "0.2"}, "epsilon is '0.2': it must be at least 0; write 0.2 without quotes"),
        ({"epsilon_high": -0.1}, "epsilon_high is -0.1: it must be at least 0, or None"),
        ({"delta": -1.0}, "delta is -1.0"),
        ({"delta": "2"}, "delta is '2'"),
        ({"kl_input_clamp": -1.0}, "kl_input_clamp is -1.0"),
        ({"kl_output_clamp": torch.nan}, "kl_output_clamp is nan"),
        ({"sampling_ratio_min": -0.5}, "sampling_ratio_min is -0.5"),
        ({"sampling_ratio_max": [3.0]}, "sampling_ratio_max is "),
        ({"sampling_ratio_min": 4.0}, "sampling_ratio_min is 4.0 and sampling_ratio_max 3.0"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
        ({"sampling_correction": "tis"}, "sampling_correction is 'tis'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOLoss(**options)
