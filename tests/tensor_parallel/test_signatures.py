"""Every name and signature of Megatron-Core's tensor-parallel package against ours: docs/tensor_parallel_api.md.

Megatron's side is read from source, since what it defines depends on what else is installed: from that of the version
which is imported, and from the record of all versions (`signatures.py`). To write the page anew:
`python -m tests.tensor_parallel.test_signatures`.
"""

import ast
import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_ext import tensor_parallel
from megatron_ext.megatron.versions import TESTED, megatron_version
from megatron_ext.tensor_parallel import layers, random
from megatron_ext.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_ext.tensor_parallel.random import (
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from tests.pages import DOCS
from tests.tensor_parallel.sharded import no_tracker
from tests.tensor_parallel.signatures import MODULES, recorded, signatures

SOURCE = Path(find_spec("megatron.core").submodule_search_locations[0]) / "tensor_parallel"
PAGE = DOCS / "tensor_parallel_api.md"
GENERALIZED = ["generalized_tensor_parallelism", "gtp_api", "gtp_cuda_graphs", "gtp_symmetric_memory"]
RECORDED = recorded()

IMPORT = "an alias or flag of Megatron's own imports"
AUTOGRAD = "`apply` takes the same arguments; what is behind it is not for calling"
INNER = "an inner step of a method that is made otherwise here"
INNER_STEP = "an inner step that is made otherwise here"
SIZES = "uneven pieces, as the gradient of an uneven gather"
DEVICE = "the device is the caller's choice"
TYPING = "for type checkers"
STORAGE = "storages are copied, no C++ extension is built"
SEEDS = f"a stream of its own for every coordinate, where asked for; {DEVICE}; 0.19's order by position is known"
PLAIN = "that of the plain layer, which takes more"
OLD_ORDER = "`async_grad_allreduce` last; calls by position in the order of 0.16 are known by what they pass"

# What differs, and why. A name that is missing from ours, or whose signature is not Megatron's, must be here.
ON_PURPOSE = {
    "cross_entropy._VocabParallelCrossEntropy.forward": AUTOGRAD,
    "cross_entropy._VocabParallelCrossEntropy.backward": AUTOGRAD,
    "inference_layers.HAVE_TE": "Transformer Engine is not needed",
    "inference_layers.InferenceLayerNormColumnParallelLinear._maybe_allocate_symmetric_buffer": INNER,
    "inference_layers.InferenceLayerNormColumnParallelLinear._all_gather": INNER,
    "inference_layers.InferenceRowParallelLinear._matmul_reduce_scatter": INNER,
    "inference_layers.InferenceColumnParallelLinear.__init__": PLAIN,
    "inference_layers.InferenceLayerNormColumnParallelLinear.__init__": PLAIN,
    "inference_layers.InferenceRowParallelLinear.__init__": PLAIN,
    "inference_layers._apply_linear": INNER_STEP,
    "inference_layers.InferenceColumnParallelLinear._maybe_allocate_symmetric_buffer": INNER,
    "inference_layers.InferenceColumnParallelLinear._all_gather": INNER,
    "layers.HAVE_TE": IMPORT,
    "layers.custom_fwd": IMPORT,
    "layers.custom_bwd": IMPORT,
    "layers.dist_all_gather_func": IMPORT,
    "layers.dist_reduce_scatter_func": IMPORT,
    "layers.LinearWithFrozenWeight.forward": AUTOGRAD,
    "layers.LinearWithFrozenWeight.backward": AUTOGRAD,
    "layers.LinearWithGradAccumulationAndAsyncCommunication.forward": AUTOGRAD,
    "layers.LinearWithGradAccumulationAndAsyncCommunication.backward": AUTOGRAD,
    "layers._linear_forward": INNER_STEP,
    "layers._wgrad_gemm": INNER_STEP,
    "layers.linear_with_frozen_weight": OLD_ORDER,
    "layers.linear_with_grad_accumulation_and_async_allreduce": OLD_ORDER,
    "mappings.dist_all_gather_func": IMPORT,
    "mappings.dist_reduce_scatter_func": IMPORT,
    "mappings._split_along_first_dim": SIZES,
    "random.CudaRNGStatesTracker.__init__": DEVICE,
    "random.initialize_rng_tracker": DEVICE,
    "random.model_parallel_cuda_manual_seed": SEEDS,
    "random.checkpoint": "functions with keyword arguments",
    "random.CheckpointWithoutOutput.checkpoint": "functions with keyword arguments",
    "random.CheckpointWithoutOutput._recompute": INNER,
    "random._SHARE_STORAGE_SRC": STORAGE,
    "random._share_storage_ext": STORAGE,
    "random._get_share_storage": STORAGE,
    "random._R": TYPING,
    "random._Ts": TYPING,
    "random._save_args_to_ctx": INNER_STEP,
    "random._load_args_from_ctx": INNER_STEP,
    "random.CheckpointWithoutOutputManager._unified_recompute_hook": INNER,
    "random.CheckpointWithoutOutput._discard_outputs": INNER,
    "utils.dist_all_gather_func": IMPORT,
}
# Positional parameters changed places between versions; `test_calls_in_the_order_of_older_versions` makes such calls.
REORDERED = {
    "layers.linear_with_frozen_weight",
    "layers.linear_with_grad_accumulation_and_async_allreduce",
    "random.model_parallel_cuda_manual_seed",
}
MISSING = object()


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


def find(name):
    """Our object of that name; MISSING."""
    module, *path = name.split(".")
    found = importlib.import_module(f"megatron_ext.tensor_parallel.{module}")
    for part in path:
        found = getattr(found, part, MISSING)
    return found


def parameters_of(function):
    """Return parameters without annotations; those that are by position alone as others by position."""
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = inspect.signature(function).parameters.values()
    return [p.replace(annotation=p.empty, kind=either if p.kind < either else p.kind) for p in given]


def recorded_parameters(text, module):
    """Return the parameters of a signature whose defaults are literals, torch's, or constants of our module too."""
    names = {"torch": torch, **vars(module)}
    exec(f"def function{text}: pass", names)
    return parameters_of(names["function"])


def compared(names):
    """(name, what of ours is different: "" or our signature or "missing") of every name and signature."""
    for name, theirs in names.items():
        owner = name.rpartition(".")[0]
        if owner in names and find(owner) is MISSING:
            continue
        ours, different = find(name), ""
        if ours is MISSING:
            different = "missing"
        elif theirs:
            module = importlib.import_module(f"megatron_ext.tensor_parallel.{name.split('.')[0]}")
            if parameters_of(ours) != recorded_parameters(theirs, module):
                different = str(inspect.Signature(parameters_of(ours)))
        yield name, different


def history(name):
    """Return the versions that have a name, and those of its later arguments: "0.18", "`name` 0.18", "up to 0.16"."""
    having = [version for version, names in RECORDED.items() if name in names]
    short = {version: ".".join(version.split(".")[:2]) for version in RECORDED}
    said = [] if having[0] == next(iter(RECORDED)) else [short[having[0]]]
    module = importlib.import_module(f"megatron_ext.tensor_parallel.{name.split('.')[0]}")
    known = None
    for version in having:
        text = RECORDED[version][name]
        arguments = [str(p).split("=")[0] for p in recorded_parameters(text, module)] if text else []
        said += [f"`{new}` {short[version]}" for new in arguments if known is not None and new not in known]
        known = arguments
    last = next(reversed(RECORDED))
    return ", ".join(said + ([f"up to {short[having[-1]]}"] if having[-1] != last else []))


def page():
    names = dict(reversed([pair for version in reversed(RECORDED.values()) for pair in reversed(version.items())]))
    newest = next(reversed(RECORDED.values()))
    names = newest | {name: text for name, text in names.items() if name not in newest}
    names = dict(sorted(names.items(), key=lambda pair: MODULES.index(pair[0].split(".")[0])))
    rows = []
    for name, different in compared(names):
        ours = "same" if not different else "-" if different == "missing" else f"`{different}`"
        reason = f": {ON_PURPOSE.get(name, '?')}" if different else ""
        rows.append(f"| `{name}` | {history(name)} | {f'`{names[name]}`' if names[name] else ''} | {ours}{reason} |")
    for part in GENERALIZED:
        since = "0.20" if part in ("gtp_cuda_graphs", "gtp_symmetric_memory") else "0.19"
        rows.append(f"| `{part}` | {since} | all its names | Megatron's own; our layers gather its parameters |")
    return (
        f"# megatron_ext.tensor_parallel against Megatron-Core {TESTED[0]} to {TESTED[-1]}\n\n"
        "Written by tests/tensor_parallel/test_signatures.py. The signature is that of the newest version that has\n"
        'the name. "since": the version that added a name or an argument, if it was not the first. "same": names,\n'
        "kinds and defaults of all parameters are equal. Where a signature of ours is shown, it accepts every call\n"
        'that a signature of Megatron\'s, of any version, accepts. "-": ours has no such name.\n\n'
        "| name | since | Megatron-Core | megatron_ext |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def imported():
    return signatures(SOURCE)


def test_every_difference_is_on_purpose():
    """Names that ours lack in any version, and signatures that are not the newest version's."""
    every = [pair for names in (*RECORDED.values(), imported()) for pair in compared(names)]
    wrong = {name for name, different in every if different == "missing"}
    wrong |= {name for name, different in compared(next(reversed(RECORDED.values()))) if different}
    assert not wrong - set(ON_PURPOSE), "not Megatron's, and not said why"
    assert not set(ON_PURPOSE) - wrong, "no longer different: take them out of ON_PURPOSE"


@pytest.mark.parametrize("version", [*RECORDED, "imported"])
def test_what_fits_megatrons_signatures_fits_ours(version):
    checked = 0
    for name, text in (imported() if version == "imported" else RECORDED[version]).items():
        module = importlib.import_module(f"megatron_ext.tensor_parallel.{name.split('.')[0]}")
        ours = find(name)
        if ours is MISSING or not text:
            continue
        theirs, own = recorded_parameters(text, module), parameters_of(ours)
        by_name = {p.name: p for p in own}
        for p in theirs:
            mine = by_name.get(p.name)
            assert mine is not None, f"{name} does not take {p}"
            assert mine.kind is p.kind, f"{name}: {p} is of another kind"
            assert mine.default == p.default or p.default is p.empty, f"{name}: {mine} should be {p}"
        places, mine = ([p.name for p in each if p.kind < p.KEYWORD_ONLY] for each in (theirs, own))
        assert name in REORDERED or mine[: len(places)] == places, f"{name}: their positional parameters, in order"
        extra = [p for p in own if p.name not in {each.name for each in theirs}]
        variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        assert all(p.default is not p.empty or p.kind in variable for p in extra), f"{name}: needs more"
        checked += 1
    assert checked > 60


def test_the_record_is_that_of_the_imported_version():
    """Versions are compared except the newest, which is a branch that moves on."""
    version = max((v for v in RECORDED if minor(v) <= minor(megatron_version())), key=minor)
    same = imported() == RECORDED[version]
    assert same or minor(megatron_version()) >= minor(TESTED[-1]), "record it anew: see signatures.py"


@no_tracker()
def test_calls_in_the_order_of_older_versions():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for old in (None, True, False):  # ..., wgrad_deferral_limit, async_grad_allreduce, tp_group
        out = linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, False, False, None, 0, old, None)
        torch.testing.assert_close(out, x @ w.T)
        out = linear_with_frozen_weight(x, w, None, False, False, False, None, None, None, old)
        torch.testing.assert_close(out, x @ w.T)
    initialize_rng_tracker(force_reset=True)
    before = get_cuda_rng_tracker()
    model_parallel_cuda_manual_seed(1, False, False, False, 0, 0, 0, False)
    assert get_cuda_rng_tracker() is before
    model_parallel_cuda_manual_seed(1, False, False, False, 0, 0, 0, True)  # force_reset_rng
    assert get_cuda_rng_tracker() is not before


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
    """Names that a module only imports count too: `from megatron.core.tensor_parallel.utils import divide`, say."""
    taken = set()
    for file in SOURCE.parent.rglob("*.py"):
        text = "" if file.parent == SOURCE else file.read_text()
        for node in ast.walk(ast.parse(text)) if "core.tensor_parallel" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core.tensor_parallel"):
                taken.update((node.module.removeprefix("megatron.core."), alias.name) for alias in node.names)
    assert len(taken) > 30
    lacking = [name for name in taken if not hasattr(importlib.import_module(f"megatron_ext.{name[0]}"), name[1])]
    assert not lacking


def test_the_page_in_the_docs_is_this_one():
    assert PAGE.read_text() == page(), f"write it anew: python -m {__spec__.name}"


if __name__ == "__main__":
    PAGE.write_text(page())


@pytest.mark.parametrize("module", [layers, random], ids=["layers", "random"])
def test_type_checkers_find_what_a_module_imports(module):
    """The package has type hints (`py.typed`): to mypy --strict and pyright an import alone exports nothing."""
    part = f"{module.__name__.rpartition('.')[2]}."
    recorded = {name.removeprefix(part) for names in RECORDED.values() for name in names if name.startswith(part)}
    imported = {name for name in recorded if getattr(vars(module).get(name), "__module__", module) != module.__name__}
    assert imported & {*vars(module)} <= {*module.__all__}
