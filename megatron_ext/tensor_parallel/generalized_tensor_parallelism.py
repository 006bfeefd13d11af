"""Generalized tensor parallelism, by the name of Megatron's module, and Megatron's own.

This parallelism cuts each weight once more and gathers it before use. Megatron has the code, from 0.19 on with
Transformer Engine: the names of this module, `gtp_api`, `gtp_cuda_graphs` and `gtp_symmetric_memory` are those of the
Megatron-Core that is installed. Our layers ask its parameters for whole shards (`_layers/distributed_weights.py`).
"""

import importlib
from collections.abc import Callable
from typing import Any


def megatrons_own(part: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__` that looks names up in Megatron's module `part`.

    Without that module `HAVE_GTP` and `HAVE_TE` are False, and every other name is an AttributeError.
    """

    def look_up(name: str) -> Any:
        if not name.startswith("__"):
            try:
                return getattr(importlib.import_module(f"megatron.core.tensor_parallel.{part}"), name)
            except (ImportError, AttributeError):
                if name in ("HAVE_GTP", "HAVE_TE"):
                    return False
        raise AttributeError(
            f"megatron_ext.tensor_parallel.{part} has no {name}: generalized tensor parallelism is Megatron's own, and "
            f"the Megatron-Core that is installed has no such name; it came with 0.19"
        )

    return look_up


__getattr__ = megatrons_own("generalized_tensor_parallelism")
