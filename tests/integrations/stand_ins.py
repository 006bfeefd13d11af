"""Stand-ins for packages that a framework's source imports and its log-probabilities do not need; ours for its own."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class _Anything(type):
    """A class of which any attribute, call or subscript is another stand-in or itself."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def _stand_in(name: str):
    def new(cls, *args, **kwargs):  # as a decorator it changes nothing
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else object.__new__(cls)

    return _Anything(name, (), {"__new__": new, "__init__": lambda self, *a, **k: None, "__call__": lambda self, f: f})


class _Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__") or name in self.lacking:
            raise AttributeError(name)
        setattr(self, name, _stand_in(name))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str], lacking: Collection[str]):
        self.packages, self.lacking = tuple(packages), lacking

    def find_spec(self, name, path=None, target=None):
        ours = any(name == package or name.startswith(package + ".") for package in self.packages)
        ours = ours and name.rpartition(".")[2] not in self.lacking
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        module = _Module(spec.name)
        vars(module).update(lacking=self.lacking, __path__=[])
        return module

    def exec_module(self, module):
        pass


@contextmanager
def standing_in_for(packages: Iterable[str], lacking: Collection[str] = ()) -> Iterator[None]:
    """Imports of `packages`, installed or not, give modules in which every name is there but those `lacking`.

    Afterwards an import gives the package itself again.
    """
    finder = _Finder(packages, lacking)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Module):
                del sys.modules[name]


@contextmanager
def applied(integration: types.ModuleType) -> Iterator[None]:
    """Our functions in place of the framework's; theirs afterwards."""
    integration.apply()
    try:
        yield
    finally:
        integration.restore()
