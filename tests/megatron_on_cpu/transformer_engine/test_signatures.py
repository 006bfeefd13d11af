"""The stand-in has every name of the compiled module, and takes what it takes.

`signatures_VERSION.tsv` lists the names that this `transformer_engine_torch` gives to Python, read from its sources:
functions with their parameters, where `*` stands before those that are given by name alone, enumerations with their
members, modules with their functions. It is built without NCCL's expert parallelism.
"""

import inspect
from pathlib import Path

import pytest

from megatron_on_cpu.transformer_engine import absent
from megatron_on_cpu.transformer_engine.compiled_module import compiled_module

VERSIONS = {(2, 11): "2.11.0", (2, 20): "2.20.2"}
RECORDS = {
    version: [line.split("\t") for line in Path(__file__).with_name(f"signatures_{full}.tsv").read_text().splitlines()]
    for version, full in VERSIONS.items()
}
MODULES = {version: compiled_module(version) for version in VERSIONS}


def rows(kind, start=""):
    """(version, name, what belongs to it) for each row of this kind whose name starts so."""
    found = [
        (version, row)
        for version, record in RECORDS.items()
        for row in record
        if row[0] == kind and row[1].startswith(start)
    ]
    return pytest.mark.parametrize(
        "version,name,parts",
        [
            pytest.param(version, row[1], row[2].split() if len(row) > 2 else [], id=f"{VERSIONS[version]}-{row[1]}")
            for version, row in found
        ],
    )


def parameters(function) -> list[str]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_names(version):
    ours = {name for name in vars(MODULES[version]) if not name.startswith("__")}
    assert ours == {name for _, name, *_ in RECORDS[version]}


@rows("function")
def test_parameters(version, name, parts):
    function = getattr(MODULES[version], name)
    if name in absent.reasons(version):
        with pytest.raises(NotImplementedError, match=f"{name}: the CPU emulation of Transformer Engine does not have"):
            function(**dict.fromkeys(parts))
    else:
        assert parameters(function)[: len(parts)] == parts
        later = list(inspect.signature(function).parameters.values())[len(parts) - ("*" in parts) :]
        assert version == (2, 11) or not later
        assert all(parameter.default is not parameter.empty for parameter in later)


@rows("enum")
def test_enumerations(version, name, parts):
    assert set(getattr(MODULES[version], name).__members__) == set(parts)


@rows("module")
def test_modules_that_are_absent(version, name, parts):
    for function in parts:
        with pytest.raises(NotImplementedError, match=f"{name}.{function}: the CPU emulation"):
            getattr(getattr(MODULES[version], name), function)()


@rows("class", "Comm")
def test_classes_that_are_absent(version, name, parts):
    with pytest.raises(NotImplementedError, match=rf"{name}: .*user buffers \(tp_comm_overlap\); turn that off"):
        getattr(MODULES[version], name)([1], None)
