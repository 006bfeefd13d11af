"""GRPO and its variants: edges, metrics, what is refused. Their values and gradients: `tests.fuzz.losses`."""

import pytest
import torch

from megatron_ext.losses import GRPOLoss
from megatron_ext.losses.policy_gradient import kl_estimate, sampling_weights
from tests.losses.problems import B, S, drawn, head, rows


def test_without_old_log_probs_the_ratio_is_1():
    log_probs = drawn(B, S, seed=3).requires_grad_()
    advantages = drawn(B, seed=8)
    found, metrics = GRPOLoss().from_log_probs(log_probs, advantages)
    torch.testing.assert_close(found, -advantages.mean())
    torch.testing.assert_close(torch.autograd.grad(found, log_probs)[0], -advantages[:, None].expand(B, S) / (B * S))
    assert metrics["ratio"] == 1
    assert metrics["clip_ratio"] == 0


def test_other_policies_get_no_gradient():
    log_probs, others = drawn(B, S, seed=3).requires_grad_(), drawn(B, S, seed=4).requires_grad_()
    given = dict.fromkeys(("old_log_probs", "reference_log_probs", "sampling_log_probs"), log_probs)
    found = GRPOLoss(beta=0.1).from_log_probs(log_probs, drawn(B, seed=8), **given)[0]
    expected = GRPOLoss().from_log_probs(log_probs, drawn(B, seed=8))[0]
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)
    loss = GRPOLoss(beta=0.1).from_log_probs(log_probs, drawn(B, seed=8), **dict.fromkeys(given, others))[0]
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None,)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_parts_add_up_with_a_count(loss_type):
    """Micro-batches, with what the whole is divided by; a tensor `[1]` of it gives a scalar loss too."""
    mask_BS, (old_BS, log_probs_BS, _) = rows().mask, rows().others.values()
    loss = GRPOLoss(loss_type=loss_type, max_completion_length=9)
    advantages = drawn(B, seed=8)
    whole, _ = loss.from_log_probs(log_probs_BS, advantages, mask_BS, old_BS)
    count = mask_BS.sum().reshape(1) if loss_type == "dapo" else B
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


def test_a_rows_weight_is_the_product_of_its_tokens():
    old = torch.tensor([[0.1, torch.inf, 0.2], [0.3, -0.4, 0.5]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    weights, outside = sampling_weights(old, torch.zeros(2, 3), mask, "sequence", "truncate", high=1.4)
    torch.testing.assert_close(weights, torch.tensor([[0.3], [0.4]]).exp().clamp(max=1.4))
    assert outside.tolist() == [[False], [True]]


def test_clamped_kl_lets_no_gradient_through_its_weights():
    apart = torch.tensor([0.1, 5.0], requires_grad=True)
    weights = torch.tensor([2.0, 2.0], requires_grad=True)
    kl_estimate(apart, "k3", 1.0, None, weights).sum().backward()
    assert apart.grad[1] == 0
    assert weights.grad[1] == 0
    torch.testing.assert_close(weights.grad[0], (torch.tensor(0.1).exp() - 1.1))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"temperature": 0.7}, r"temperature is an option of the loss, GRPOLoss\(temperature=...\)"),
        ({"old_logprobs": None}, "old_logprobs may mean old_log_probs"),
        ({"epsilon_hihg": 0.3}, r"epsilon_high is an option of the loss"),
        ({"advantages": None}, r"multiple values .* call GRPOLoss\(...\)\(hidden, weight, labels, advantages, mask="),
    ],
)
def test_wrong_arguments_are_told_with_the_right_ones(wrong, message):
    given = rows()
    with pytest.raises(TypeError, match=message):
        GRPOLoss()(*head(), given.labels, given.advantages, **wrong)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "gspo"}, "pass importance_sampling_level='sequence' with loss_type='grpo'"),
        ({"loss_type": "vespo"}, "loss_type is 'vespo': it must be one of"),
        ({"epsilon": -1}, "epsilon is -1: it must be at least 0"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos is 0"),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
            "weighs tokens; use 'token'",
        ),
        ({"loss_type": "cispo"}, "epsilon_high is None with loss_type 'cispo'"),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0},
            "delta is 2.0 with loss_type 'cispo', which has no",
        ),
        ({"loss_type": "sapo", "delta": 2.0}, "delta is 2.0 with loss_type 'sapo', which has no use"),
        ({"loss_type": "sapo", "epsilon_high": 0.3}, "epsilon_high is 0.3 with loss_type 'sapo', which has no use"),
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
