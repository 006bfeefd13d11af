import pytest

from benchmarks import loss_cases
from benchmarks.loss_cases import CASES, GRPO
from benchmarks.losses import HEAD, measure_losses, true_results, worst_error

SMALL = (4, 6, 8, 32)
OURS = "GRPO loss"


def test_the_right_way_is_timed():
    rows, remarks = measure_losses(GRPO, 0.0, SMALL, {OURS: GRPO.ours, "absent": None})
    assert {impl for impl, metric, *_ in rows if metric == "CPU time / head"} == {HEAD, OURS}
    assert remarks == ["absent: not installed"]


@pytest.mark.parametrize(
    "wrong", [lambda given: GRPO.ours(given) * 1.001, lambda given: GRPO.ours(given).detach() + 0 * GRPO.ours(given)]
)
def test_a_wrong_way_has_no_numbers(wrong):
    rows, remarks = measure_losses(GRPO, 0.0, SMALL, {OURS: wrong})
    assert {impl for impl, metric, *_ in rows if metric in ("CPU time", "peak")} == {HEAD}
    assert len(remarks) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_are_right(case):
    given = loss_cases.inputs(SMALL)
    true = true_results(case, given)
    for options in ({}, *case.options.values()):
        assert worst_error(lambda x, options=options: case.ours(x, **options), given, true) < 1e-5
    changed = given._replace(mask_BS=given.mask_BS * (given.labels_BS % 3 > 0))
    assert worst_error(case.ours, changed, true) > 1e-2
