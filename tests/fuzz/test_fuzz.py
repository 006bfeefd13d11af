"""Random calls of the public functions against fp64; FUZZ_SEED in the environment is the seed of the slow test.

`python -m tests.fuzz` draws new cases each time.
"""

import os

import pytest

from tests.fuzz.run import run
from tests.ranks import ranks

SEED = int(os.environ.get("FUZZ_SEED", 1))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "only, cases",
    [
        ("", 100),
        ("cross_entropy.", 100),
        ("heads.", 150),
        ("same_bits.", 40),
        ("mappings.", 100),
        ("model_utils.", 100),
        ("sharded_vocabulary.", 100),
        ("distillation.", 100),
        ("losses.", 200),
    ],
)
def test_a_few(only, cases):
    run(0, 0, cases, only)


@pytest.mark.slow
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("seed, first, cases, only", [pytest.param(SEED, 0, 2000, "", id="many")])
def test_many(seed, first, cases, only):
    run(seed, first, cases, only)
