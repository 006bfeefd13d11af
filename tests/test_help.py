"""Every program answers `--help`, and does nothing else."""

from pathlib import Path

import pytest

from tests.marks import quick_if
from tests.programs import python

ROOT = Path(__file__).parents[1]
FOLDERS = ("examples", "benchmarks", "megatron_ext")
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if '\nif __name__ == "__main__":\n' in path.read_text()
)


def test_all_programs_are_found():
    assert len(PROGRAMS) >= 25


@pytest.mark.parametrize("program", quick_if(lambda program: program.parts[0] == "megatron_ext", PROGRAMS), ids=str)
def test_program_answers_help(program, tmp_path):
    module = ".".join(program.with_suffix("").parts).removesuffix(".__main__")
    words = [str(ROOT / program)] if program.parts[0] == "examples" else ["-m", module]
    done = python(*words, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: "), done.stdout
    assert len(done.stdout.splitlines()) > 3, "it says what the program does"
    assert not list(tmp_path.iterdir())
