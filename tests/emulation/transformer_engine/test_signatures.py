"""The stand-in has every name of the compiled module, and takes what it takes.

`signatures_2.11.0.tsv` lists the names that `transformer_engine_torch` 2.11.0 gives to Python, read from its sources:
functions with their parameters, where `*` stands before those that are given by name alone, and enumerations with their
members.
"""

import inspect
from pathlib import Path

import pytest

from megatron_ext.emulation.transformer_engine import absent
from megatron_ext.emulation.transformer_engine.compiled_module import compiled_module

RECORD = [line.split("\t") for line in Path(__file__).with_name("signatures_2.11.0.tsv").read_text().splitlines()]
MODULE = compiled_module()


def parameters(function) -> list[str]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name)
    return found


def test_names():
    ours = {name for name in vars(MODULE) if not name.startswith("__")}
    assert ours == {name for _, name, *_ in RECORD}


@pytest.mark.parametrize("row", [row for row in RECORD if row[0] == "function"], ids=lambda row: row[1])
def test_parameters(row):
    name, expected = row[1], row[2].split() if len(row) > 2 else []
    if name in absent.REASONS:
        with pytest.raises(NotImplementedError, match=f"{name}: the CPU emulation of Transformer Engine does not have"):
            getattr(MODULE, name)(**dict.fromkeys(expected))
    else:
        assert parameters(getattr(MODULE, name)) == expected


@pytest.mark.parametrize("row", [row for row in RECORD if row[0] == "enum"], ids=lambda row: row[1])
def test_enumerations(row):
    assert set(getattr(MODULE, row[1]).__members__) == set(row[2].split())


@pytest.mark.parametrize("name", [row[1] for row in RECORD if row[0] == "class" and row[1].startswith("Comm")])
def test_classes_that_are_absent(name):
    with pytest.raises(NotImplementedError, match=rf"{name}: .*user buffers \(tp_comm_overlap\); turn that off"):
        getattr(MODULE, name)([1], None)
