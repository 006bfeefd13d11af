"""The defaults of arguments that users leave out: `tests/public_defaults.txt` has those of all public names.

A changed default changes users' numbers without a word. `python -m tests.test_public_defaults` writes the file anew; a
line that changes or goes belongs in the changelog.
"""

import enum
import importlib
import inspect
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "public_defaults.txt"
NAMES = Path(__file__).parent / "public_names.txt"


def functions():
    """Every public function and class that the package defines, and the public methods of these."""
    for line in NAMES.read_text().splitlines():
        module, names = line.split(": ")
        found = importlib.import_module(module)
        for name in names.split():
            thing = getattr(found, name)
            if not callable(thing) or not getattr(thing, "__module__", "").startswith("megatron_"):
                continue
            if inspect.isclass(thing) and issubclass(thing, enum.Enum):  # whose arguments are Python's
                continue
            yield thing
            if inspect.isclass(thing):
                methods = inspect.getmembers(thing, inspect.isfunction)
                yield from (method for name, method in methods if not name.startswith("_"))


def parameters(function):
    """Return the parameters of a function of ours that says them; none of another."""
    try:
        ours = (function.__module__ or "").startswith("megatron_")
        return inspect.signature(function).parameters.values() if ours else ()
    except ValueError:
        return ()


def defaults():
    """A line for each of them that has defaults: numbers, words, booleans and None."""
    lines = set()
    for function in functions():
        plain = [
            p for p in parameters(function) if p.default is None or isinstance(p.default, bool | int | float | str)
        ]
        if plain:
            lines.add(
                f"{function.__module__}.{function.__qualname__}: {', '.join(f'{p.name}={p.default!r}' for p in plain)}"
            )
    return sorted(lines)


def test_defaults_of_public_arguments_stay():
    lost = set(FILE.read_text().splitlines()) - set(defaults())
    assert not lost, f"changed or gone: {sorted(lost)}"


# They hand arguments on to a caller's function, have the signature of another package's, or take any number of parts.
_HAND_ON = {
    "checkpoint",
    "CheckpointWithoutOutput.checkpoint",
    "forward_with_fused_head",
    "ExtBesideTransformerEngine.grouped_mlp_modules",
    "ExtBesideTransformerEngine.layer_norm",
    "ProofBasis",
}


def test_public_functions_name_every_argument():
    """A misspelt one is refused, and an editor completes the others; `**name: Unpack[...]` has names too."""
    found = set()
    for function in functions():
        several = [x for x in parameters(function) if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
        if any(x.annotation is Any for x in several) and function.__name__ not in ("forward", "backward"):
            found.add(function.__qualname__)
    assert found == _HAND_ON


if __name__ == "__main__":
    FILE.write_text("\n".join(defaults()) + "\n")
