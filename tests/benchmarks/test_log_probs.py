import pytest
import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.log_probs import OURS, SAMPLED, USUAL, measure_ways, ways
from tests.ranks import ranks


def small(world, dtype=torch.float32):
    return Case("small", 300, 0, 192, world, dtype)  # two chunks of the usual way


@pytest.mark.slow
@ranks(1, 2)
def test_right_ways_are_timed():
    for dtype in (torch.float32, torch.bfloat16):
        rows, refused = measure_ways(small(dist.get_world_size(), dtype), 0.0)
        assert not refused
        assert {impl for impl, metric, *_ in rows if metric == "CPU time / usual"} == {USUAL, OURS, SAMPLED}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right: lambda z, y: right(z, y) + 1e-4,  # the values
        lambda right: lambda z, y: right(z.detach(), y) + 0 * z.sum(),  # no gradient
        lambda right: lambda z, y: right(z.bfloat16().float(), y),  # less precise than it says
        lambda right: lambda z, y: right(z, y) + torch.nan,
    ],
)
def test_a_wrong_way_has_no_time(wrong):
    right = ways(small(1), None)
    rows, refused = measure_ways(small(1), 0.0, right | {OURS: wrong(right[OURS])})
    assert {impl for impl, metric, *_ in rows if metric == "CPU time"} == {USUAL, SAMPLED}
    assert [line.split(":")[0] for line in refused] == [OURS]


@pytest.mark.slow
@ranks(2)
def test_what_is_wrong_on_one_rank_has_no_time_on_any():
    right = ways(small(2), dist.group.WORLD)
    worse = 1e-4 * dist.get_rank()
    rows, refused = measure_ways(small(2), 0.0, right | {OURS: lambda z, y: right[OURS](z, y) + worse})
    assert {impl for impl, metric, *_ in rows if metric == "CPU time"} == {USUAL, SAMPLED}
    assert len(refused) == 1
