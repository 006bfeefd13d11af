"""Names and signatures of Megatron-Core's tensor-parallel package, read from source, and a record of seven versions.

The record, `megatron_signatures.tsv`, has a line for each name that came, changed or went with a version: version,
name, signature ("" for what is not a function, "-" for what went). To write it anew, a source folder for each version:

    python -m tests.tensor_parallel.signatures 0.14.0=SITE_PACKAGES ... 0.20.0=MEGATRON_LM
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = ["cross_entropy", "data", "inference_layers", "layers", "mappings", "random", "utils"]
RECORD = Path(__file__).with_name("megatron_signatures.tsv")


def definitions(body, prefix) -> Iterator[tuple[str, ast.AST]]:
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


def signature(node) -> str:
    """Return the signature of a function's node, without annotations; "" of anything else."""
    if not isinstance(node, ast.FunctionDef):
        return ""
    arguments = node.args
    for place in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if place is not None:
            place.annotation = None
    return f"({ast.unparse(arguments)})"


def signatures(package: Path) -> dict[str, str]:
    """Return signatures by dotted name, in the order of the source; of a name that is defined twice the first."""
    found: dict[str, str] = {}
    for module in MODULES:
        path = package / f"{module}.py"
        for name, node in definitions(ast.parse(path.read_text()).body, f"{module}.") if path.exists() else ():
            found.setdefault(name, signature(node))
    return found


def recorded() -> dict[str, dict[str, str]]:
    """`signatures` of every recorded version, from the oldest to the newest."""
    versions: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for line in RECORD.read_text().splitlines():
        version, name, text = line.split("\t")
        if version not in versions:
            names = versions[version] = dict(names)
        if text == "-":
            del names[name]
        else:
            names[name] = text
    return versions


def main(sources: list[str]) -> None:
    lines: list[str] = []
    before: dict[str, str] = {}
    for source in sources:
        version, _, folder = source.partition("=")
        names = signatures(Path(folder) / "megatron" / "core" / "tensor_parallel")
        assert names, f"{folder} has no megatron.core.tensor_parallel"
        lines += [f"{version}\t{name}\t{text}" for name, text in names.items() if before.get(name) != text]
        lines += [f"{version}\t{name}\t-" for name in before if name not in names]
        before = names
    RECORD.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
