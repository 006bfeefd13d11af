"""The policy worker holds no logits of the whole batch, which the usual way holds several times."""

import pytest

from benchmarks.policy_memory import SIZES, measure_policy
from tests.ranks import ranks

LOGITS_MIB = SIZES["rows"] * SIZES["positions"] * SIZES["vocab"] * 4 / 2**20


@pytest.mark.slow  # smaller logits fit into one chunk
@ranks(1)
def test_peaks():
    found = {(way, metric): peak for way, metric, _, [peak] in measure_policy(**SIZES)}
    usual, ours = "full fp32 logits", "policy worker"
    scoring, training = "peak, get_logprobs", "peak, train"
    assert found[usual, scoring] > 1.9 * LOGITS_MIB
    assert found[usual, training] > 2.9 * LOGITS_MIB
    assert found[ours, scoring] < 0.3 * found[usual, scoring]
    assert found[ours, training] < 0.4 * found[usual, training]
