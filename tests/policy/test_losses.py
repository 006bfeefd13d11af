"""Losses against their formulas, row by row in plain Python, and parts that add up."""

import math
from unittest.mock import Mock

import pytest
import torch

from megatron_ext.policy import ClippedPGLoss, DistillationLossFn, DPOLossFn, NLLLoss
from megatron_ext.policy.config import read_config
from megatron_ext.policy.worker.trainer import Trainer
from tests.policy.problems import VOCAB, counts_for, tiny_batch, tiny_config


def problem(rows=6, seed=1):
    data = tiny_batch(rows, seed=seed)
    log_probs = data["prev_logprobs"] + 0.3 * torch.randn(data["prev_logprobs"].shape)
    return log_probs.double().requires_grad_(), data


def whole_loss(loss_fn, log_probs, data):
    return loss_fn(log_probs, data, *counts_for(loss_fn, data))[0]


def counting_tokens(data):
    """Yields each row that counts, and the positions of its tokens that count."""
    for b in range(data.size):
        if data["sample_mask"][b]:
            yield b, [t for t in range(1, data["input_ids"].shape[1]) if data["token_mask"][b, t]]


def test_nll():
    log_probs, data = problem()
    found = [-log_probs[b, t].item() for b, places in counting_tokens(data) for t in places]
    assert whole_loss(NLLLoss(), log_probs, data).item() == pytest.approx(sum(found) / len(found), rel=1e-6)


def bounded(x, low, high):
    return min(max(x, low), high)


def sampling_weight(drift, place, o):
    """Importance weight of the token at `place`; `drift` are its row's differences of log-probabilities."""
    weight = math.exp(sum(drift) if o.sequence_level_importance_ratios else drift[place])
    kind, low = o.truncated_importance_sampling_type, o.truncated_importance_sampling_ratio_min or 0.0
    if kind is None:
        return weight
    high = o.truncated_importance_sampling_ratio
    if kind == "tis":
        return bounded(weight, low, high)
    judged = weight if kind == "icepop" else math.exp(sum(drift) / len(drift))
    return weight if low <= judged <= high else 0.0


def clipped_pg(row, prev, generation, reference, advantages, o):
    """Losses of a row's tokens."""
    found = []
    for t, (log_prob, advantage) in enumerate(zip(row, advantages, strict=True)):
        change = [a - b for a, b in zip(row, prev, strict=True)]
        ratio = math.exp(sum(change) / len(change) if o.sequence_level_importance_ratios else change[t])
        clipped = bounded(ratio, 1 - o.ratio_clip_min, 1 + o.ratio_clip_max)
        if o.force_on_policy_ratio:
            ratio = clipped = 1.0
        if o.disable_ppo_ratio:
            ratio = clipped = log_prob
        loss = max(-advantage * ratio, -advantage * clipped)
        if o.use_cispo:
            loss = -clipped * advantage * log_prob
        if o.ratio_clip_c is not None and advantage < 0:
            loss = min(loss, -advantage * o.ratio_clip_c)
        if o.use_importance_sampling_correction:
            drift = [a - b for a, b in zip(row if o.force_on_policy_ratio else prev, generation, strict=True)]
            loss *= sampling_weight(drift, t, o)
        d = bounded(reference[t] - log_prob, -o.kl_input_clamp_value, o.kl_input_clamp_value)
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[o.reference_policy_kl_type]
        kl *= math.exp(log_prob - generation[t]) if o.use_on_policy_kl_approximation else 1.0
        kl = bounded(kl, -o.kl_output_clamp_value, o.kl_output_clamp_value)
        found.append(loss + (0 if o.use_kl_in_reward else o.reference_policy_kl_penalty * kl))
    return found


@pytest.mark.parametrize(
    "loss_fn",
    [
        ClippedPGLoss(),
        ClippedPGLoss(reference_policy_kl_penalty=0.3, ratio_clip_min=0.1, ratio_clip_max=0.3, ratio_clip_c=1.2),
        ClippedPGLoss(0.1, token_level_loss=False, use_importance_sampling_correction=True),
        ClippedPGLoss(0.3, kl_input_clamp_value=0.2, kl_output_clamp_value=0.01, reference_policy_kl_type="k2"),
        ClippedPGLoss(0.3, reference_policy_kl_type="k1", use_on_policy_kl_approximation=True, use_cispo=True),
        ClippedPGLoss(0.3, use_kl_in_reward=True, disable_ppo_ratio=True),
        ClippedPGLoss(force_on_policy_ratio=True, use_importance_sampling_correction=True),
        ClippedPGLoss(ratio_clip_max=0.05, token_level_loss=False, sequence_level_importance_ratios=True),
        *(
            ClippedPGLoss(
                use_importance_sampling_correction=True,
                truncated_importance_sampling_type=kind,
                truncated_importance_sampling_ratio=1.1,
                truncated_importance_sampling_ratio_min=0.9,
                sequence_level_importance_ratios=by_row,
                token_level_loss=not by_row,
            )
            for kind, by_row in (("tis", False), ("tis", True), ("icepop", False), ("seq-mask-tis", False))
        ),
    ],
    ids=str,
)
def test_clipped_policy_gradient(loss_fn):
    log_probs, data = problem()
    keys = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
    rows = [
        clipped_pg(log_probs[b, places].tolist(), *(data[key][b, places].tolist() for key in keys), loss_fn)
        for b, places in counting_tokens(data)
    ]
    if loss_fn.token_level_loss:
        wanted = sum(map(sum, rows)) / sum(map(len, rows))
    else:
        wanted = sum(sum(row) / len(row) for row in rows if row) / len(rows)
    assert whole_loss(loss_fn, log_probs, data).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("change, which", [(0.1, "min"), (-0.1, "max")])
def test_extremes_of_ratios_leave_masked_tokens_out(change, which):
    log_probs, data = problem()
    data["prev_logprobs"] = log_probs.detach() - change
    metrics = ClippedPGLoss()(log_probs, data, *counts_for(ClippedPGLoss(), data))[1]
    for name in ("probs_ratio", "probs_ratio_clamped"):
        assert metrics[f"{name}_{which}"].item() == pytest.approx(math.exp(change))


@pytest.mark.parametrize("average", [False, True])
def test_dpo(average):
    log_probs, data = problem()
    loss_fn = DPOLossFn(0.2, 1.5, 0.4, preference_average_log_probs=average, sft_average_log_probs=average)
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


@pytest.mark.parametrize("loss_fn", [NLLLoss(), ClippedPGLoss(0.1), ClippedPGLoss(token_level_loss=False), DPOLossFn()])
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


@pytest.mark.parametrize("loss_fn", [NLLLoss(), ClippedPGLoss(0.1), DPOLossFn()])
def test_nothing_that_counts_is_zero(loss_fn):
    log_probs, data = problem()
    data["sample_mask"].zero_()
    loss = whole_loss(loss_fn, log_probs, data)
    assert loss == 0
    assert (torch.autograd.grad(loss, log_probs)[0] == 0).all()


TRUNCATED = {"truncated_importance_sampling_type": "icepop", "use_importance_sampling_correction": True}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio_clip_min": -0.1},
        {"ratio_clip_c": 1.0},
        {"reference_policy_kl_penalty": -1},
        {"reference_policy_kl_penalty": math.nan},
        {"ratio_clip_max": None},
        {"kl_input_clamp_value": 0},
        {"kl_input_clamp_value": -20.0},
        {"kl_output_clamp_value": math.nan},
        {"positive_example_nll_weight": -0.5},
        {"truncated_importance_sampling_ratio_min": 0.5},
        {"truncated_importance_sampling_ratio": "2", **TRUNCATED},
        {"truncated_importance_sampling_ratio_min": -1.0, "truncated_importance_sampling_ratio": 2.0, **TRUNCATED},
        {"reference_policy_kl_type": "k4"},
        {"sequence_level_importance_ratios": True},
        {"use_cispo": True, "ratio_clip_c": 3.0},
        {"use_cispo": True, "token_level_loss": False},
        {"truncated_importance_sampling_type": "clip"},
        {
            **TRUNCATED,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 0.5,
            "token_level_loss": False,
            "sequence_level_importance_ratios": True,
        },
        {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
        {"truncated_importance_sampling_ratio": 2.0},
        TRUNCATED,
        {"truncated_importance_sampling_ratio": 2.0, **TRUNCATED},
        {"truncated_importance_sampling_ratio_min": 3.0, "truncated_importance_sampling_ratio": 2.0, **TRUNCATED},
    ],
    ids=str,
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClippedPGLoss(**wrong)


def test_positive_examples():
    """The loss has another term: the mean over this micro-batch's tokens in rows with a positive reward."""
    log_probs, data = problem()
    data["rewards"] = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.0, 3.0])
    rows = dict(counting_tokens(data))
    own = [-log_probs[b, t].item() for b in (0, 2, 5) for t in rows.get(b, [])]
    loss_fn = ClippedPGLoss(positive_example_nll_weight=0.5)
    found, metrics = loss_fn(log_probs, data, *counts_for(loss_fn, data))
    want = whole_loss(ClippedPGLoss(), log_probs, data) + 0.5 * sum(own) / len(own)
    assert found.item() == pytest.approx(want.item(), rel=1e-6)
    assert metrics["positive_nll_loss"].item() == pytest.approx(sum(own) / len(own), rel=1e-6)
    assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("name", ["advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
def test_shapes_that_would_be_broadcast_are_refused(name):
    log_probs, data = problem()
    for wrong in (data[name][:, :1], data[name][:, 0], data[name][:1]):
        with pytest.raises(ValueError, match=rf"{name} is \(.*: it must be a tensor \(6, "):
            whole_loss(ClippedPGLoss(0.1), log_probs, {**data, name: wrong})


def test_positive_examples_are_refused_in_a_step_of_parts():
    backend = Mock(settings=read_config(tiny_config()), vocabulary=VOCAB, places_multiple=1)
    trainer = Trainer(backend, init_optimizer=False)
    trainer.optimizer = Mock()
    with pytest.raises(ValueError, match="positive_example_nll_weight is 0.5: .* use train"):
        trainer.begin_train_step(ClippedPGLoss(positive_example_nll_weight=0.5))
    backend.zero_grad.assert_not_called()
    for loss_fn in (ClippedPGLoss(), lambda *_: None):
        trainer.begin_train_step(loss_fn)
        assert trainer.open_step.loss_fn is loss_fn
        trainer.abort_train_step()


def test_metrics_of_a_generator_that_differs():
    log_probs, data = problem()
    _, metrics = ClippedPGLoss()(log_probs, data, *counts_for(ClippedPGLoss(), data))
    pairs = [
        (data["prev_logprobs"][b, t].item(), data["generation_logprobs"][b, t].item(), log_probs[b, t].item())
        for b, places in counting_tokens(data)
        for t in places
    ]

    def mean(of):
        return sum(of(*pair) for pair in pairs) / len(pairs)

    def k3(d):
        return math.exp(d) - d - 1

    def halves(prev, drawn, _):
        mixture = math.log((math.exp(prev) + math.exp(drawn)) / 2)
        return (k3(prev - mixture) + k3(drawn - mixture)) / 2

    wanted = {
        "token_mult_prob_error": mean(lambda prev, drawn, _: math.exp(abs(prev - drawn))),
        "gen_kl_error": mean(lambda prev, drawn, _: k3(prev - drawn)),
        "policy_kl_error": mean(lambda prev, drawn, _: k3(drawn - prev)),
        "js_divergence_error": mean(halves),
        "approx_entropy": -mean(lambda _, drawn, own: math.exp(own - drawn) * own),
        "sampling_importance_ratio": mean(lambda prev, drawn, _: math.exp(prev - drawn)),
        "probs_ratio_max": max(math.exp(own - prev) for prev, _, own in pairs),
        "probs_ratio_clamped_min": min(bounded(math.exp(own - prev), 0.8, 1.2) for prev, _, own in pairs),
    }
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4), name


def test_share_of_weights_outside_their_bounds_is_a_metric():
    log_probs, data = problem()
    loss_fn = ClippedPGLoss(
        **TRUNCATED | {"truncated_importance_sampling_ratio_min": 0.9}, truncated_importance_sampling_ratio=1.1
    )
    _, metrics = loss_fn(log_probs, data, *counts_for(loss_fn, data))
    drift = [(data["prev_logprobs"] - data["generation_logprobs"])[b, places] for b, places in counting_tokens(data)]
    weights = torch.cat(drift).exp()
    outside = (weights < 0.9) | (weights > 1.1)
    assert 0 < outside.sum() < outside.numel()
    assert metrics["is_oob_ratio"].item() == pytest.approx(outside.float().mean().item())


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
@pytest.mark.parametrize(
    "loss_fn",
    [
        ClippedPGLoss(reference_policy_kl_penalty=0.3, ratio_clip_c=2.0, use_importance_sampling_correction=True),
        DPOLossFn(),
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


class _Extra:
    """Stands for a pydantic model that allows keys beside its fields, such as NeMo-RL's `ClippedPGLossConfig`."""

    __slots__ = ("__dict__", "__pydantic_extra__")

    def __init__(self):
        self.ratio_clip_min, self.__pydantic_extra__ = 0.3, {"ratio_clip_mx": 0.4}


@pytest.mark.parametrize("config", [{"ratio_clip_min": 0.3, "ratio_clip_mx": 0.4}, _Extra()])
def test_a_key_of_the_configuration_that_is_not_known_is_refused(config):
    assert ClippedPGLoss.from_config({"ratio_clip_min": 0.3}) == ClippedPGLoss(0.01, 0.3)
    with pytest.raises(ValueError, match=r"has 'ratio_clip_mx': ClippedPGLoss knows .*ratio_clip_max.*correct"):
        ClippedPGLoss.from_config(config)


@pytest.mark.parametrize(
    "nested, said",
    [
        ({"loss_fn": {"ratio_clip_min": 0.3}}, "the loss_fn configuration has 'loss_fn'"),
        ({"ratio_clip_min": {"value": 0.3}}, "ratio_clip_min is {'value': 0.3}: it must be"),
        ({"ratio_clip_c": {}}, "ratio_clip_c is {}: it must be"),
        ({"use_cispo": {"enabled": False}}, "use_cispo is {'enabled': False}: it must be True or False"),
        ({"token_level_loss": "false"}, "token_level_loss is 'false': it must be True or False"),
    ],
)
def test_a_configuration_inside_another_is_refused(nested, said):
    """Options nested under a key would not be read."""
    with pytest.raises(ValueError, match=said):
        ClippedPGLoss.from_config(nested)


@pytest.mark.parametrize("key", ["ratio_clip_min", "ratio_clip_c", "reference_policy_kl_penalty"])
@pytest.mark.parametrize(
    "text, fix",
    [("3e-4", "write 3.0e-4: without its dot"), ("2.5e3", r"write 2\.5e\+3:"), ("0.5", "write 0.5 without quotes")],
)
def test_number_that_yaml_reads_as_text_is_refused_with_advice(key, text, fix):
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(f"{key}: {text if 'e' in text else repr(text)}")
    assert config == {key: text}
    with pytest.raises(ValueError, match=f"{key} is '{text}': it must be .*; {fix}"):
        ClippedPGLoss.from_config(config)


def test_metrics_keep_no_graph():
    log_probs, data = problem(4)
    top = torch.full((4, data["input_ids"].shape[1] - 1, 3), 0.2).log().requires_grad_()
    for loss_fn, given in ((NLLLoss(), (log_probs,)), (DistillationLossFn(), (top, top.detach(), top[..., 0]))):
        loss, metrics = loss_fn(*given, data, *counts_for(loss_fn, data))
        assert loss.requires_grad
        assert not any(getattr(value, "requires_grad", False) for value in metrics.values())


def test_repeated_ids_are_refused_where_a_rest_is_computed():
    """Only tokens that count are checked: NeMo-RL's post-processor gives tokens behind a row's end k ids of 0."""
    _, data = problem()
    rows, positions = data["input_ids"].shape
    ids = torch.arange(3).expand(rows, positions, 3).clone()
    outside = ((data["token_mask"] * data["sample_mask"][:, None]) == 0).roll(-1, 1)
    outside[:, -1] = True
    ids[outside] = 0
    log_probs = torch.full((rows, positions - 1, 3), 0.2).log()
    given = log_probs, log_probs, torch.zeros(rows, positions - 1)

    def loss(ids, **options):
        counts = counts_for(DistillationLossFn(), data)
        return DistillationLossFn(**options)(*given, dict(data, teacher_topk_indices=ids), *counts)[0]

    assert loss(ids, zero_outside_topk=True).isfinite()
    ids[tuple((~outside).nonzero()[0])] = 2
    with pytest.raises(ValueError, match="teacher_topk_indices has an id twice for a token that counts"):
        loss(ids, zero_outside_topk=True)
    loss(ids)
