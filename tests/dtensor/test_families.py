"""Families of models in all layouts against one process that runs transformers' own attention."""

import itertools

import pytest

from tests.dtensor.cells import check
from tests.dtensor.models import FAMILIES, HYBRIDS, MIXTURES, MORE, STACKED, WITH_IMAGES
from tests.ranks import ranks

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "cp2_packed": {"cp": 2, "packed": True},
    "ep2": {"tp": 2, "expert_parallel": True},
    "ep2_sp": {"tp": 2, "expert_parallel": True, "sequence_parallel": True, "checkpointing": True},
}
QUICK = {("apertus", "tp2"), ("olmo2", "tp2_sp"), ("gpt_oss", "ep2_sp"), ("gpt_oss", "cp2_packed")}


def cells(layouts):
    return [
        pytest.param(*cell, marks=[] if cell in QUICK else (pytest.mark.slow, pytest.mark.each_version))
        for cell in itertools.product(FAMILIES, layouts)
        if (cell[0] in MIXTURES and STACKED) or "ep" not in cell[1]
    ]


@pytest.mark.parametrize("name,layout", cells(LAYOUTS))
@ranks(2)
def test_two_ranks(name, layout):
    check(name, layout.endswith("sp"), **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.each_version
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("name", [*(name for name in HYBRIDS if name in MORE), *WITH_IMAGES])
@ranks(2)
def test_hybrids_on_two_ranks(name, layout):
    check(name, False, tolerance=5e-6, **LAYOUTS[layout])
