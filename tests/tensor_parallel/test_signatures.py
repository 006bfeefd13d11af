"""Every name and signature of Megatron-Core's tensor-parallel package against ours: docs/tensor_parallel_api.md.

Megatron's side is read from its source: what it defines depends on what else is installed. To write the table anew:
`python -m tests.tensor_parallel.test_signatures`.
"""

import ast
import importlib
import inspect
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_ext import tensor_parallel

SOURCE = Path(find_spec("megatron.core").submodule_search_locations[0]) / "tensor_parallel"
TABLE = Path(__file__).parents[2] / "docs" / "tensor_parallel_api.md"
MODULES = ["cross_entropy", "data", "inference_layers", "layers", "mappings", "random", "utils"]

IMPORT = "an alias or flag of Megatron's own imports"
AUTOGRAD = "`apply` takes the same arguments; what is behind it is not for calling"
INNER = "an inner step of a method that is made otherwise here"
SIZES = "uneven pieces, as the gradient of an uneven gather"
DEVICE = "the device is the caller's choice"
DTYPE = "from newer Megatron versions"

# What differs, and why. A name that is missing from ours, or whose signature is not Megatron's, must be here.
ON_PURPOSE = {
    "cross_entropy._VocabParallelCrossEntropy.forward": AUTOGRAD,
    "cross_entropy._VocabParallelCrossEntropy.backward": AUTOGRAD,
    "cross_entropy.vocab_parallel_cross_entropy": "any group, as in newer Megatron versions",
    "inference_layers.HAVE_TE": "Transformer Engine is not needed",
    "inference_layers.InferenceLayerNormColumnParallelLinear._maybe_allocate_symmetric_buffer": INNER,
    "inference_layers.InferenceLayerNormColumnParallelLinear._all_gather": INNER,
    "inference_layers.InferenceRowParallelLinear._matmul_reduce_scatter": INNER,
    "layers.HAVE_TE": IMPORT,
    "layers.custom_fwd": IMPORT,
    "layers.custom_bwd": IMPORT,
    "layers.dist_all_gather_func": IMPORT,
    "layers.dist_reduce_scatter_func": IMPORT,
    "layers._initialize_affine_weight_gpu": "the same full weight at every tensor-parallel size needs the group",
    "layers.linear_with_frozen_weight": DTYPE,
    "layers.linear_with_grad_accumulation_and_async_allreduce": DTYPE,
    "mappings.dist_all_gather_func": IMPORT,
    "mappings.dist_reduce_scatter_func": IMPORT,
    "mappings._split_along_first_dim": SIZES,
    "random.CudaRNGStatesTracker.__init__": DEVICE,
    "random.initialize_rng_tracker": DEVICE,
    "random.model_parallel_cuda_manual_seed": "a stream of its own for every coordinate, where asked for; " + DEVICE,
    "random.checkpoint": "functions with keyword arguments",
    "random.CheckpointWithoutOutput.checkpoint": "functions with keyword arguments",
    "random.CheckpointWithoutOutput._recompute": INNER,
    "utils.dist_all_gather_func": IMPORT,
}
MISSING = object()


def source(module):
    return ast.parse((SOURCE / f"{module}.py").read_text())


def definitions(body, prefix):
    """(dotted name, its node) of functions, classes, methods and variables, whatever `if` or `try` they are in, and of
    what a module takes from another of the package: people import it from there too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            branches = [node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", []))]
            for branch in branches:
                yield from definitions(branch, prefix)
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node.body, prefix + node.name + ".")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, node
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module in MODULES:
            yield from ((prefix + alias.name, node) for alias in node.names)


def find(name):
    """Our object of that name; MISSING."""
    module, *path = name.split(".")
    found = importlib.import_module(f"megatron_ext.tensor_parallel.{module}")
    for part in path:
        found = getattr(found, part, MISSING)
    return found


def parameter(kind, name, default=MISSING):
    mark = {"*": "*", "**": "**"}.get(kind, "")
    return kind, mark + name + ("" if default is MISSING else f"={default!r}")


def their_parameters(node, module):
    arguments = node.args

    def value(default):  # a literal, something of torch's, or a constant that ours has too
        return eval(ast.unparse(default), {"torch": torch, **vars(module)})

    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [MISSING] * (len(places) - len(arguments.defaults)) + list(map(value, arguments.defaults))
    found = [parameter("", place.arg, default) for place, default in zip(places, defaults, strict=True)]
    if arguments.vararg:
        found.append(parameter("*", arguments.vararg.arg))
    for place, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(parameter("keyword", place.arg, MISSING if default is None else value(default)))
    if arguments.kwarg:
        found.append(parameter("**", arguments.kwarg.arg))
    return found


def our_parameters(function):
    kinds = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "keyword"}
    return [
        parameter(kinds.get(p.kind.name, ""), p.name, MISSING if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
    ]


def written(parameters):
    words, keyword = [], False
    for kind, word in parameters:
        if kind == "keyword" and not keyword and not any(k == "*" for k, _ in parameters):
            words.append("*")
        keyword = keyword or kind == "keyword"
        words.append(word)
    return f"({', '.join(words)})"


def compared():
    """(name, Megatron's signature or "", what of ours is different or "") of every name, in Megatron's order."""
    for part in MODULES:
        module, seen = importlib.import_module(f"megatron_ext.tensor_parallel.{part}"), set()
        for name, node in definitions(source(part).body, f"{part}."):
            ours = find(name)
            theirs = their_parameters(node, module) if isinstance(node, ast.FunctionDef) else None
            if name in seen or any(name.startswith(f"{missing}.") for missing in seen if find(missing) is MISSING):
                continue
            seen.add(name)
            different = ""
            if ours is MISSING:
                different = "missing"
            elif theirs is not None and our_parameters(ours) != theirs:
                different = written(our_parameters(ours))
            yield name, "" if theirs is None else written(theirs), different


def table():
    rows = []
    for name, theirs, different in compared():
        ours = "same" if not different else "-" if different == "missing" else f"`{different}`"
        reason = f": {ON_PURPOSE.get(name, '?')}" if different else ""
        rows.append(f"| `{name}` | {f'`{theirs}`' if theirs else ''} | {ours}{reason} |")
    return (
        f"# megatron_ext.tensor_parallel against Megatron-Core {version('megatron-core')}\n\n"
        'Written by tests/tensor_parallel/test_signatures.py. "same": names, kinds and defaults of all parameters.\n'
        'Where a signature is ours, every call that fits Megatron\'s fits it too. "-": ours has no such name.\n\n'
        "| name | Megatron-Core | megatron_ext |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def test_every_difference_is_on_purpose():
    differences = {name: different for name, _, different in compared() if different}
    unnamed = {name: different for name, different in differences.items() if name not in ON_PURPOSE}
    assert not unnamed, "not Megatron's, and not said why"
    assert not set(ON_PURPOSE) - set(differences), "no longer different: take them out of ON_PURPOSE"


@pytest.mark.parametrize("part", [part for part in MODULES if (SOURCE / f"{part}.py").exists()])  # 0.14 has not all
def test_what_fits_megatrons_signatures_fits_ours(part):
    module, checked = importlib.import_module(f"megatron_ext.tensor_parallel.{part}"), 0
    for name, node in definitions(source(part).body, f"{part}."):
        ours = find(name)
        if ours is MISSING or not isinstance(node, ast.FunctionDef):
            continue
        theirs = their_parameters(node, module)
        names = [word.split("=")[0] for _, word in theirs]
        own = our_parameters(ours)
        assert [word.split("=")[0] for _, word in own][: len(names)] == names, f"{name}: their parameters, in order"
        assert [kind for kind, _ in own][: len(names)] == [kind for kind, _ in theirs], name
        for (_, mine), (_, their) in zip(own, theirs, strict=False):
            assert mine == their or "=" not in their, f"{name}: {mine} should be {their}"
        assert all("=" in word or kind.startswith("*") for kind, word in own[len(names) :]), f"{name}: needs more"
        checked += 1
    assert checked


def test_the_package_has_every_name_of_megatrons():
    names = {
        alias.asname or alias.name
        for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert len(names) > 30
    assert not {name for name in names if not hasattr(tensor_parallel, name)}
    assert names <= set(tensor_parallel.__all__)


def test_what_megatron_takes_from_its_package_is_in_ours():
    """By `from megatron.core.tensor_parallel.utils import divide`, say, where the package itself only imports it."""
    taken = set()
    for file in SOURCE.parent.rglob("*.py"):
        text = "" if file.parent == SOURCE else file.read_text()
        for node in ast.walk(ast.parse(text)) if "core.tensor_parallel" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core.tensor_parallel"):
                taken.update((node.module.removeprefix("megatron.core."), alias.name) for alias in node.names)
    assert len(taken) > 30
    assert not [name for name in taken if not hasattr(importlib.import_module(f"megatron_ext.{name[0]}"), name[1])]


def test_the_table_in_the_docs_is_this_one():
    assert TABLE.read_text() == table(), f"write it anew: python -m {__spec__.name}"


if __name__ == "__main__":
    TABLE.write_text(table())
