"""Report of `apply()`: which names it replaced, in which modules, and how often ours ran since."""

import functools
import importlib
import sys

import pytest
import torch

from megatron_ext.integrations import nemo_rl, trl, verl
from megatron_ext.integrations.substitution import FrameworkSubstitution, ReplacedName, Report

SOURCE = """
import torch

def total(x):
    return x.sum()

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

class Layer(torch.nn.Module):
    def forward(self, x):
        return x

def made(x):
    return x
"""


def ours(x):
    return x.sum() + 1


class OurTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 20 * x

    @staticmethod
    def backward(ctx, grad):
        return 20 * grad


class OurLayer(torch.nn.Module):
    def forward(self, x):
        return x + 5


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """A package, a module that imports from it, and a substitution of what it has and one thing more."""
    (tmp_path / "a_framework.py").write_text(SOURCE)
    (tmp_path / "a_trainer.py").write_text("from a_framework import Twice, total as of_all")
    monkeypatch.syspath_prepend(tmp_path)
    replaced_names = [
        ReplacedName("a_framework", "total", ours),
        ReplacedName("a_framework", "Twice", OurTwice),
        ReplacedName("a_framework", "Layer", OurLayer),
        ReplacedName("a_framework", "made", lambda original: lambda x: original(x) * 3, made=True),
        ReplacedName("a_framework", "later", ours, required=False),
    ]
    yield importlib.import_module("a_trainer"), FrameworkSubstitution("a_framework", lambda: replaced_names)
    for name in ("a_framework", "a_trainer"):
        sys.modules.pop(name, None)


def test_each_name_its_modules_and_its_calls(framework):
    trainer, substitution = framework
    module = sys.modules["a_framework"]
    assert str(substitution.report()) == "megatron_ext replaces nothing in a_framework: call apply()"
    report = substitution.apply()
    assert report is substitution.report() is substitution.apply()
    x = torch.ones(3, requires_grad=True)
    assert trainer.of_all(x) == module.total(x) == 4
    trainer.Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [20.0] * 3
    layer = module.Layer()
    assert [layer(x).sum().item() for _ in range(3)] == [18.0] * 3
    assert str(report).splitlines() == [
        "megatron_ext in a_framework from source",
        "  a_framework.total: in 2 modules, ran 2 times",
        "  a_framework.Twice: in 2 modules, ran 1 time",
        "  a_framework.Layer: in 1 module, ran 3 times",
        "  a_framework.made: in 1 module, has not run",
        "  a_framework.later: not in this version",
    ]
    assert sorted(report.replaced[0].modules) == ["a_framework", "a_trainer"]
    assert module.made(x)[0] == 3
    assert report.replaced[3].calls == 1
    substitution.restore()
    assert trainer.of_all(x) == 3
    assert report.replaced[0].calls == 2
    assert str(substitution.report()).startswith("megatron_ext in a_framework from source, until restore() put its own")


def test_compiled_calls_are_not_counted_and_do_not_compile_anew(framework):
    trainer, substitution = framework
    report = substitution.apply()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda x: trainer.of_all(x) * 2, backend=backend, fullgraph=True)
    assert [step(torch.full((3,), float(i))).item() for i in range(4)] == [2.0, 8.0, 14.0, 20.0]
    assert len(graphs) == 1
    assert report.replaced[0].calls == 0
    substitution.restore()


def test_a_wrapper_around_ours_stays_after_restore(framework):
    trainer, substitution = framework
    module = sys.modules["a_framework"]
    substitution.apply()
    inner = module.total

    @functools.wraps(inner)
    def theirs(x):
        return inner(x) * 10

    module.total = theirs
    x = torch.ones(3)
    assert module.total(x) == 40
    substitution.restore()
    assert module.total is theirs
    assert module.total(x) == 30
    assert trainer.of_all(x) == 3
    substitution.apply()  # their wrapper is the framework's function now; who imported the one within keeps that
    assert module.total(x) == 4
    substitution.restore()
    assert module.total is theirs


@pytest.mark.parametrize("way_in", [nemo_rl, trl, verl])
def test_a_report_is_of_the_frameworks_substitution(way_in, monkeypatch):
    monkeypatch.setattr(way_in._substitution, "_last", Report("it"))  # another test may have applied it
    assert str(way_in.report()) == "megatron_ext replaces nothing in it: call apply()"
