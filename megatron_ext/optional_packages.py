"""Reasons why an optional package cannot be used: it is missing or broken."""

import importlib


def why_not_importable(name: str) -> str | None:
    """Import the module `name`; return in a sentence why it cannot be imported, or None.

    A broken installation may raise any error: Transformer Engine a RuntimeError or a FileNotFoundError if its libraries
    do not fit, the dynamic linker an ImportError or an OSError.
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
    """Describe, in a sentence, an installed package whose import raised `error`."""
    lines = str(error).strip().splitlines() or [""]
    return f"{package} is installed and cannot be loaded ({type(error).__name__}: {lines[0]})"
