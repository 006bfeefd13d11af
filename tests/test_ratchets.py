"""Counts of what shall become less: each may fall, and is then written down here; none may rise.

`python -m tests.test_ratchets` prints them all as they are now.
"""

import ast
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_ext", "megatron_on_cpu")

CLASS_NAMES_TWICE = 0
# Docstrings that begin with a pronoun, a question word or a preposition: the noun or the verb is left out.
DOCSTRINGS_WITHOUT_NOUN = 0
LONG_TEST_NAMES = 0
# Types whose names are no nouns of the field; the public one stays.
VAGUE_TYPES = {"megatron_ext/head/readouts/kept.py: Kept"}
# Lines of Python in each folder of the packages, and in the files beside them.
LINES = {
    "megatron_ext/*.py": 1498,
    "megatron_ext/distributed": 849,
    "megatron_ext/dtensor": 4964,
    "megatron_ext/experimental": 2552,
    "megatron_ext/head": 10743,
    "megatron_ext/integrations": 709,
    "megatron_ext/losses": 1398,
    "megatron_ext/megatron": 4597,
    "megatron_ext/memory": 674,
    "megatron_ext/model_utils": 1482,
    "megatron_ext/numerics": 1098,
    "megatron_ext/policy": 7061,
    "megatron_ext/proof": 755,
    "megatron_ext/sequence": 1529,
    "megatron_ext/tensor_parallel": 4636,
    "megatron_ext/verify": 391,
    "megatron_on_cpu/*.py": 1433,
    "megatron_on_cpu/nccl_rules": 2087,
    "megatron_on_cpu/transformer_engine": 2930,
}

_PRONOUNS = ("What", "Of", "Those", "That", "How", "Whether", "Which", "Where", "As", "Why", "Who", "Whoever")
_PRONOUNS += ("Whatever", "It", "Its", "They", "Inside", "There", "Here", "If", "When", "While", "Not", "Because")
_PREPOSITIONS = ("In", "By", "With", "For", "From", "On", "To", "At", "Without", "Under", "Over", "Between", "Beside")
_PREPOSITIONS += ("Behind", "Since", "Until", "Unless", "Once", "After", "Before")
_PROGRAMS = ("benchmarks", "examples", "docs")
_LETTERS = 60
_VAGUE = ("Way", "Asked", "Passed", "Left", "Given", "Kept", "Rule", "Call", "Place", "Known", "Aside", "Whereabouts")


def sources(*folders: str) -> list[Path]:
    return sorted(chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders))


def class_names_twice() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sources("megatron_ext"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return {name: files for name, files in sorted(found.items()) if len(set(files)) > 1}


def docstrings_without_noun(*folders: str) -> list[str]:
    found = []
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = re.match(r"\w+\b(?!-)", ast.get_docstring(node) or "")
                if first and first[0] in _PRONOUNS + _PREPOSITIONS:
                    found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}")
    return found


def vague_types() -> set[str]:
    found = set()
    for path in sources(*PACKAGES, *_PROGRAMS):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            names += [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            found |= {f"{path.relative_to(ROOT)}: {name}" for name in names if name in _VAGUE}
    return found


def long_test_names() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in sources("tests")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.name.startswith("test_") and len(node.name) > _LETTERS]


def lines_of_folders() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for path in sources(*PACKAGES):
        package, *inner = path.relative_to(ROOT).parts
        found[f"{package}/{inner[0] if len(inner) > 1 else '*.py'}"] += len(path.read_text().splitlines())
    return dict(sorted(found.items()))


def test_a_class_name_stands_in_one_file():
    assert len(class_names_twice()) <= CLASS_NAMES_TWICE, class_names_twice()


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = docstrings_without_noun(*PACKAGES, *_PROGRAMS, "tests")
    assert len(found) <= DOCSTRINGS_WITHOUT_NOUN, found


def test_types_are_named_by_nouns_of_the_field():
    assert vague_types() == VAGUE_TYPES


def test_names_of_tests_are_short():
    found = long_test_names()
    assert len(found) <= LONG_TEST_NAMES, found


def test_no_folder_grows():
    """A feature that is worth its lines changes the number here, where a reader of the change sees it."""
    found = lines_of_folders()
    assert found.keys() == LINES.keys(), found.keys() ^ LINES.keys()
    assert not {folder: count for folder, count in found.items() if count > LINES[folder]}


if __name__ == "__main__":
    print(class_names_twice())
    print(*docstrings_without_noun(*PACKAGES, *_PROGRAMS, "tests"), sep="\n")
    print(*long_test_names(), sep="\n")
    print(lines_of_folders())
