"""Numbers, strings and collections as JSON, read back with their types; nothing in a file is executed.

JSON has no tuples, and its keys are strings. A type that it lacks is written as `{"__type__": name, "items": [...]}`,
where the items of a mapping are pairs.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

_TYPE = "__type__"
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (tuple, set, dict, OrderedDict, Counter)}


def to_json(value: Any, name: str = "facts") -> Any:
    """Convert `value` for `json`; `from_json` turns the result back. Errors call the value `name`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [to_json(x, f"{name}[{i}]") for i, x in enumerate(value)]
    if kind is dict and _TYPE not in value and all(type(key) is str for key in value):
        return {key: to_json(x, f"{name}[{key!r}]") for key, x in value.items()}
    if _KINDS.get(kind.__name__) is kind:
        if isinstance(value, Mapping):
            items = [[to_json(key, name), to_json(x, f"{name}[{key!r}]")] for key, x in value.items()]
        else:
            items = to_json(list(value), name)
        return {_TYPE: kind.__name__, "items": items}
    raise ValueError(
        f"{name} is {value!r}, a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: make it a "
        f"Python number, a string, or a list, tuple or dict of those"
    )


def from_json(value: Any) -> Any:
    """Convert what `to_json` returned back to the value."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, Mapping):
        return value
    if _TYPE not in value:
        return {key: from_json(x) for key, x in value.items()}
    kind, items = value[_TYPE], from_json(value["items"])
    if kind not in _KINDS:
        raise ValueError(f"{kind} is no type of a fact")
    return _KINDS[kind](items if kind in ("tuple", "set") else dict(items))
