"""A few configurations of the matrix, and how it counts."""

import pytest

from tests.megatron import matrix

SAMPLE = ["gpt-tp2-sp-tied-mtp1", "hybrid-tp2-untied-mtp0", "gpt-fsdp2-untied-mtp0"]  # main() runs them all


@pytest.mark.slow
@pytest.mark.each_version
def test_a_sample_of_the_matrix():
    pools: list = []
    for one in matrix.CONFIGURATIONS:
        if one.name not in SAMPLE:
            continue
        found = matrix.compare(pools, one, ["patch", "all"], steps=4)
        assert found.pop("stock") is None
        assert list(found) == ["patch", "all"]
        for way, result in found.items():
            assert matrix.passed(way, result), (one.name, way, result)
    for pool in pools:
        pool.close()


GOOD = {"worst": 0.0, "losses_fused": 40, "logits_made": 0}


@pytest.mark.parametrize(
    "way,result,good",
    [
        ("patch", GOOD, True),
        ("patch", GOOD | {"worst": 2e-6}, False),
        ("patch", GOOD | {"worst": float("nan")}, False),
        ("all", GOOD | {"logits_made": 1}, False),
        ("all", GOOD | {"losses_fused": 0}, False),
        ("spec", {"worst": 0.0, "losses_fused": 0, "logits_made": 40}, True),
        ("spec", {"error": "TypeError: no"}, False),
    ],
)
def test_what_passes(way, result, good):
    assert matrix.passed(way, result) == good


@pytest.mark.parametrize(
    "report,reason",
    [
        ("measure\n\n--- rank 0 of 2 ---\nTraceback\nE: at /a/b.py\n--- rank 1 of 2 ---\nF: y\n", "E: at b.py"),
        ("measure\nranks [0] never answered\n--- rank 1 of 2 ---\nTraceback\nF: y\n", "F: y"),
        ("measure\nranks [0, 1] never answered\n", "ranks [0, 1] never answered"),
    ],
)
def test_the_reason_is_the_first_traceback_s(report, reason):
    assert matrix.reason(report) == reason


def test_the_table_counts_and_says_why():
    kept = {
        "0.19.0": {"commit": "abc", "found": {"gpt-tp2-tied-mtp0": {"stock": None, "patch": GOOD, "spec": GOOD}}},
        "0.2.0": {
            "commit": "PyPI",
            "found": {
                "gpt-tp2-tied-mtp0": {"stock": None, "patch": GOOD, "spec": {"error": "TypeError: no"}},
                "gpt-tp2-tied-mtp1": {"stock": "ValueError: never"},
            },
        },
    }
    names = ["gpt-tp2-tied-mtp0", "gpt-tp2-tied-mtp1", "gpt-pp2-tied-mtp0"]
    table = matrix.table(kept, matrix.passed, names, ("patch", "spec"))
    assert table.splitlines() == [
        "| | 0.2.0 (PyPI) | 0.19.0 (abc) |",
        "|---|---|---|",
        "| gpt-tp2 | 1 of 2; note 1 (tied mtp0), 2 (tied mtp1) | 2 of 2, 2 not run |",
        "| gpt-pp2 | not run | not run |",
        "",
        "1. spec: `TypeError: no`",
        "2. stock does not run: `ValueError: never`",
    ]
