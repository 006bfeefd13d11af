"""DPO, SimPO, ORPO and KTO: edges, metrics, what is refused. Their values and gradients: `tests.fuzz.losses`."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.losses import DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from tests.fuzz.losses import magnified
from tests.losses.problems import S, drawn

LOSSES = [
    DPOLoss(beta=0.3, reference_free=True),
    DPOLoss(loss_type="ipo", reference_free=True),
    SimPOLoss(),
    ORPOLoss(sft_weight=0),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{type(loss).__name__} {getattr(loss, 'loss_type', '')}")
def test_a_pair_without_tokens_does_not_count_and_parts_add_up(loss):
    log_probs = (drawn(6, S) - 3).requires_grad_()
    mask = torch.ones(6, S)
    mask[1] = 0
    found, metrics = loss.from_log_probs(log_probs, mask)
    own = torch.tensor([0, 2, 3, 5])
    want, want_metrics = loss.from_log_probs(log_probs[own], mask[own])
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(metrics, want_metrics)
    grad = torch.autograd.grad(found, log_probs)[0]
    assert (grad[[1, 4]] == 0).all()
    parts = [loss.from_log_probs(log_probs[[i, i + 3]], mask[[i, i + 3]], count=2)[0] for i in range(3)]
    torch.testing.assert_close(sum(parts), found)


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("kind", [DPOLoss, SimPOLoss, ORPOLoss])
def test_parts_with_a_likelihood_add_up(kind, pairs):
    loss = kind(sft_weight=0.7, pairs=pairs, **({"reference_free": True} if kind is DPOLoss else {}))
    log_probs = (drawn(6, S) - 3).requires_grad_()
    mask = torch.ones(6, S)
    mask[0, 2:] = mask[4, 1:] = 0
    whole, whole_metrics = loss.from_log_probs(log_probs, mask)
    places = [[2 * i, 2 * i + 1] if pairs == "interleaved" else [i, i + 3] for i in range(3)]
    chosen = [chosen for chosen, _ in places]
    counts = {"count": 3, "sft_count": mask[chosen].sum()}
    parts = [loss.from_log_probs(log_probs[at], mask[at], **counts) for at in places]
    total = sum(part for part, _ in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, log_probs)[0] for x in (total, whole)))
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value)
    for given, missing in (("count", "sft_count"), ("sft_count", "count")):
        with pytest.raises(ValueError, match=f"{given} without {missing} with sft_weight 0.7"):
            loss.from_log_probs(log_probs, mask, **{given: counts[given]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_certain_rows_are_finite(dtype):
    """A row of log-probabilities 0, beside another one, and a pair of such."""
    log_probs = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-1.0, -2.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    for own in ([0, 2], [2, 0], [1, 3], [0, 1, 2, 3]):
        loss, metrics = ORPOLoss().from_log_probs(log_probs[own])
        assert torch.stack([loss, *metrics.values()]).isfinite().all()
        assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


@pytest.mark.parametrize(
    "loss, given, others",
    [
        (DPOLoss(sft_weight=0.5), (), ["reference_log_probs"]),
        (SimPOLoss(), (), []),
        (ORPOLoss(), (), []),
        (KTOLoss(), (torch.tensor([True, False, True, False]),), ["reference_log_probs"]),
        (GRPOLoss(beta=0.1), (torch.ones(4),), ["reference_log_probs", "old_log_probs", "sampling_log_probs"]),
    ],
    ids=lambda x: type(x).__name__ if hasattr(x, "tp_group") else "",
)
def test_16_bit_log_probabilities_are_added_up_in_fp32(loss, given, others):
    def values(seed):
        return (drawn(4, 300, scale=0.05, seed=seed) - 1).bfloat16()

    per_token = {name: values(seed) for seed, name in enumerate(others, 1)} | {"mask": torch.ones(4, 300).bfloat16()}
    found, metrics = loss.from_log_probs(values(0), *given, **per_token)
    wide = {name: x.float() for name, x in per_token.items()}
    want, want_metrics = loss.from_log_probs(values(0).float(), *given, **wide)
    assert found == want
    assert metrics == want_metrics


def test_metrics():
    log_probs = torch.tensor([[-1.0, -1.0], [-4.0, -2.0], [-3.0, -2.0], [-1.0, -1.0]])
    _, metrics = DPOLoss(beta=0.5, reference_free=True).from_log_probs(log_probs)
    wanted = {"rewards_chosen": -2.0, "rewards_rejected": -1.75, "accuracy": 0.5}
    assert {name: x.item() for name, x in metrics.items()} == wanted
    _, metrics = KTOLoss(beta=0.5, reference_free=True).from_log_probs(
        log_probs, torch.tensor([True, False, False, True])
    )
    assert {name: x.item() for name, x in metrics.items()} == {"rewards_chosen": -1.0, "rewards_rejected": -2.75}


def test_a_reference_that_was_forgotten():
    """A loss without a reference is another loss, which has to be asked for."""
    log_probs, reference_log_probs = drawn(4, S), drawn(4, S, seed=1)
    desirable = torch.tensor([True, False, True, False])
    for kind, given in ((DPOLoss, ()), (KTOLoss, (desirable,))):
        with pytest.raises(ValueError, match="reference_log_probs is None: .* or set reference_free=True"):
            kind().from_log_probs(log_probs, *given)
        with pytest.raises(ValueError, match="reference_log_probs is None"):
            kind()(drawn(4, S, 3), drawn(9, 3), torch.zeros(4, S).long(), *given)
        with pytest.raises(ValueError, match="reference_log_probs are given with reference_free=True"):
            kind(reference_free=True).from_log_probs(log_probs, *given, reference_log_probs=reference_log_probs)
        found = kind(reference_free=True).from_log_probs(log_probs, *given)
        want = kind().from_log_probs(log_probs, *given, reference_log_probs=torch.zeros(4, S))
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (DPOLoss, {"beta": "0.1"}),
        (DPOLoss, {"beta": 0}),
        (DPOLoss, {"sft_weight": None}),
        (DPOLoss, {"label_smoothing": torch.nan}),
        (DPOLoss, {"pairs": "alternating"}),
        (SimPOLoss, {"beta": 0.0}),
        (SimPOLoss, {"gamma": "half"}),
        (SimPOLoss, {"gamma": torch.nan}),
        (ORPOLoss, {"beta": -1.0}),
        (ORPOLoss, {"beta": True}),
        (KTOLoss, {"beta": 0}),
        (KTOLoss, {"desirable_weight": -0.5}),
        (KTOLoss, {"undesirable_weight": None}),
    ],
    ids=str,
)
def test_values_that_cannot_be(kind, wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}: it must be"):
        kind(**wrong)


def test_label_smoothing_is_of_the_sigmoid():
    with pytest.raises(ValueError, match="only 'sigmoid' has it"):
        DPOLoss(label_smoothing=0.1, loss_type="ipo")


def test_a_count_below_0_is_refused():
    log_probs = drawn(4, S) - 3
    for count in (-1, -0.5, float("nan")):
        with pytest.raises(ValueError, match=f"count is {count}: it must be at least 0"):
            DPOLoss(reference_free=True).from_log_probs(log_probs, count=count)
    assert DPOLoss(reference_free=True).from_log_probs(log_probs, torch.zeros(4, S), count=0)[0] == 0


def test_counts_and_kl_of_several_numbers_are_refused():
    log_probs, desirable = drawn(4, S) - 3, torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"count has shape \(4,\): it must be one number for all rows"):
        DPOLoss(reference_free=True).from_log_probs(log_probs, count=torch.ones(4))
    loss = KTOLoss(reference_free=True)
    with pytest.raises(ValueError, match=r"kl has shape \(4, 1\): it must be one number for all rows"):
        loss.from_log_probs(log_probs, desirable, kl=torch.ones(4, 1))
    found = loss.from_log_probs(log_probs, desirable, kl=torch.ones(1))
    torch.testing.assert_close(found, loss.from_log_probs(log_probs, desirable, kl=1.0))


@pytest.mark.parametrize("kl", [-0.7, torch.tensor(-0.7)])
def test_a_mean_below_0_is_no_divergence(kl):
    log_probs, desirable = -torch.rand(4, 3), torch.tensor([True, False, True, False])
    loss = KTOLoss(beta=1.0, reference_free=True)
    torch.testing.assert_close(
        loss.from_log_probs(log_probs, desirable, kl=kl), loss.from_log_probs(log_probs, desirable)
    )


@pytest.mark.parametrize("logit", [2.0, 10.0, 20.0, 30.0])
def test_odds_near_certainty_lose_digits_as_derived(logit):
    """The first of two tokens with logits x and 0 has log odds x: off by a rounding of log p over 1 - p, no more."""
    x = torch.tensor([[[logit]], [[1.0]]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    labels = torch.zeros(2, 1, dtype=torch.int64)
    loss = ORPOLoss(beta=1.0, sft_weight=0.0)(x, weight, labels)[0]
    loss.backward()
    true_x = x.detach().clone().requires_grad_()
    true = F.logsigmoid(true_x[0].sum() - true_x[1].sum()).neg()
    true.backward()
    factor = magnified(F.logsigmoid(x.detach()).squeeze(-1), torch.ones(2, 1))
    assert factor == pytest.approx(1 + math.exp(logit), rel=1e-2)
    allowed = 4 * torch.finfo(torch.float64).eps * factor
    assert abs(loss - true) <= allowed * max(true.item(), torch.sigmoid(torch.tensor(1 - logit)).item())
    assert (x.grad - true_x.grad).abs().max() <= allowed * true_x.grad.abs().max()
