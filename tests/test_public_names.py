"""The import paths that users have: `tests/public_names.txt` lists them, a module a line. A name may only be added."""

import importlib
from pathlib import Path

import pytest

LINES = (Path(__file__).parent / "public_names.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(":")[0])
def test_public_names_are_where_they_were(line):
    module, names = line.split(": ")
    found = importlib.import_module(module)
    missing = [name for name in names.split() if not hasattr(found, name)]
    assert not missing, f"{module} no longer has {missing}: users import them from there"


def test_every_package_room_has_a_line():
    package = Path(__file__).parents[1] / "megatron_ext"
    rooms = {f"megatron_ext.{path.parent.name}" for path in package.glob("[a-z]*/__init__.py")}
    listed = {line.split(":")[0] for line in LINES}
    assert not {room for room in rooms if not any((name + ".").startswith(room + ".") for name in listed)}
