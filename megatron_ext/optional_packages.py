"""Packages that are used where they are installed, and done without where they are missing or broken."""

import functools
import importlib
import warnings
from types import ModuleType


def why_not_importable(name: str, *, after: str | None = None) -> str | None:
    """Why the module `name` cannot be imported, in a sentence; None where it can. Imports it.

    A broken installation raises what it likes: Transformer Engine a RuntimeError or a FileNotFoundError where its
    libraries don't fit, the dynamic linker an ImportError or an OSError.

    Args:
        after: the package to import first: some load the libraries that `name` is linked with.
    """
    package = (after or name).partition(".")[0]
    try:
        if after is not None:
            importlib.import_module(after)
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{package} is not installed ({error})"
    except Exception as error:
        return why_not_loaded(package, error)
    return None


def why_not_loaded(package: str, error: BaseException) -> str:
    """One sentence about a package that is installed and whose import raised `error`."""
    lines = str(error).strip().splitlines() or [""]
    return f"{package} is installed and cannot be loaded ({type(error).__name__}: {lines[0]})"


@functools.cache
def optional_module(name: str, *, after: str | None = None, instead: str) -> ModuleType | None:
    """The module `name`; None where it is missing, and where it cannot be loaded, which is said once, in a warning.

    Args:
        after: as for `why_not_importable`.
        instead: what is done without it, which ends the warning's sentence.
    """
    reason = why_not_importable(name, after=after)
    if reason is None:
        return importlib.import_module(name)
    if "is not installed" not in reason:
        warnings.warn(f"{reason}: {instead}", stacklevel=2)
    return None
