"""The package's own names: its version, what completion shows, and names that are imported when they are asked for."""

import ast
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

import megatron_ext
from megatron_ext import __main__ as programs
from megatron_ext import head
from tests.marks import slow

ROOT = Path(__file__).parents[1]


def test_dir_shows_public_names_alone():
    shown = set(dir(megatron_ext))
    assert {*megatron_ext.__all__, "integrations", "losses", "dtensor", "__version__"} <= shown
    assert not {name for name in shown if name.startswith("_")} - {"__version__"}
    assert not shown & {"TYPE_CHECKING", "Any", "import_module"}


def test_names_are_those_of_their_modules():
    from megatron_ext.dtensor import parallelize, use_fused_loss
    from megatron_ext.megatron.fusion_report import fusion_report

    assert megatron_ext.use_fused_loss is use_fused_loss
    assert megatron_ext.parallelize is parallelize
    assert megatron_ext.fusion_report is fusion_report
    assert megatron_ext.LmHead is head.LmHead
    for name in megatron_ext.__all__:
        assert callable(getattr(megatron_ext, name)), name
    with pytest.raises(AttributeError, match="no attribute 'fused_los'"):
        megatron_ext.fused_los  # noqa: B018


@pytest.mark.parametrize("package, name", [("integrations", "trl"), ("integrations", "verl")])
def test_frameworks_are_imported_when_they_are_asked_for(package, name):
    found = importlib.import_module(f"megatron_ext.{package}")
    assert found.__getattr__(name) is importlib.import_module(f"megatron_ext.{package}.{name}")
    for module in (found, importlib.import_module("megatron_ext.dtensor")):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018


def test_version_is_that_of_the_installed_package(capsys):
    assert importlib.metadata.version("megatron-ext") == megatron_ext.__version__
    assert f"\nversion: {megatron_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    with pytest.raises(SystemExit) as ended:
        programs.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"megatron_ext {megatron_ext.__version__}\n"


def test_programs_get_the_arguments_behind_their_name(capsys):
    with pytest.raises(SystemExit) as ended:
        programs.main(["doctor", "--cpu"])
    assert ended.value.code == 2
    assert "--cpu is of use with --model alone" in capsys.readouterr().err


FIRST_IMPORTS = """
import runpy, sys, megatron_ext
assert 'megatron_ext.integrations' not in sys.modules and 'megatron_ext.dtensor' not in sys.modules
assert callable(megatron_ext.integrations.trl.apply)
assert callable(megatron_ext.integrations.nemo_rl.restore)
assert megatron_ext.losses.GRPOLoss
assert not {'megatron', 'trl', 'transformers'} & set(sys.modules)
"""
PROGRAM = "runpy.run_module('megatron_ext', run_name='__main__', alter_sys=True)"
MEMORY = ["-c", FIRST_IMPORTS + PROGRAM, "memory", "--tokens", "8", "--hidden", "8", "--vocab", "64"]


@pytest.mark.parametrize("words", [pytest.param(MEMORY, id="memory"), *slow(["-m", "megatron_ext", "doctor"])])
def test_programs_end_quietly_and_first_imports_are_few(words):
    """Programs that write to a closed pipe, as with `| head`, have exit code 1 and say nothing of it.

    The same new process shows which packages come with the first import: other tests have imported them in this one.
    """
    from_pipe, to_pipe = os.pipe()
    os.close(from_pipe)
    with open(to_pipe) as closed:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_an_editable_install_serves_the_folder_above_the_clone(tmp_path):
    """Python, run there, would take the clone's folder, `megatron_ext/`, for a namespace package of that name."""
    clone, site = tmp_path / "megatron_ext", tmp_path / "site"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", *_INITS):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    zipfile.ZipFile(*tmp_path.glob("*.whl")).extractall(site)
    script = tmp_path / "train.py"
    script.write_text(
        f"import importlib.util, site\nsite.addsitedir({str(site)!r})\n"
        "print(*[importlib.util.find_spec(name).origin for name in ('megatron_ext', 'megatron_on_cpu')])\n"
    )
    done = subprocess.run([sys.executable, "-S", "-E", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(clone / name) for name in _INITS]


_INITS = ("megatron_ext/__init__.py", "megatron_on_cpu/__init__.py")


# Packages that examples need through the package, which imports them when they are used.
THROUGH_OURS = {"pipeline_vocabulary.py": "greenlet", "grpo_tiny.py": "ray", "finetune_hf.py": "transformers"}


def test_examples_extra_has_what_examples_import():
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    arguments = setup.call_args.kwargs
    listed = {re.match(r"[\w-]+", word)[0] for word in arguments["extras_require"]["examples"]}
    listed |= {re.match(r"[\w-]+", word)[0] for word in arguments["install_requires"]}
    owners = importlib.metadata.packages_distributions()
    files = list((ROOT / "examples").glob("*.py"))
    own = {path.stem for path in files} | {"megatron_ext", "megatron_on_cpu"} | sys.stdlib_module_names
    for path in files:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                names |= {module.partition(".")[0] for module in modules}
        needed = {owner for name in names - own for owner in owners[name]} | {THROUGH_OURS.get(path.name, "torch")}
        assert needed <= listed, f"{path.name} needs {needed - listed}, which the extra `examples` does not install"
