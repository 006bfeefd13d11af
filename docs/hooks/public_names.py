"""Fails the build of the site where a public name has no docstring, or is on no page of the API reference.

Sources are read and not imported. Public is what is in `__all__` of the packages below, and what the pages of docs/api
name. Of each, the arguments that the docstring describes must be those of the signature.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "megatron_ext",
    "megatron_ext.head",
    "megatron_ext.losses",
    "megatron_ext.model_utils",
    "megatron_ext.policy",
    "megatron_ext.dtensor",
    "megatron_ext.tensor_parallel",
    "megatron_on_cpu",
    "megatron_ext.experimental.pipeline_vocabulary",
    "megatron_ext.distributed",
]


def on_pre_build(**_: Any) -> None:
    """MkDocs' event."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    faults = list(_faults({name: loader.load(name) for name in ("megatron_ext", "megatron_on_cpu")}))
    if faults:
        raise PluginError("\n".join(["the API reference is not complete:", *faults]))


def _faults(packages: dict[str, Any]) -> Iterator[str]:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    names = re.findall(r"^::: (megatron_(?:ext|on_cpu)\.\S+)$", pages, re.M)
    yield from (f"{name} is there twice" for name in sorted({name for name in names if names.count(name) > 1}))
    described = {_target(_found(packages, name)).path for name in names}
    for path in PACKAGES:
        module = _found(packages, path)
        for name in module.exports or []:
            if _target(module[str(name)]).path not in described:
                yield f"{path}.{name} is on no page of docs/api"
    for name in names:
        thing = _target(_found(packages, name))
        yield from _faults_of(name, thing)
        if thing.is_class:
            for method in thing.members.values():
                if method.is_function and not method.name.startswith("_"):
                    yield from _faults_of(f"{name}.{method.name}", method, thing)


def _found(packages: dict[str, Any], path: str) -> Any:
    """The module, class or function of this whole path."""
    package, _, rest = path.partition(".")
    return packages[package][rest] if rest else packages[package]


def _faults_of(name: str, thing: Any, owner: Any = None) -> Iterator[str]:
    doc = thing.docstring
    if doc is None:
        base = [] if owner is None else [cls for cls in owner.mro() if thing.name in cls.members]
        known = any(cls.members[thing.name].docstring is not None for cls in base) or thing.name in _BY_THE_CLASS
        if not known:
            yield f"{name} has no docstring"
        return
    if thing.is_attribute:
        return
    unknown = _described(doc.value) - _arguments(thing)
    if unknown:
        yield f"{name} describes arguments that it does not take: {', '.join(sorted(unknown))}"


_BY_THE_CLASS = {"forward", "extra_repr"}  # the docstring of an autograd function, or of a module, says what they do


def _target(thing: Any) -> Any:
    """Return what a name stands for; of a module and a function in it with one name the function, as an import does."""
    found = thing.final_target if thing.is_alias else thing
    return found.members[found.name] if found.is_module and found.name in found.members else found


def _arguments(thing: Any) -> set[str]:
    """Return the arguments of a function; of a class those of its constructor, its fields and its bases' fields."""
    if not thing.is_class:
        return {parameter.name for parameter in thing.parameters}
    classes = [thing, *thing.mro()]
    found = {name for cls in classes for name, member in cls.members.items() if member.is_attribute}
    for cls in classes:
        for name in ("__init__", "forward", "__call__"):
            if name in cls.members and cls.members[name].is_function:
                found |= {parameter.name for parameter in cls.members[name].parameters}
    return found


def _described(docstring: str) -> set[str]:
    """The names under "Args:", which stand alone or share a line."""
    lines = inspect.cleandoc(docstring).partition("Args:\n")[2].split("\n\n")[0].splitlines()
    named = (re.match(r"    ((?:\*{0,2}\w+, )*\*{0,2}\w+): ", line) for line in lines)
    return {word.strip("* ") for match in named if match for word in match[1].split(",")}
