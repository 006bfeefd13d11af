"""Packages that are used where they are installed, and done without where they are missing or broken."""

import functools
import importlib
import warnings
from types import ModuleType


@functools.cache
def optional_module(name: str, *, after: str | None = None, instead: str) -> ModuleType | None:
    """The module `name`; None where it is missing, and where its package is there and cannot be loaded.

    A broken installation raises what it likes: Transformer Engine a RuntimeError or a FileNotFoundError where its
    libraries don't fit, the dynamic linker an ImportError or an OSError. That is said once, in a warning.

    Args:
        after: the package to import first: some load the libraries that `name` is linked with.
        instead: what is done without it, which ends the warning's sentence.
    """
    try:
        if after is not None:
            importlib.import_module(after)
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"{why_not_loaded(after or name, error)}: {instead}", stacklevel=2)
        return None


def why_not_loaded(package: str, error: BaseException) -> str:
    """One sentence about a package whose import raised `error`."""
    lines = str(error).strip().splitlines() or [""]
    return f"{package} is installed and cannot be loaded ({type(error).__name__}: {lines[0]})"
