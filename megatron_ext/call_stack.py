"""The line of a user's code that a warning or a report names: the line that called a library."""

import os
import sys
from types import FrameType, ModuleType
from typing import Any

import megatron_ext


def caller_outside(*packages: ModuleType) -> tuple[FrameType, int]:
    """Return the first frame outside of `megatron_ext` and `packages`, and its `stacklevel` in a caller."""
    inside = tuple(os.path.dirname(os.path.abspath(str(p.__file__))) + os.sep for p in (megatron_ext, *packages))
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return frame, level
