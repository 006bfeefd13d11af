"""Faults of arguments: raised before any message where every rank sees them, else in the exchange of the call."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head import LmHead
from megatron_ext.losses import DistillationLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss, TopKDistillationLoss
from tests.ranks import ranks

B, S, D, V, K = 4, 3, 5, 24, 2

# Of any loss: options and arguments that differ from good ones, and what is said of them. The head says some of it.
OF_ALL = [
    ({"weight": None}, "weight is NoneType: it must be a tensor"),
    ({"weight": torch.nn.Linear(2, 2)}, r"weight is Linear: .*; of a layer pass LmHead\.of\(layer\)"),
    ({"hidden": torch.zeros(B, S, D).long()}, "hidden is torch.int64"),
    ({"mask": [1.0]}, "mask is list: it must be a tensor"),
    ({"count": "4"}, "count is '4': it must be a number or a tensor"),
    ({"temperature": 0.0}, "temperature is 0.0"),
    ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ({"hidden_layout": "sliced"}, "hidden_layout is 'sliced'"),
    ({"vocab": (0, 12)}, r"vocab is \(0, 12\)"),
]
OF_LABELS = [
    ({"labels": [[1]]}, "labels is list: it must be a tensor"),
    ({"labels": torch.zeros(B).long()}, "must be 2-D"),
    ({"labels": torch.zeros(B, S)}, "labels is torch.float32"),
    ({"cache": -1}, "cache is -1"),
]
OF_PAIRS = [({"labels": torch.zeros(B - 1, S).long()}, "3 rows: they come in pairs")]
OF_REFERENCE = [({"reference_log_probs": 0.0}, "reference_log_probs is float: it must be a tensor")]
OF_EACH = {
    GRPOLoss(beta=0.1): [
        *OF_LABELS,
        *OF_REFERENCE,
        ({"reference_log_probs": None}, "beta is 0.1 without reference_log_probs"),
        ({"advantages": [1.0] * B}, "advantages is list: it must be a tensor"),
        ({"old_log_probs": 0.0}, "old_log_probs is float: it must be a tensor"),
    ],
    DPOLoss(sft_weight=0.5): [
        *OF_LABELS,
        *OF_PAIRS,
        *OF_REFERENCE,
        ({"sft_count": None}, "count without sft_count"),
        ({"sft_count": "4"}, "sft_count is '4'"),
    ],
    SimPOLoss(): [*OF_LABELS, *OF_PAIRS],
    ORPOLoss(): [*OF_LABELS, *OF_PAIRS],
    KTOLoss(): [
        *OF_LABELS,
        *OF_REFERENCE,
        ({"desirable": [True] * B}, "desirable is list: it must be a tensor"),
        ({"desirable": torch.ones(B)}, "desirable has dtype torch.float32: it must be torch.bool"),
        ({"kl": "0.1"}, "kl is '0.1': it must be a number or a tensor"),
    ],
    DistillationLoss(): [
        ({"teacher_hidden": torch.zeros(B, S, D).long()}, "teacher_hidden is torch.int64"),
    ],
    TopKDistillationLoss(): [
        ({"teacher_topk_logits": 1.0}, "teacher_topk_logits is float: it must be a tensor"),
        ({"teacher_topk_indices": [1, 2]}, "teacher_topk_indices is list: it must be a tensor"),
        ({"teacher_topk_indices": torch.zeros(B, S, K)}, "indices is torch.float32"),
    ],
}


def good(loss, layout):
    generator = torch.Generator().manual_seed(0)
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if layout == "sequence" else slice(None)
    hidden = torch.randn(B, S, D, generator=generator)[own]
    weight = torch.randn(2, V // 2, D, generator=generator)[dist.get_rank()]
    found = {"hidden": hidden, "weight": weight, "mask": torch.ones(B, S), "count": 4}
    if isinstance(loss, DistillationLoss):
        return found | {"teacher_hidden": hidden, "teacher_weight": weight + 1}
    ids = torch.rand(B, S, V, generator=generator).topk(K).indices
    if isinstance(loss, TopKDistillationLoss):
        return found | {"teacher_topk_logits": -1 - ids.float(), "teacher_topk_indices": ids}
    found["labels"] = ids[..., 0]
    per_token = {"reference_log_probs": torch.zeros(B, S)}
    if isinstance(loss, GRPOLoss):
        return found | per_token | {"advantages": torch.ones(B), "old_log_probs": torch.zeros(B, S)}
    if isinstance(loss, KTOLoss):
        return found | per_token | {"desirable": torch.arange(B) % 2 == 0, "kl": 0.1}
    return found | {"sft_count": 6} | (per_token if isinstance(loss, DPOLoss) else {})


def called(loss, layout, changed, by_head=False):
    """The loss of good options and arguments but for those `changed`; `by_head`: an `LmHead` has the head's options."""
    options = {"tp_group": dist.group.WORLD, "hidden_layout": layout}
    names = {field.name for field in dataclasses.fields(loss)}
    options |= {name: value for name, value in changed.items() if name in names}
    arguments = good(loss, layout) | {name: value for name, value in changed.items() if name not in names}
    if by_head:
        return loss(**arguments | {"weight": LmHead(arguments["weight"], **options)})[0]
    return dataclasses.replace(loss, **options)(**arguments)[0]


@ranks(2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_faults_that_all_ranks_see_are_raised_before_messages(layout):
    """Also where one rank has a fault of its own beside it, which the others wait for nowhere."""
    for loss, faults in OF_EACH.items():
        for changed, message in [*OF_ALL, *faults]:
            own_fault = {"count": -1.0} if "mask" in changed else {"mask": torch.ones(B, S + 1)}
            with count_collectives() as counts:
                with pytest.raises(ValueError, match=message):
                    called(loss, layout, changed)
                with pytest.raises(ValueError, match=f"{message}|mask is|count is" if dist.get_rank() else message):
                    called(loss, layout, changed | (own_fault if dist.get_rank() else {}))
            assert counts.total() == 0, (type(loss), message)
        assert called(loss, layout, {}).isfinite()


@ranks(2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("by_head", [False, True])
def test_what_one_rank_sees_travels_in_the_exchange_of_the_call(layout, by_head):
    of_all = [
        ({"mask": torch.ones(B, S + 1)}, r"mask is \(4, 4\): it must be a tensor \(4, 3\)"),
        ({"mask": torch.eye(B, S) - 0.5}, "mask has a weight below 0"),
        ({"count": -1.0}, "count is -1.0"),
    ]
    advantages = r"advantages is \(5,\): it must be a tensor with a number for each of 4 rows"
    of_grpo = [
        ({"advantages": torch.ones(B + 1)}, advantages),
        ({"old_log_probs": torch.ones(S, B)}, r"old_log_probs is \(3, 4\)"),
    ]
    twice = {"teacher_topk_indices": torch.ones(B, S, K).long()}, "has an id twice"
    no_rest = {"teacher_topk_logits": torch.ones(B, S, K)}, "whose exponentials add up to more than 1"
    more = {
        GRPOLoss(beta=0.1): of_grpo,
        GRPOLoss(skip_ignored=True): of_grpo,
        KTOLoss(): [({"desirable": torch.ones(B + 1).bool()}, r"desirable is \(5,\)")],
        DPOLoss(sft_weight=0.5): [({"sft_count": -1.0}, "sft_count is -1.0")],
        DistillationLoss(divergence="reverse"): [],
        DistillationLoss(divergence="jsd"): [],
        TopKDistillationLoss(): [({"teacher_topk_logits": torch.ones(B, S, K + 1)}, "teacher_topk_logits has shape")],
        TopKDistillationLoss(divergence="jsd", zero_outside_topk=True): [],
        TopKDistillationLoss(divergence="mixed", zero_outside_topk=True): [twice],
        TopKDistillationLoss(bucket=True): [twice, no_rest],
    }
    for loss in OF_EACH | more:
        for changed, message in [*of_all, *more.get(loss, [])]:
            if loss.skip_ignored and "mask" in changed:  # the ranks would not agree on how many tokens there are
                continue
            own_fault = dist.get_rank() == 1
            with (
                count_collectives() as counts,
                pytest.raises(ValueError, match=message if own_fault else "another rank of tp_group refused"),
            ):
                called(loss, layout, changed if own_fault else {}, by_head)
            assert counts.total() == (1 if layout == "replicated" else 2), "no exchange of its own"
        assert called(loss, layout, {}, by_head).isfinite()


@ranks(2)
def test_what_a_rank_without_columns_sees_is_raised_on_both():
    own_fault = dist.get_rank() == 1
    vocab = VocabShard(V, V, V) if own_fault else VocabShard(0, V, V)
    logits = torch.arange(float(B * vocab.columns)).view(B, vocab.columns)
    for divergence in ("forward", "reverse", "jsd"):
        loss = DistillationLoss(divergence=divergence, tp_group=dist.group.WORLD, vocab=vocab)
        for name, wrong, message in (("mask", torch.ones(3), r"mask is \(3,\)"), ("count", -1.0, "count is -1.0")):
            with pytest.raises(ValueError, match=message if own_fault else "another rank of tp_group refused"):
                loss.from_logits(logits, logits, **({name: wrong} if own_fault else {}))
        assert loss.from_logits(logits, logits.flip(0), torch.ones(B))[0].isfinite()
