import pytest

from benchmarks.losses import HEAD, OURS, grpo, measure_losses

SMALL = (2, 6, 8, 32)


def test_the_right_way_is_timed():
    rows, remarks = measure_losses(0.0, SMALL, {OURS: grpo, "absent": None})
    assert {impl for impl, metric, *_ in rows if metric == "CPU time / head"} == {HEAD, OURS}
    assert remarks == ["absent: not installed"]


@pytest.mark.parametrize(
    "wrong", [lambda given: grpo(given) * 1.001, lambda given: grpo(given).detach() + 0 * grpo(given)]
)
def test_a_wrong_way_has_no_time(wrong):
    rows, remarks = measure_losses(0.0, SMALL, {OURS: wrong})
    assert {impl for impl, metric, *_ in rows if metric == "CPU time"} == {HEAD}
    assert len(remarks) == 1
