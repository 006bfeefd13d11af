"""Launches of a rehearsal, compiled for Hopper, since Triton's interpreter also runs kernels that its compiler refuses.

`pytest -m gpu --rehearse --launches=FILE` writes one line for each kind of launch of the package's kernels, and
`python -m tests.compiled_launches FILE`, in a process without the interpreter, compiles the kernels for these kinds.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton.language as tl


def write_to(path: Path) -> None:
    """Let this process add a line to `path` for each new kind of launch from now on."""
    from triton.runtime.interpreter import InterpretedFunction

    run, seen = InterpretedFunction.run, set()

    def noted(kernel, *args, grid, warmup, **kwargs):
        if kernel.fn.__module__.startswith("megatron_ext."):
            given = [[_told(x) for x in args], {name: _told(x, constant=True) for name, x in kwargs.items()}]
            kind = json.dumps([kernel.fn.__module__, kernel.fn.__name__, *given])
            if kind not in seen:
                seen.add(kind)
                with path.open("a") as file:
                    file.write(kind + "\n")
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noted


def _told(x: Any, constant: bool = False) -> Any:
    """Describe an argument in JSON by what Triton may refuse: a tensor by its dtype, a constant by its value."""
    if isinstance(x, torch.Tensor):
        return {"dtype": str(x.dtype).removeprefix("torch.")}
    if isinstance(x, tl.dtype):
        return {"triton": str(x)}
    if isinstance(x, int) and not isinstance(x, bool) and not constant:
        return {"number": 16}
    return x


def _made(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    if "triton" in told:
        return next(x for x in (tl.float64, tl.float32, tl.float16, tl.bfloat16, tl.int32) if str(x) == told["triton"])
    if "number" in told:
        return told["number"]
    return torch.empty(256, dtype=getattr(torch, told["dtype"]))


def compile_all(path: Path) -> int:
    """Compile each kind of launch written in `path` and return their number; the first that is refused raises."""
    from tests.head.hopper import recorded

    kinds = [json.loads(line) for line in sorted(set(path.read_text().splitlines()))]
    for module, name, args, kwargs in kinds:
        kernel = getattr(importlib.import_module(module), name)
        with recorded():
            kernel[(1,)](*map(_made, args), **{key: _made(x) for key, x in kwargs.items()})
    return len(kinds)


if __name__ == "__main__":
    print(f"{compile_all(Path(sys.argv[1]))} kinds of launch compiled for Hopper")
