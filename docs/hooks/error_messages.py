"""The messages of errors and warnings that the package writes itself, read from its sources.

MkDocs calls `on_page_markdown`, which lists them on the page about troubleshooting, so that a search of the site for
the words of a message finds it. The tests call `messages()` to see that what the page quotes is still there.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "megatron_ext", ROOT / "megatron_on_cpu"]
MARK = "The site that `make docs` builds lists every message here."
# Folders of the package in the order of the page, with the title of their messages and the page that explains them.
AREAS = {
    "head": ("Losses and log-probabilities", "api/head.md"),
    "losses": ("RL and distillation losses", "api/losses.md"),
    "model_utils": ("NeMo-RL's functions", "api/model_utils.md"),
    "integrations": ("NeMo-RL, verl, TRL", "rl.md"),
    "megatron": ("Megatron-Core", "megatron.md"),
    "tensor_parallel": ("Tensor parallelism", "api/tensor_parallel.md"),
    "dtensor": ("Hugging Face models", "hugging_face.md"),
    "policy": ("Policy worker", "policy_worker.md"),
    "sequence": ("Sequences and packing", "api/sequence.md"),
    "experimental": ("Experimental", "pipeline.md"),
    "megatron_on_cpu": ("Megatron-Core on a CPU", "api/megatron_on_cpu.md"),
    "": ("All else", "api/index.md"),
}
_WARN = {"warn", "say_once", "_say_once"}
# What is wrong or right, and the message or a function that makes it.
_RAISE_IF = {"raise_if", "raise_unless", "fault_unless", "demand"}
_FEWEST_WORDS = 4


class Message(NamedTuple):
    area: str  # a folder of AREAS, "" for the others
    kind: str  # the exception's class, or "Warning"
    text: str  # with "..." where a value stands


def messages() -> list[Message]:
    """All messages with fixed words, each once, in the order of files."""
    found = []
    for path in _sources():
        package, first = path.relative_to(ROOT).parts[:2]
        area = first if package == "megatron_ext" else package
        for kind, text in _written(_parsed(path)):
            if len(text.replace("...", " ").split()) >= _FEWEST_WORDS:
                found.append(Message(area if area in AREAS else "", kind, text))
    return list(dict.fromkeys(found))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: the mark on a page becomes the list of all messages."""
    return markdown.replace(MARK, "\n".join(_lines())) if MARK in markdown else markdown


def _sources() -> list[Path]:
    """Every file of the packages, in one order."""
    return [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def _lines() -> Iterator[str]:
    by_area: dict[str, list[Message]] = {area: [] for area in AREAS}
    for message in messages():
        by_area[message.area].append(message)
    for area, (title, page) in AREAS.items():
        yield f"\n### Messages: {title}\n\nExplained in [{title}]({page}).\n"
        for message in by_area[area]:
            ticks = "``" if "`" in message.text else "`"
            yield f"- {message.kind}: {ticks}{message.text}{ticks}"


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _constants() -> dict[str, str]:
    """The texts that modules of the package give names to."""
    return {
        ast.unparse(node.targets[0]): node.value.value
        for path in _sources()
        for node in _parsed(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if "Error" in name and node.args:
                yield name, _text(node.args[0])
            elif name in _RAISE_IF and len(node.args) > 1:
                yield "ValueError", _text(node.args[1])
            elif name in _WARN and node.args:
                yield "Warning", _text(node.args[0])


def _text(node: ast.expr) -> str:
    """The fixed words of a message, "..." for each value; empty for what is no text."""
    if isinstance(node, ast.Lambda):
        return _text(node.body)
    if isinstance(node, ast.Name | ast.Attribute):
        return _constants().get(ast.unparse(node).rpartition(".")[2], "")
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return ""
