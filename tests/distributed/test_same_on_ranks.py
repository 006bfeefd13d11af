"""Digests of what ranks must have alike: every rank of a grid hears of the one that differs, and none waits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.same_on_ranks import require_same
from tests.ranks import ranks

FACTS = {"the plan": [("up", 1), ("down", 2)], "the options": (1, torch.float32)}


def grid():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    return mesh.get_all_groups()


@ranks(2, 4)
def test_the_same_on_all_ranks():
    groups = grid()
    with count_collectives() as calls:
        require_same("f", FACTS, groups)
    assert calls.total() == sum(dist.get_world_size(group) > 1 for group in groups)


@pytest.mark.parametrize("name", FACTS)
@ranks(2, 4)
def test_one_rank_differs(name):
    mine = FACTS | {name: "something else"} if dist.get_rank() == dist.get_world_size() - 1 else FACTS
    with pytest.raises(ValueError, match=f"^f: ranks differ in {name}, so that"):
        require_same("f", mine, grid())


@ranks(2, 4)
def test_one_rank_refuses():
    fault = OSError("no such file") if dist.get_rank() == 1 else None
    expected, said = (ValueError, "f: another rank refused") if fault is None else (OSError, "no such file")
    with pytest.raises(expected, match=said):
        require_same("f", FACTS | {"the plan": fault and "none"}, grid(), fault=fault)


def test_alone():
    require_same("f", FACTS, [None])
    with pytest.raises(OSError, match="no such file"):
        require_same("f", FACTS, [None], fault=OSError("no such file"))
