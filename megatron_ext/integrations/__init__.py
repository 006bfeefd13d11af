"""Our log-probabilities in the place of those of RL frameworks: one line on, one line off.

    from megatron_ext.integrations import nemo_rl  # or trl, or verl
    nemo_rl.apply()
    ...
    print(nemo_rl.report())  # what was replaced, and how often it ran
    nemo_rl.restore()

`apply()` replaces a framework's functions wherever they were imported, if it knows all of them by their parameters; of
a version that it does not know it changes nothing and raises ValueError, in one sentence. `restore()` undoes it.
Nothing of a framework is imported before `apply()`. What changes and what it costs is in docs/rl.md.
"""

from importlib import import_module
from typing import Any

_FRAMEWORKS = ("nemo_rl", "trl", "verl")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
