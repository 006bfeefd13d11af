"""Checks of a checkpoint's facts (all that is no tensor) against the worker's, before anything is changed."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COUNTS = {"last_epoch": -1, "_step_count": 0, "good_steps": 0}  # by name, the least valid value
_AT_LEAST_0 = ("lr", "initial_lr", "base_lrs", "_last_lr", "eps", "weight_decay", "betas")


def refuse_fact(path: str | Path, name: str, value: Any, rule: str) -> None:
    """Raise ValueError for a fact of a checkpoint that cannot be loaded."""
    raise ValueError(f"the checkpoint {path} has {name} = {value!r}: it must be {rule}; load another one")


def check_kinds(path: str | Path, facts: Any) -> None:
    """Raise ValueError unless `facts` has exactly the keys of an optimizer's, and a valid state of a `LossScale`
    (empty: a scale that is always 1)."""
    names = sorted(map(str, facts)) if isinstance(facts, Mapping) else f"a {type(facts).__name__}"
    if names not in (["groups", "loss_scale", "scheduler"], ["loss_scale", "numbers", "scheduler"]):
        refuse_fact(path, "facts", names, "loss_scale, scheduler, and groups or numbers")
    if (state := facts["loss_scale"]) != {}:
        check_like(path, "loss_scale", state, {"value": 1.0, "good_steps": 0})
        if state["value"] <= 0:
            refuse_fact(path, "loss_scale.value", state["value"], "above 0")


def check_like(path: str | Path, name: str, saved: Any, own: Any) -> None:
    """Raise ValueError unless `saved` has the types, keys and lengths of `own`, part by part, and finite numbers."""
    last = name.rpartition(".")[2]
    if last in _COUNTS:
        if isinstance(saved, bool) or not isinstance(saved, int) or saved < _COUNTS[last]:
            refuse_fact(path, name, saved, f"an integer of at least {_COUNTS[last]}")
    elif isinstance(own, Mapping):
        if type(saved) is not type(own) or (not isinstance(own, Counter) and saved.keys() != own.keys()):
            refuse_fact(path, name, saved, f"a {type(own).__name__} with the keys {sorted(map(str, own))}")
        for key, value in saved.items():
            check_like(path, f"{name}.{key}", value, own.get(key, 0))
            if isinstance(own, Counter):
                check_like(path, f"a key of {name}", key, 0)
    elif isinstance(own, list | tuple):
        if type(saved) is not type(own) or len(saved) != len(own):
            refuse_fact(path, name, saved, f"a {type(own).__name__} of {len(own)}")
        for i, (there, here) in enumerate(zip(saved, own, strict=True)):
            check_like(path, f"{name}.{i}", there, here)
    elif own is None or isinstance(own, bool):
        if not (saved is None or isinstance(saved, bool)) and not (own is None and _is_finite(saved)):
            refuse_fact(path, name, saved, "None, True or False" if own is not None else "None, or a finite number")
    elif isinstance(own, int | float):
        if not _is_finite(saved):
            refuse_fact(path, name, saved, "a finite number")
        inside = name.split(".")[-2:]
        if saved < 0 and not own < 0 and any(part in _AT_LEAST_0 for part in inside):
            refuse_fact(path, name, saved, "at least 0")
        if saved >= 1 and "betas" in inside:
            refuse_fact(path, name, saved, "below 1")
    elif type(saved) is not type(own):
        refuse_fact(path, name, saved, f"a {type(own).__name__}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
