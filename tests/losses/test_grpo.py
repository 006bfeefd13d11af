"""GRPO and its variants against their formulas, token by token in plain PyTorch, on one and two ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference
from megatron_ext.losses import GRPOLoss, grpo
from megatron_ext.losses.policy_gradient import kl_estimate, sampling_weights
from tests.losses.problems import B, S, check_rows, counts, drawn, head, rows
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


def clamped(x, low, high):
    return x if low is None else torch.minimum(torch.maximum(x, torch.as_tensor(low)), torch.as_tensor(high))


def kl(d, o):
    clamp = o.get("kl_input_clamp")
    d = clamped(d, None if clamp is None else -clamp, clamp)
    found = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[o.get("kl_estimator", "k3")]
    clamp = o.get("kl_output_clamp")
    return clamped(found, None if clamp is None else -clamp, clamp)


def token_loss(log_prob, ratio, advantage, o):
    kind, low = o.get("loss_type", "dapo"), 1 - o.get("epsilon", 0.2)
    if kind == "cispo":
        return -min(ratio.item(), o["epsilon_high"]) * advantage * log_prob
    if kind == "sapo":
        t = o.get("sapo_temperature_pos", 1.0) if advantage > 0 else o.get("sapo_temperature_neg", 1.05)
        return -advantage * 4 / t / (1 + (-t * (ratio - 1)).exp())
    clipped = clamped(ratio, low, 1 + o.get("epsilon_high", o.get("epsilon", 0.2)))
    ratio = clamped(ratio, -1e9, o["delta"]) if "delta" in o else ratio
    return -torch.minimum(ratio * advantage, clipped * advantage)


def weight(kind, drift, place, low, high):
    """Of a token, `drift` the differences of its row."""
    level, _, cut = kind.partition("_")
    value = (drift[place] if level == "token" or cut == "mean_mask" else sum(drift)).exp()
    judged = (sum(drift) / len(drift)).exp() if cut == "mean_mask" else value
    if cut == "truncate":
        return value.clamp(low, high)
    return value if not cut or low <= judged <= high else 0.0


def truth(o, advantages, per_token, sampled=None):
    labels_BS, mask_BS, _ = rows()
    places = counts(labels_BS, mask_BS)

    def whole(log_probs_BS):
        found = []
        for b, row in enumerate(places):
            changes = [log_probs_BS[b, s] - per_token["old_log_probs"][b, s] for s in row]
            of_row = (sum(changes) / len(row)).exp()
            losses = []
            for i, s in enumerate(row):
                ratio = of_row if o.get("importance_sampling_level") == "sequence" else changes[i].exp()
                advantage = advantages[b] if advantages.dim() == 1 else advantages[b, s]
                loss = token_loss(log_probs_BS[b, s], ratio, advantage, o)
                if sampled:
                    drift = [per_token["old_log_probs"][b, s] - per_token["sampling_log_probs"][b, s] for s in row]
                    loss = loss * weight(sampled, drift, i, *BOUNDS)
                if o.get("beta"):
                    distance = kl(per_token["reference_log_probs"][b, s] - log_probs_BS[b, s], o)
                    loss = loss + o["beta"] * distance * (ratio if o.get("use_bias_correction_kl") else 1)
                losses.append(loss)
            found.append(losses)
        kind = o.get("loss_type", "dapo")
        if kind in ("grpo", "sapo"):
            return sum(sum(row) / len(row) for row in found) / B
        return sum(map(sum, found)) / (B * 9 if kind == "dr_grpo" else sum(map(len, found)))

    return whole


def inputs(sampled=False):
    _, mask_BS, others = rows()
    per_token = {"old_log_probs": others["old"], "reference_log_probs": others["ref"]}
    return mask_BS, per_token | ({"sampling_log_probs": others["sampled"]} if sampled else {})


@ranks(1, 2)
def test_variants():
    for name, o in VARIANTS.items():
        mask_BS, per_token = inputs()
        advantages = drawn(B, S, seed=7) if name in ("dapo", "sapo") else drawn(B, seed=8)
        check_rows(
            lambda o=o, **head: GRPOLoss(**o, **head),
            truth(o, advantages, per_token),
            advantages,
            mask=mask_BS,
            **per_token,
        )


@ranks(2)
def test_weights_of_samples():
    mask_BS, per_token = inputs(sampled=True)
    advantages, bounds = drawn(B, seed=8), dict(zip(("sampling_ratio_min", "sampling_ratio_max"), BOUNDS, strict=True))
    for kind in SAMPLED:
        level, truncation = grpo._CORRECTIONS[kind]
        drift = per_token["old_log_probs"], per_token["sampling_log_probs"], mask_BS * (rows()[0] != -100)
        outside = sampling_weights(*drift, level, truncation or "mask", *BOUNDS)[1]
        assert outside.any()
        assert not outside.all()
        check_rows(
            lambda kind=kind, **head: GRPOLoss(sampling_correction=kind, **bounds, **head),
            truth({}, advantages, per_token, kind),
            advantages,
            mask=mask_BS,
            **per_token,
        )


def test_without_options_of_the_head_logits_are_what_they_are():
    labels_BS, mask_BS, others = rows()
    hidden, weight = head()
    log_probs_BS = reference.log_probs(reference.logits(hidden, weight), labels_BS)
    advantages = drawn(B, seed=8)
    want, _ = GRPOLoss().from_log_probs(log_probs_BS, advantages, mask_BS * (labels_BS != -100), others["old"])
    found, _ = GRPOLoss()(hidden, weight, labels_BS, advantages, mask=mask_BS, old_log_probs=others["old"])
    torch.testing.assert_close(found, want)


def test_skipped_tokens_are_not_read():
    """Hidden states of NaN where the mask is 0 or the label does not count."""
    labels_BS, mask_BS, _ = rows()
    counted_BS = (mask_BS > 0) & (labels_BS != -100)
    results = []
    for skip in (False, True):
        hidden, weight = (x.requires_grad_() for x in head())
        read = hidden.masked_fill(~counted_BS.unsqueeze(-1), torch.nan) if skip else hidden
        loss, _ = GRPOLoss(skip_ignored=skip)(read, weight, labels_BS, drawn(B, S, seed=7), mask=mask_BS)
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
    _, mask_BS, others = rows()
    loss = GRPOLoss(loss_type=loss_type, max_completion_length=9)
    advantages = drawn(B, seed=8)
    whole, _ = loss.from_log_probs(others["ref"], advantages, mask_BS, others["old"])
    count = mask_BS.sum() if loss_type == "dapo" else B
    parts = [
        loss.from_log_probs(others["ref"][at], advantages[at], mask_BS[at], others["old"][at], count=count)[0]
        for at in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_what_stands_at_masked_tokens_does_not_matter():
    _, mask_BS, others = rows()
    names = ("old_log_probs", "reference_log_probs", "sampling_log_probs")
    loss = GRPOLoss(beta=0.3)
    clean = dict(zip(names, others.values(), strict=True))
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


@ranks(2)
def test_what_one_rank_is_given_wrong_is_refused_by_both():
    """It is told in the exchange of the head's call; the next call finds the ranks in step."""
    labels_BS, mask_BS, others = rows()
    hidden, weight_VD, own_fault = drawn(B, S, 5), drawn(12, 5), dist.get_rank() == 1
    at = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for layout, skip in (("replicated", False), ("sequence", False), ("replicated", True)):
        loss = GRPOLoss(tp_group=dist.group.WORLD, hidden_layout=layout, skip_ignored=skip)
        x = hidden[at] if layout == "sequence" else hidden
        good = {"advantages": drawn(B), "mask": mask_BS, "old_log_probs": others["old"]}
        for name, wrong, message in (
            ("advantages", drawn(3), r"advantages is \(3,\)"),
            ("mask", mask_BS[:, 1:], r"mask is \(4, 5\)"),
            ("old_log_probs", others["old"].t(), r"old_log_probs is \(6, 4\)"),
            ("count", -1.0, "count is -1.0"),
        ):
            if skip and name == "mask":  # the ranks would not agree on how many tokens there are
                continue
            given = good | ({name: wrong} if own_fault else {})
            with pytest.raises(ValueError, match=message if own_fault else "another rank of tp_group refused"):
                loss(x, weight_VD, labels_BS, given.pop("advantages"), **given)
        value, _ = loss(x, weight_VD, labels_BS, good.pop("advantages"), **good)
        assert value.isfinite()


@ranks(2)
def test_shapes_that_do_not_fit_are_refused():
    labels_BS, mask_BS, others = rows()
    hidden, weight_VD = drawn(B, S, 5), drawn(12, 5)
    for arguments, more, message in (
        ((labels_BS, drawn(3)), {}, r"advantages is \(3,\): it must be a tensor with a number for each of 4 rows"),
        ((labels_BS[0], drawn(B)), {}, "must be 2-D"),
        ((labels_BS, drawn(B)), {"mask": mask_BS[:, 1:]}, r"mask is \(4, 5\): it must be a tensor \(4, 6\)"),
        ((labels_BS, drawn(B)), {"old_log_probs": others["old"].t()}, r"old_log_probs is \(6, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            GRPOLoss()(hidden, weight_VD, *arguments, **more)
    with pytest.raises(ValueError, match="beta is 0.1 without reference_log_probs"):
        GRPOLoss(beta=0.1)(hidden, weight_VD, labels_BS, drawn(B))
