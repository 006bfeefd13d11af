"""Cases of policy losses from hidden states, against formulas on whole tensors.

Legend: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import losses, reference
from megatron_ext.head import LmHead
from tests.fuzz.case import Case
from tests.fuzz.cross_entropy import group, head, most_of_a_slice
from tests.fuzz.draw import Draw, Vocabulary


@dataclass
class Rows:
    """Inputs of a loss of log-probabilities, `[B, S]` each: labels, token weights, numbers of other policies."""

    labels: Tensor
    mask: Tensor | None
    others: dict[str, Tensor]
    advantages: Tensor

    @property
    def weights(self) -> Tensor:
        kept = (self.labels != -100).double()
        return kept if self.mask is None else kept * self.mask


def over(x: Tensor, count: Tensor) -> Tensor:
    """Return `x / count`, and 0 where `x` and `count` are 0."""
    return x / count.clamp(min=1e-8)


def row_means(x: Tensor, weights: Tensor) -> Tensor:
    return over((x * weights).sum(1), weights.sum(1))


# Each draws a loss's class and options; and gives the truth from log-probabilities, and the arguments of the call.
Made = tuple[type, dict[str, Any], Callable[[Tensor], Tensor], tuple, dict[str, Tensor]]


def _grpo(draw: Draw, rows: Rows) -> Made:
    kind = draw.one_of("loss_type", "dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo")
    o: dict[str, Any] = {"loss_type": kind} | draw.options(
        epsilon=(0.2, 0.05, 0.5),
        beta=(0.0, 0.3),
        kl_estimator=("k3", "k1", "k2"),
        kl_input_clamp=(None, 0.4),
        kl_output_clamp=(None, 0.05),
        use_bias_correction_kl=(False, True),
    )
    if kind != "sapo":
        o |= draw.options(epsilon_high=(None, 0.28, 1.5))
    if kind == "cispo" and o.get("epsilon_high") is None:
        o["epsilon_high"] = 0.28
    if kind == "dr_grpo":
        o["max_completion_length"] = 9
    if kind not in ("cispo", "sapo"):
        o |= draw.options(importance_sampling_level=("token", "sequence"), delta=(None, 1.3))
    if kind == "sapo":
        o |= draw.options(sapo_temperature_pos=(1.0, 0.6), sapo_temperature_neg=(1.05, 1.4))
    names, of_samples = ["old_log_probs", *(["reference_log_probs"] if o.get("beta") else [])], 1.0
    if draw.chance(0.7):
        names.append("sampling_log_probs")
        of_rows = ("sequence", "sequence_truncate", "sequence_mask", "sequence_mean_mask")
        o |= draw.options(
            sampling_correction=("token_truncate", "token", "token_mask", *of_rows),
            sampling_ratio_min=(None, 0.95),
            sampling_ratio_max=(3.0, 1.05),
        )
        of_samples = _sample_weights(o, rows)
    w, given = rows.weights, {name: rows.others[name] for name in names}
    advantages = rows.advantages if rows.advantages.dim() == 2 else rows.advantages[:, None]
    epsilon = o.get("epsilon", 0.2)
    high = o.get("epsilon_high", epsilon)

    def truth(log_probs: Tensor) -> Tensor:
        change = log_probs - rows.others["old_log_probs"]
        if o.get("importance_sampling_level") == "sequence":
            change = row_means(change, w)[:, None].expand_as(change)
        ratio = change.exp()
        if kind == "cispo":
            loss = -ratio.clamp(max=high).detach() * advantages * log_probs
        elif kind == "sapo":
            t = torch.where(advantages > 0, o.get("sapo_temperature_pos", 1.0), o.get("sapo_temperature_neg", 1.05))
            loss = -advantages * 4 / t * torch.sigmoid(t * (ratio - 1))
        else:
            first = ratio.clamp(max=o["delta"]) if "delta" in o else ratio
            loss = -torch.minimum(first * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)
        loss = loss * of_samples
        if o.get("beta"):
            d = rows.others["reference_log_probs"] - log_probs
            d = d.clamp(-0.4, 0.4) if "kl_input_clamp" in o else d
            kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[o.get("kl_estimator", "k3")]
            kl = kl.clamp(-0.05, 0.05) if "kl_output_clamp" in o else kl
            loss = loss + o["beta"] * kl * (ratio if "use_bias_correction_kl" in o else 1)
        if kind in ("grpo", "sapo"):
            return row_means(loss, w).mean()
        return over((loss * w).sum(), torch.tensor(len(w) * 9.0) if kind == "dr_grpo" else w.sum())

    return losses.GRPOLoss, o, truth, (rows.advantages,), given


def _sample_weights(o: dict[str, Any], rows: Rows) -> Tensor:
    """Return importance weights against the generator's log-probabilities, of each token or `[B, 1]` of each row."""
    apart, w = rows.others["old_log_probs"] - rows.others["sampling_log_probs"], rows.weights
    level, _, cut = o.get("sampling_correction", "token_truncate").partition("_")
    of_row = (apart * w).sum(1, keepdim=True)
    value = (apart if level == "token" or cut == "mean_mask" else of_row).exp()
    low, high = o.get("sampling_ratio_min", 0.0), o.get("sampling_ratio_max", 3.0)
    if cut == "truncate":
        return value.clamp(low, high)
    judged = over(of_row, w.sum(1, keepdim=True)).exp() if cut == "mean_mask" else value
    return value.where((low <= judged) & (judged <= high), 0.0) if cut else value


def _pairs(x: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return (x[0::2], x[1::2]) if o.get("pairs") == "interleaved" else tuple(x.chunk(2))  # type: ignore[return-value]


def _preference(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _of_pairs(losses_P: Tensor, log_probs: Tensor, rows: Rows, o: dict[str, Any], sft: float) -> Tensor:
    w = rows.weights
    some = torch.stack(_pairs((w > 0).any(1), o)).all(0)
    chosen = over((_pairs(log_probs, o)[0] * _pairs(w, o)[0]).sum(), _pairs(w, o)[0].sum())
    return over(losses_P.where(some, 0.0).sum(), some.sum()) - sft * chosen


def _pair_loss(draw: Draw, rows: Rows) -> Made:
    cls = draw.one_of("loss", losses.DPOLoss, losses.DPOLoss, losses.SimPOLoss, losses.ORPOLoss)
    o: dict[str, Any] = draw.options(pairs=("halves", "interleaved"), beta=(0.1, 0.7), sft_weight=(None, 0.4, 0.0))
    given = {}
    if cls is losses.DPOLoss:
        o |= draw.options(loss_type=("sigmoid", "hinge", "ipo"), average_log_prob=(False, True))
        if draw.chance(0.3):
            o["reference_free"] = True
        else:
            given = {"reference_log_probs": rows.others["reference_log_probs"]}
    if cls is losses.SimPOLoss:
        o |= draw.options(gamma=(0.5, 1.3))
    if o.get("loss_type", "sigmoid") == "sigmoid":
        o |= draw.options(label_smoothing=(0.0, 0.2))
    w, beta, smoothing = rows.weights, o.get("beta", 0.1), o.get("label_smoothing", 0.0)

    def truth(log_probs: Tensor) -> Tensor:
        sft = o.get("sft_weight", 1.0 if cls is losses.ORPOLoss else 0.0)
        if cls is losses.DPOLoss:
            apart = log_probs if o.get("reference_free") else log_probs - rows.others["reference_log_probs"]
            average = o.get("average_log_prob") or o.get("loss_type") == "ipo"
            c, r = _pairs(row_means(apart, w) if average else (apart * w).sum(1), o)
            found = {
                "sigmoid": lambda: _preference(beta * (c - r), smoothing),
                "hinge": lambda: (1 - beta * (c - r)).clamp(min=0),
                "ipo": lambda: (c - r - 1 / (2 * beta)) ** 2,
            }[o.get("loss_type", "sigmoid")]()
        elif cls is losses.SimPOLoss:
            c, r = _pairs(row_means(log_probs, w), o)
            found = _preference(beta * (c - r) - o.get("gamma", 0.5), smoothing)
        else:
            means = row_means(log_probs, w).where((w > 0).any(1), -1.0)
            c, r = _pairs(means - torch.log(-torch.expm1(means)), o)
            found = beta * _preference(c - r, smoothing)
        return _of_pairs(found, log_probs, rows, o, sft)

    return cls, o, truth, (), given


def magnified(log_probs: Tensor, weights: Tensor) -> float:
    """Return the largest factor by which the error of a row's mean log-probability grows in its log odds, 1 / (1 - p).

    The factor is the derivative of `log(p / (1 - p))` by `log p`: where p is nearly 1, no algorithm keeps more digits.
    """
    means = row_means(log_probs, weights)[(weights > 0).any(1)]
    return max((1 / -torch.expm1(means).clamp(max=-torch.finfo(means.dtype).tiny)).tolist(), default=1.0)


def _kto(draw: Draw, rows: Rows) -> Made:
    o: dict[str, Any] = draw.options(
        beta=(0.1, 0.7),
        desirable_weight=(1.0, 1.5),
        undesirable_weight=(1.0, 0.3),
        average_log_prob=(False, True),
    )
    desirable = torch.randint(0, 2, rows.labels.shape[:1], generator=draw.generator).bool()
    kl = draw.one_of("kl", 0.0, 0.4)
    given = {
        "reference_log_probs": rows.others["reference_log_probs"],
        "kl": torch.tensor(kl, dtype=torch.float64),
    }
    w = rows.weights

    def truth(log_probs: Tensor) -> Tensor:
        apart = log_probs - rows.others["reference_log_probs"]
        x = row_means(apart, w) if o.get("average_log_prob") else (apart * w).sum(1)
        factors = torch.where(desirable, o.get("desirable_weight", 1.0), o.get("undesirable_weight", 1.0))
        found = factors * (1 - torch.sigmoid(o.get("beta", 0.1) * (x - kl) * torch.where(desirable, 1.0, -1.0)))
        some = (w > 0).any(1)
        return over(found.where(some, 0.0).sum(), some.sum())

    return losses.KTOLoss, o, truth, (desirable,), given


def _rows(draw: Draw, vocabulary: Vocabulary, log_probs: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> Rows:
    labels = draw.ids(shape, vocabulary.size).long()
    ignored = torch.rand(shape, generator=draw.generator) < draw.one_of("ignored", 0.0, 0.3, 1.0)
    labels = labels.masked_fill(ignored, -100)
    mask = torch.randint(0, 2, shape, generator=draw.generator).double() if draw.chance(0.6) else None
    own = log_probs(labels)
    names = ("old_log_probs", "reference_log_probs", "sampling_log_probs")
    others = {n: own + 0.3 * torch.randn(shape, generator=draw.generator).double() for n in names}
    per_row = draw.one_of("advantages", True, False)
    advantages = torch.randn(shape[:1] if per_row else shape, generator=draw.generator).double()
    return Rows(labels, mask, others, advantages)


def of_policies(draw: Draw) -> Case:
    """Draw a case of GRPO and its variants, DPO, SimPO, ORPO or KTO, in fp64, so that no rounding carries a ratio over
    its bound."""
    sequence_first = draw.one_of("sequence_first", False, True)
    layout = draw.one_of("layout", "replicated", "sequence")
    rows_count, positions = 2 * draw.integer(1, 2), draw.integer(1, 5)
    if layout == "sequence":
        rows_count, positions = (rows_count, positions * draw.ranks) if sequence_first else (2 * draw.ranks, positions)
    shape = (rows_count, positions)
    draw.record["shape"] = shape
    vocabulary = draw.vocabulary(least=2)
    lead = shape[::-1] if sequence_first else shape
    inputs, largest = head(draw, vocabulary, torch.float64, layout, lead)
    bend = draw.options(softcap=(None, 5.0), temperature=(1.0, 0.7))

    def log_probs(labels: Tensor, x: Tensor = inputs[0][0], w: Tensor = inputs[1][0]) -> Tensor:
        z = reference.logits(x, w, **bend)
        return reference.log_probs(z.transpose(0, 1) if sequence_first else z, labels, vocabulary.size)

    def laid(x: Any) -> Any:
        return x.t() if sequence_first and isinstance(x, Tensor) and x.dim() == 2 else x

    rows = _rows(draw, vocabulary, log_probs, shape)
    kind = draw.random.choice([_grpo, _grpo, _pair_loss, _pair_loss, _kto])
    cls, options, of_log_probs, given, named = kind(draw, rows)

    slices = draw.ranks if layout == "sequence" else 1
    bound = most_of_a_slice(laid(rows.weights) > 0, slices) + draw.integer(0, 2)
    skip = draw.options(skip_ignored=(False, True, bound))
    keep = draw.options(cache=("bounded", 0, 0.3, 1, 5000, "auto"))
    in_chunks = draw.options(chunk_tokens=(None, 1, 2, 3, 7))

    odds = magnified(log_probs(rows.labels), rows.weights) if cls is losses.ORPOLoss else 1.0

    by_head = "softcap" in bend or draw.one_of("by LmHead", False, True)

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        facts = {"tp_group": group(draw), "hidden_layout": layout, "vocab": vocabulary.argument(rank)}
        facts |= bend | in_chunks
        x, w = mine
        weight = LmHead(w, **facts, **keep) if by_head else w
        options_of_loss = {"sequence_first": sequence_first, **skip, **options, **({} if by_head else facts | keep)}
        others = {name: laid(x) for name, x in named.items()}
        mask = None if rows.mask is None else laid(rows.mask)
        loss, metrics = cls(**options_of_loss)(x, weight, laid(rows.labels), *map(laid, given), mask=mask, **others)
        assert not any(metric.requires_grad for metric in metrics.values()), "a metric has a gradient"
        return [loss]

    return Case(
        f"{cls.__name__} {options}",
        inputs,
        lambda x, w: [of_log_probs(log_probs(rows.labels, x, w))],
        ours,
        [draw.upstream()],
        logit_size=64.0 * (largest + 1) ** 2 * odds,
        grad_size=64.0 * (largest + 1),
    )
