"""The version of Megatron-Core, and the places in it that our ways in depend on. No other file knows versions.

A `Seam` is a place: its address, and the versions that have it. The table `SEAMS` lists them for each way in: the
patch, the layer specs and the substitution. Checks look at the imported Megatron-Core itself, so that an untested
version is judged by its names and signatures; the versions in the table only appear in messages.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ext.call_stack import caller_outside
from megatron_ext.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

# `make test-versions` runs the first two, from PyPI; `make test` the third; `make test-source` the others, from their
# sources. The last one is the main branch.
TESTED = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0")


# ---- which Megatron-Core this is


def megatron_version() -> str:
    """Return the version of the imported package, whatever pip's metadata says."""
    return megatron.core.__version__


def megatron_path() -> str:
    """Return the folder from which `megatron.core` was imported."""
    return str(Path(inspect.getfile(megatron.core)).parent)


def is_tested(version: str) -> bool:
    """Return whether a version lies in the tested range, from the first to the last minor version of `TESTED`."""
    return _minor(TESTED[0]) <= _minor(version) <= _minor(TESTED[-1])


@functools.cache
def warn_if_untested() -> None:
    """Warn, once per process, if this Megatron-Core is older or newer than the versions that the tests run."""
    version = megatron_version()
    if not is_tested(version):
        warnings.warn(
            f"megatron_ext is tested with Megatron-Core {TESTED[0]} to {TESTED[-1]}, and this is {version}: before you "
            f"rely on the fused head, compare the losses of a few steps with and without it; fusion_report() of "
            f"megatron_ext.megatron.fusion_report says what was fused",
            stacklevel=caller_outside()[1],
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ---- Transformer Engine


def why_not_with_transformer_engine(version: str | None) -> str | None:
    """Return why this Megatron-Core does not run on the installed Transformer Engine; None if it does, or may.

    The versions that Megatron-Core requires are read from pip's metadata, if these are of the imported version.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    if not getattr(engine, "HAVE_TE", True):
        return (
            f"Megatron-Core {megatron_version()} could not import it and goes without; import {engine.__name__} to see"
        )
    declared = _declared("transformer-engine")
    if version is None or declared is None or declared.contains(version, prereleases=True):
        return None
    return f"Megatron-Core {megatron_version()} declares transformer-engine{declared}, and {version} is installed"


def require_transformer_engine(needed_for: str) -> None:
    """Raise an error for `needed_for`, which needs Megatron-Core's modules of Transformer Engine, if they are missing.

    Raises:
        ImportError: Megatron-Core could not import Transformer Engine.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    if not getattr(engine, "HAVE_TE", True):
        raise ImportError(
            f"{needed_for} needs Transformer Engine, which Megatron-Core {megatron_version()} could not import: "
            "install it; without a GPU megatron_on_cpu(transformer_engine=True) needs only its Python part"
        )


def _declared(package: str) -> SpecifierSet | None:
    """Return the versions of a package that the metadata of the imported Megatron-Core require; None without any."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("megatron-core") == megatron_version():
            wanted = map(Requirement, importlib.metadata.requires("megatron-core") or [])
            return next((one.specifier for one in wanted if one.name == package and one.specifier), None)
    return None


# ---- seams: the table and its functions


class Seam(NamedTuple):
    """A place in Megatron-Core that our code depends on.

    Attributes:
        address: "module:name.name", from `megatron.core` on; "...(argument)" where it is an argument of a function.
        since: the first minor version that has it; None: all tested versions do.
    """

    address: str
    since: str | None = None

    @property
    def versions(self) -> str:
        return f"{self.since} and newer" if self.since else "all"

    def is_there(self) -> bool:
        """Return whether the imported Megatron-Core has the place; imports the place's module."""
        path, _, argument = self.address.rstrip(")").partition("(")
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(f"megatron.core.{module}")
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return False
        return not argument or argument in inspect.signature(found).parameters


HYBRID_MODEL = Seam("models.hybrid.hybrid_model:HybridModel", since="0.18")
EXPERTS_BUILDER = Seam("transformer.moe.moe_layer:ExpertsBuilder", since="0.17")
LAYERS = Seam("tensor_parallel.layers:ColumnParallelLinear")
SPEC_BACKEND = Seam("models.backends:BackendSpecProvider")
MLP_SPEC = Seam("models.gpt.gpt_layer_specs:get_mlp_module_spec_for_backend")

# The places that each way in needs; `fused_loss/model_methods.py` lists what the head needs of a model's class.
SEAMS: dict[str, tuple[Seam, ...]] = {
    "patch": (
        Seam("models.common.language_module.language_module:LanguageModule.compute_language_model_loss(labels)"),
        Seam("pipeline_parallel.schedules:drain_embedding_wgrad_compute"),
        Seam("models.gpt:GPTModel.forward(labels)"),
    ),
    "spec": (
        *(SPEC_BACKEND, MLP_SPEC, LAYERS),
        Seam("transformer.transformer_block:LayerNormImpl"),
        Seam("transformer.transformer_layer:get_transformer_layer_offset"),
    ),
    "hybrid spec": (SPEC_BACKEND, MLP_SPEC, HYBRID_MODEL, LAYERS),
    "substitution": (Seam("utils:drain_embedding_wgrad_compute"), LAYERS),
}


def missing_seams(way: str) -> list[str]:
    """List the seams that a way in needs and this Megatron-Core lacks, each with the versions that have it."""
    return [f"{seam.address} ({seam.versions})" for seam in SEAMS[way] if not seam.is_there()]


def why_missing(way: str) -> str | None:
    missing = missing_seams(way)
    return f"this Megatron-Core has no {', '.join(missing)}" if missing else None


# ---- our layers in Megatron's place: the specs and the substitution


PATCH_INSTEAD = (
    "Keep Megatron's own layers and take the fused head alone: "
    "megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion()"
)


def unknown_arguments(theirs: Any, ours: Any) -> list[str]:
    """List the arguments of Megatron's function or class that ours does not take."""
    if theirs is ours:
        return []
    known = inspect.signature(ours).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name for p in inspect.signature(theirs).parameters.values() if p.name not in known and p.kind not in starred
    ]


def why_no_patch() -> str | None:
    """Return why the fused head cannot go into this Megatron-Core's models; None if it can."""
    return why_missing("patch")


def why_no_spec(way: str = "spec") -> str | None:
    """Return why our layers cannot be named in a layer spec ("spec" or "hybrid spec"); None if they can."""
    if (missing := why_missing(way)) is not None:
        return missing
    theirs = importlib.import_module("megatron.core.tensor_parallel.layers")
    unknown = [
        f"{ours.__name__}({argument}=...)"
        for ours in (ColumnParallelLinear, RowParallelLinear)
        for argument in unknown_arguments(getattr(theirs, ours.__name__), ours)
    ]
    return f"our layers do not know {', '.join(unknown)}" if unknown else None


def require_spec(way: str) -> None:
    """Raise an error if `why_no_spec` gives a reason.

    Raises:
        ImportError: our layers cannot be named in a spec of this kind; the message says why, and what works instead.
    """
    reason = why_no_spec(way)
    if reason is None:
        return
    instead = PATCH_INSTEAD
    if way == "hybrid spec" and why_no_spec("spec") is None:
        instead = "Build a GPTModel with megatron_ext.megatron.layer_specs.gpt_layer_spec instead"
    raise ImportError(
        f"megatron_ext's layer specs do not fit Megatron-Core {megatron_version()} ({megatron_path()}): {reason}. "
        f"{instead}"
    )
