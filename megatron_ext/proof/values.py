"""Values on which a proof rests: those of modules and configurations, and those that a user's function reads beside its
arguments, such as a loss's weight that a schedule changes."""

from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Fields that saving a model sets in its config, maybe on one rank alone; the last two up to transformers 4.55.
_WRITTEN = ("architectures", "dtype", "torch_dtype", "_attn_implementation_autoset")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LIBRARIES = ("torch", "transformers", "megatron", "megatron_ext", "peft", "accelerate", "numpy", "builtins")
_DEPTH = 5  # how deep values inside of values are read
_ENTRIES = 64  # the most entries of a container that is read


def module_parts(module: nn.Module) -> tuple[Any, ...]:
    """Return the objects that a call of `module` uses: its class, the forward of the class and of the instance, and its
    hooks."""
    own, hooks = vars(module), list[Any]()
    for kind in HOOKS:
        hooks += own.get(kind, {}).values()
    return type(module), type(module).forward, own.get("forward"), type(module).__call__, hooks


def module_values(module: nn.Module) -> tuple[Any, ...]:
    """Return the plain values that `module` holds, and its tensors with their versions, except its weight, its bias and
    trainable parameters, with which the fused head computes too."""
    own, found = vars(module), list[Any]()
    for name, value in (own | own["_buffers"] | own["_parameters"] | {"weight": None, "bias": None}).items():
        if isinstance(value, Tensor):
            if not value.requires_grad:
                found += (value, 0 if value.is_inference() else value._version)
        elif isinstance(own.get(name, own), PLAIN):
            found += (name, own[name])
    return tuple(found)


def config_values(config: Any) -> tuple[Any, ...]:
    """Return the plain values of a config and of configs inside of it, with names; not those that saving sets."""
    found: list[Any] = []
    for name, value in vars(config).items():
        if isinstance(value, PLAIN) and name not in _WRITTEN:
            found += (name, value)
        elif hasattr(value, "__dict__") and type(value).__name__.endswith("Config"):
            found += (name, config_values(value))
    return tuple(found)


def code_values(function: Any) -> list[Any]:
    """Return plain values, tensors with their versions, code of functions, and classes of other objects that `function`
    reaches: by its closure and defaults, by globals and attributes that its code names, and through functions that it
    reaches in these ways. Code of libraries is not read."""
    reader = _Reader(getattr(function, "__self__", None))
    reader.add(function, (), _DEPTH)
    return reader.found


class _Reader:
    """Reader of the values that functions reach. `owner`: the object of the first method, which the method may pass on
    to each function that it calls."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.found: list[Any] = []
        self.seen: dict[tuple[int, tuple[str, ...]], int] = {}  # the depth to which an object's contents were read

    def add(self, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Add the values reached from `value`; of an object's attributes, those with these names."""
        if isinstance(value, PLAIN):
            self.found.append(value)
        elif isinstance(value, Tensor):
            if not value.requires_grad:
                self.found += (value, 0 if value.is_inference() else value._version)
        elif depth > self.seen.get((id(value), names), 0):
            self.seen[id(value), names] = depth
            if not isinstance(value, FunctionType):
                self.found.append(type(value))
            if isinstance(value, MethodType):
                self.add_function(value.__func__, depth, value.__self__)
            elif isinstance(value, FunctionType):
                self.add_function(value, depth)
            else:
                for each in _inside(value, names):
                    if isinstance(each, FunctionType) and not isinstance(value, ModuleType):
                        self.add_function(each, depth - 1, value)
                    else:
                        self.add(each, names, depth - 1)

    def add_function(self, function: Any, depth: int, owner: Any = None) -> None:
        """Add the values that the code of `function`, a method of `owner`, reaches."""
        if isinstance(function, FunctionType):
            self.found.append(function.__code__)
        if not isinstance(function, FunctionType) or _is_of_library(str(function.__globals__.get("__name__"))):
            return
        names = _names(function.__code__)
        self.add(owner, names, depth)
        self.add(self.owner, names, depth)
        outside = [function.__globals__[name] for name in names if name in function.__globals__]
        for each in (function.__defaults__, function.__kwdefaults__, *_cells(function), *outside):
            self.add(each, names, depth - 1)


def _inside(value: Any, names: tuple[str, ...]) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (tuple, list, dict)):
        entries = list(chain.from_iterable(value.items())) if isinstance(value, dict) else list(value)
        return entries if len(value) <= _ENTRIES else []
    of_library = isinstance(value, ModuleType) and _is_of_library(value.__name__)
    places = [] if of_library else [getattr(value, "__dict__", {})]
    if isinstance(value, nn.Module):
        places += (vars(value).get(kind, {}) for kind in ("_buffers", "_parameters", "_modules"))
    places += (vars(kind) for kind in type(value).__mro__ if not _is_of_library(kind.__module__))
    found = []
    for name in names:
        each = next((place[name] for place in places if name in place), None)
        # The value of a slot is read from the object.
        found.append(getattr(value, name, None) if isinstance(each, MemberDescriptorType) else each)
    return found


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty still
            found.append(None)
    return found


def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function's code reads, with its strings, which may be given to `getattr`."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return (*code.co_names, *(each for each in code.co_consts if isinstance(each, str)), *inner)


def _is_of_library(name: str) -> bool:
    return name.split(".")[0] in _LIBRARIES
