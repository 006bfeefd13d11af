"""The house rules that a machine can hold us to: which room may import which, and who may communicate."""

import ast
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.programs import alone

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_ext"
ON_CPU = ROOT / "megatron_on_cpu"  # a package of its own

# Data flows one way: a room imports itself and the rooms after it in this list.
ROOMS = [
    "__main__",
    "doctor",
    "compare",
    "run",
    "memory",
    "experimental",
    "integrations",
    "model_utils",
    "policy",
    "megatron",
    "verify",
    "dtensor",
    "tensor_parallel",
    "losses",
    "proof",
    "head",
    "sequence",
    "main_grad",
    "numerics",
    "distributed",
    "autograd",
    "broken_pipe",
    "call_stack",
    "optional_packages",
    "replace",
    "reference",
]
# Inside of these rooms a folder imports itself and the folders after it.
INSIDE = {
    "head": ["engine", "readouts", "kernels", "row_passes", "call"],
    "policy": ["worker", "backend", "megatron_model", "checkpoint", "refit", "ray", "data", "losses"],
}
MAY_IMPORT_MEGATRON = {"run", "doctor", "memory", "verify", "policy", "megatron", "experimental"}

# What stands in for Megatron's own, where a process has imported that.
ASKS_MEGATRON = {"tensor_parallel/generalized_tensor_parallelism.py"}

FILES = sorted(PACKAGE.rglob("*.py"))
ALL_FILES = FILES + sorted(ON_CPU.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(source: str):
    """Every module that a file imports, at its top or inside a function, by a statement or by its name in a string."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that one reads where a name lives"
            whole = node.module in ("megatron_ext", "megatron")  # of which rooms are imported, not names
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if whole else [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in BY_STRING:
            yield beginning(node.args[0], constants)


BY_STRING = ("import_module", "import_from_path", "__import__")


def beginning(node: ast.expr, constants: dict) -> str:
    """Return what is known of a string's beginning before the program runs."""
    if isinstance(node, ast.JoinedStr):
        first = node.values[0]
        known = beginning(first.value if isinstance(first, ast.FormattedValue) else first, constants)
        whole = len(node.values) > 1 and isinstance(first, ast.FormattedValue) and known
        return known + beginning(node.values[1], constants) if whole else known
    found = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return found if isinstance(found, str) else ""


def test_imports_of_every_kind_are_seen():
    source = (
        "import megatron_ext.head\nfrom megatron_ext import policy, VocabShard\nfrom megatron_ext.losses import grpo\n"
        "_ROOM = 'megatron_ext.doctor'\n"
        "def f(x):\n    importlib.import_module('megatron_ext.run')\n"
        "    import_module(f'megatron.core.{x}')\n    import_module(f'{_ROOM}.{x}')\n    import_module(x)\n"
    )
    assert sorted(filter(None, imported(source))) == [
        "megatron.core.",
        "megatron_ext.VocabShard",
        "megatron_ext.doctor.",
        "megatron_ext.head",
        "megatron_ext.losses",
        "megatron_ext.policy",
        "megatron_ext.run",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_only_downward(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} is a new room: give it a place in ROOMS and in CONTRIBUTING.md"
    for name in imported(path.read_text()):
        parts = name.split(".")
        if parts[0] == "megatron_ext" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) >= ROOMS.index(room), f"{room} imports {name}, which lies above it"
        if parts[0] == "megatron" and str(path.relative_to(PACKAGE)) not in ASKS_MEGATRON:
            assert room in MAY_IMPORT_MEGATRON, f"{room} imports {name}; only {MAY_IMPORT_MEGATRON} know Megatron"


@pytest.mark.parametrize("room", INSIDE)
def test_imports_inside_a_room_go_only_downward(room):
    folder, order = PACKAGE / room, INSIDE[room]
    paths = [path for path in FILES if folder in path.parents and path.parent != folder]
    assert {path.relative_to(folder).parts[0] for path in paths} == {*order}
    for path in paths:
        own = path.relative_to(folder).parts[0]
        for name in imported_names(path):
            if name.startswith(f"megatron_ext.{room}.") and (other := name.split(".")[2]) in order:
                assert order.index(other) >= order.index(own), f"{own} imports {name}, which lies above it"


def test_the_page_about_the_architecture_names_every_folder():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table, words = page.partition("Inside `head`")[0], " ".join(page.split())
    assert not [room for room in ROOMS if (PACKAGE / room).is_dir() and f"`{room}`" not in table]
    for order in INSIDE.values():
        assert ", ".join(f"`{name}`" for name in order) in words


# The names of the head that `tensor_parallel` may take are public ones, and only its cross entropy takes any.
FROM_THE_HEAD = {"tensor_parallel/cross_entropy.py": {"megatron_ext.head.CrossEntropy", "megatron_ext.head.Logits"}}


def test_tensor_parallel_takes_nothing_of_the_inside_of_the_head():
    paths = [path for path in FILES if room_of(path) == "tensor_parallel"]
    taken = {str(path.relative_to(PACKAGE)): {*imported_names(path)} for path in paths}
    found = {path: {name for name in names if name.startswith("megatron_ext.head")} for path, names in taken.items()}
    assert {path: names for path, names in found.items() if names} == FROM_THE_HEAD


def test_no_modules_import_each_other():
    """Packages' `__init__.py` aside, which import what their modules define."""
    programs = (ROOT / "benchmarks").rglob("*.py")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (*ALL_FILES, *programs)}
    uses = {
        name: {full for used in imported_names(path) for full in (used, used.rpartition(".")[0]) if full in modules}
        for name, path in modules.items()
    }
    ordered: list[str] = []
    while left := [name for name in uses if name not in ordered]:
        free = [name for name in left if uses[name] - {name} <= set(ordered)]
        assert free, f"these import each other in a circle, or something that does: {left}"
        ordered += free


def imported_names(path: Path):
    """Yield the names that a file imports from modules, as `module.name`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", sorted({path.parent for path in ALL_FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_can_be_read_at_a_glance(folder):
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 12, f"{folder} holds {len(modules)} modules: give some of them a folder of their own"
    assert len(modules) < 2 or '"""' in (folder / "__init__.py").read_text(), f"{folder}/__init__.py says what is in it"


# Signatures that are others' (Megatron's, Transformer Engine's, NeMo-RL's, TRL's, transformers', Mamba's), or that
# users call by keywords as they call torch.nn.functional's.
THEIRS = [
    *("integrations/trl.py", "model_utils/*", "tensor_parallel/*", "megatron/attention.py"),
    *("../megatron_on_cpu/state_space.py", "../megatron_on_cpu/transformer_engine/*"),
    *("dtensor/attention.py", "dtensor/parallelize.py _parallelize_model"),
]
BY_KEYWORDS = [
    "head/cross_entropy.py linear_*",
    "head/distributions.py linear_sampled_log_probs",
    "head/*.py *log_probs",
    "head/*.py vocab_parallel_cross_entropy",
    "dtensor/causal_lm.py causal_lm_*",
    "dtensor/output/fused_loss.py use_fused_loss",
    "sequence/attention.py attend",
    "policy/ray_policy.py __init__",
]
# Triton's kernels, and what launches them: torch.library's operators take tensors and numbers only.
LAUNCHES = [
    "head/kernels/*",
    "numerics/fixed_order_kernels.py",
    "head/row_passes/passes.py row_*",
    "head/row_passes/passes.py product_*",
]


def test_options_of_many_parameters_are_objects():
    """No function of our own has more than eight parameters."""
    for path in ALL_FILES:
        name = os.path.relpath(path, PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len(given) - (bool(given) and given[0].arg in ("self", "cls", "ctx"))
            allowed = any(
                fnmatch(f"{name} {node.name}", room if " " in room else f"{room} *")
                for room in (*THEIRS, *BY_KEYWORDS, *LAUNCHES)
            )
            assert count <= 8 or allowed, f"{name}: {node.name} takes {count} arguments; put its options into an object"


# Outside of the head: what it is compared with, the options of the launcher and of the patch, an output layer of
# Megatron's that has a softcap, and what a model of transformers or TRL's argument says of one.
NAME_THE_SOFTCAP = {
    "reference.py",
    "run.py",
    "experimental/pipeline_vocabulary/linear_steps.py",
    "megatron/output_layer.py",
    "megatron/fused_loss/fusion_decision.py",
    "megatron/fused_loss/head_settings.py",
    "dtensor/output/reads.py",
    "integrations/trl.py",
}
OF_ATTENTION = {"sequence/attention.py", "dtensor/attention.py"}  # which has a softcap of its own


def test_the_heads_facts_travel_as_one_value():
    """A new fact of the head is a change of the head, and of few files beside it."""
    found = {str(path.relative_to(PACKAGE)) for path in FILES if "softcap" in path.read_text()}
    assert {name for name in found if not name.startswith("head/")} - OF_ATTENTION == NAME_THE_SOFTCAP


COMMUNICATION = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "send",
    "recv",
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_experiments_are_imported_by_the_launcher_alone(path):
    """So that the package can be read, and a part of it taken, without them."""
    if room_of(path) not in ("experimental", "run"):
        assert not [name for name in imported(path.read_text()) if name.startswith("megatron_ext.experimental")]


@pytest.mark.parametrize("path", sorted(ON_CPU.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_megatron_on_cpu_imports_nothing_of_megatron_ext(path):
    assert not [name for name in imported(path.read_text()) if name.split(".")[0] == "megatron_ext"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_collectives_py_communicates(path):
    if path == PACKAGE / "distributed" / "collectives.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COMMUNICATION:
            owner = ast.unparse(node.func.value)
            assert owner not in ("dist", "torch.distributed", "distributed_c10d", "functional"), (
                f"{path.name}:{node.lineno} calls {owner}.{node.func.attr}; use megatron_ext.distributed.collectives"
            )


def test_imports_with_torch_alone():
    """The package and its core rooms load no Megatron, Triton or transformers."""
    code = (
        "import sys\n"
        "import torch  # from 2.15 on it may load Triton by itself\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in BANNED: raise ImportError(f'{name} must stay optional')\n"
        "BANNED = {'megatron', 'triton', 'transformers', 'transformer_engine', 'apex', 'ray', 'accelerate', 'trl'}\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import megatron_ext, megatron_ext.head, megatron_ext.tensor_parallel, megatron_ext.distributed\n"
        "import megatron_ext.sequence, megatron_ext.reference, megatron_on_cpu\n"
        "import megatron_ext.model_utils, megatron_ext.dtensor, megatron_ext.policy, megatron_ext.losses\n"
        "from megatron_ext.integrations import nemo_rl, trl, verl\n"
        "loaded = BANNED & {name.split('.')[0] for name in sys.modules} - before\n"
        "assert not loaded, loaded\n"
    )
    alone("-c", code)
