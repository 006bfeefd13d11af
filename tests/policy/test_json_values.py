"""Facts come back from JSON as they were, types included; what would not is refused."""

import json
from collections import Counter, OrderedDict
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch.optim import lr_scheduler

from megatron_ext.policy.checkpoint.json_values import from_json, to_json


def read_back(value):
    return from_json(json.loads(json.dumps(to_json(value))))


def same(one, other):
    """`==` and the types, at every depth."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(x, other[key]) for key, x in one.items())
    return not isinstance(one, list | tuple) or all(same(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "value",
    [
        {"betas": (0.9, 0.999), "fused": None, "lr": 0.1 + 0.2, "big": 2**70, "inf": float("inf"), "flag": True},
        {3: 1, (1, "a"): [(), {}, ({1: 2},)]},
        Counter({3: 1, 30: 2}),
        OrderedDict(b=1, a=(2,)),
        {"__type__": "tuple", "items": [1]},
        [{1, 2}, Counter(), {"1": {1: 1.0}}],
    ],
)
def test_reads_back_as_the_same_types(value):
    assert same(read_back(value), value)


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize("value", [torch.ones(1), Fraction(1, 3), print, Pair(1), b"", torch.float32])
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(ValueError, match=r"here\['a'\]\[1\] is .* which a checkpoint cannot hold"):
        to_json({"a": [0, value]}, "here")


def test_no_other_type_is_made():
    with pytest.raises(ValueError, match="eval is no type"):
        from_json({"x": [{"__type__": "eval", "items": ["1"]}]})


SCHEDULES = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4, 4]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*optimizer.step")
def test_schedules_of_torch_continue_as_they_were(name):
    def make():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name])

    def rates(optimizer, schedule, steps):
        return [(optimizer.step(), schedule.step()) and optimizer.param_groups[0]["lr"] for _ in range(steps)]

    optimizer, schedule = make()
    rates(optimizer, schedule, 3)
    other_optimizer, other = make()
    other.load_state_dict(read_back(schedule.state_dict()))
    other_optimizer.load_state_dict(read_back(optimizer.state_dict()))
    assert same(read_back(schedule.state_dict()), schedule.state_dict())
    assert rates(other_optimizer, other, 5) == rates(optimizer, schedule, 5)
