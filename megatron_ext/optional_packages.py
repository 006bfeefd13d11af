"""Reasons why an optional package cannot be used: it is missing or broken."""

import importlib


def why_not_importable(name: str) -> str | None:
    """Return why the module `name` cannot be imported, in a sentence; None if it can. Imports it.

    A broken installation raises what it likes: Transformer Engine a RuntimeError or a FileNotFoundError where its
    libraries don't fit, the dynamic linker an ImportError or an OSError.
    """
    package = name.partition(".")[0]
    try:
        importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or package).partition(".")[0] == package:
            return f"{package} is not installed ({error})"
        return why_not_loaded(package, error)
    return None


def why_not_loaded(package: str, error: BaseException) -> str:
    """One sentence about a package that is installed and whose import raised `error`."""
    lines = str(error).strip().splitlines() or [""]
    return f"{package} is installed and cannot be loaded ({type(error).__name__}: {lines[0]})"
