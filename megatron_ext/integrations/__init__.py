"""Our log-probabilities in the place of those of RL frameworks, switched on by one line and off by another.

    from megatron_ext.integrations import nemo_rl  # or trl, or verl
    nemo_rl.apply()
    ...
    print(nemo_rl.report())  # what was replaced, and how often it ran
    nemo_rl.restore()

`apply()` replaces a framework's functions wherever they were imported, if the parameters of all of them are known here.
In a version with other parameters it changes nothing and raises ValueError. `restore()` undoes `apply()`. No framework
is imported before `apply()`. docs/rl.md says what changes and what it costs.
"""

from importlib import import_module
from typing import Any

_FRAMEWORKS = ("nemo_rl", "trl", "verl")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
