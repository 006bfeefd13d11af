"""All models in all layouts against one process that runs transformers' own attention: logits and every gradient.

Of tied and untied weights each model has both, and each layout; a model in a layout has one of them.
"""

import itertools

import pytest

from tests.dtensor.cells import check
from tests.dtensor.models import FAMILIES, HYBRIDS, MIXTURES, MORE, NAMES, STACKED, WITH_IMAGES
from tests.ranks import ranks

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "cp2_packed": {"cp": 2, "packed": True},
}
LARGE_LAYOUTS = {
    "dp2_tp2": {"dp": 2, "tp": 2},
    "cp2_tp2_sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2_tp2_sp_packed": {"cp": 2, "tp": 2, "sequence_parallel": True, "packed": True},
}
# What each model does differently is seen in one of these already.
QUICK = {
    ("llama", "dp2", False),
    ("llama", "tp2_sp", True),
    ("qwen2", "cp2", True),
    ("qwen3", "tp2", False),
    ("gemma3", "cp2_packed", False),
    ("gemma3_multimodal", "tp2_sp", True),
}
BOTH_WAYS = {("qwen3", "tp2_sp", False), ("llama", "cp2", False), ("gemma3", "tp2_sp", True)}  # tied and untied


def _cells(layouts, marks):
    """Every model in every layout, by turns tied and untied, what is quick beside these, and some both ways."""
    by_turns = {(name, layout, (i + j) % 2 == 1) for i, name in enumerate(NAMES) for j, layout in enumerate(layouts)}
    return [
        pytest.param(
            *cell,
            marks=[] if cell in QUICK else marks,
            id=f"{cell[0]}-{cell[1]}-{'tied' if cell[2] else 'untied'}",
        )
        for cell in itertools.product(NAMES, layouts, (False, True))
        if cell in by_turns | QUICK | BOTH_WAYS
    ]


@pytest.mark.parametrize("name,layout,tied", _cells(LAYOUTS, [pytest.mark.slow, pytest.mark.each_version]))
@ranks(2)
def test_two_ranks(name, layout, tied):
    check(name, tied, **LAYOUTS[layout])


@pytest.mark.parametrize("name,layout,tied", _cells(LARGE_LAYOUTS, [pytest.mark.slow]))
@ranks(4)
def test_four_ranks(name, layout, tied):
    check(name, tied, **LARGE_LAYOUTS[layout])


@pytest.mark.parametrize("name", [pytest.param("llama"), *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])])
@ranks(2)
def test_activation_checkpointing(name):
    check(name, True, **LAYOUTS["tp2_sp"], checkpointing=True)
    check(name, False, **LAYOUTS["cp2_packed"], checkpointing=True)


@ranks(1)
def test_one_rank():
    check("gemma3", False, checkpointing=True)
    check("llama", True, packed=True)


FAMILY_LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if name != "cp2"}
FAMILY_LAYOUTS |= {
    "ep2": {"tp": 2, "expert_parallel": True},
    "ep2_sp": {"tp": 2, "expert_parallel": True, "sequence_parallel": True, "checkpointing": True},
}
QUICK_OF_FAMILIES = {("apertus", "tp2"), ("olmo2", "tp2_sp"), ("gpt_oss", "ep2_sp"), ("gpt_oss", "cp2_packed")}


def _family_cells():
    return [
        pytest.param(*cell, marks=[] if cell in QUICK_OF_FAMILIES else (pytest.mark.slow, pytest.mark.each_version))
        for cell in itertools.product(FAMILIES, FAMILY_LAYOUTS)
        if (cell[0] in MIXTURES and STACKED) or "ep" not in cell[1]
    ]


@pytest.mark.parametrize("name,layout", _family_cells())
@ranks(2)
def test_families_on_two_ranks(name, layout):
    check(name, layout.endswith("sp"), **FAMILY_LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.each_version
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("name", [*(name for name in HYBRIDS if name in MORE), *WITH_IMAGES])
@ranks(2)
def test_hybrids_on_two_ranks(name, layout):
    check(name, False, tolerance=5e-6, **LAYOUTS[layout])
