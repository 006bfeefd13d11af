"""Modules put into `sys.modules` for a time; what is imported meanwhile stays (`mock.patch.dict` would forget it)."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def stub_modules(stubs: Mapping[str, Any]) -> Iterator[None]:
    """`stubs` by name in `sys.modules`; afterwards what was there before under these names."""
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update(before)
