"""Stubs in `sys.modules` for a time; other modules imported meanwhile stay (`mock.patch.dict` would remove them)."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def stub_modules(stubs: Mapping[str, Any]) -> Iterator[None]:
    """Put `stubs`, by name, into `sys.modules` inside the context; restore the modules of these names afterwards."""
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update(before)
