"""A script of NeMo-RL, unmodified, with our log-probabilities in every process of Ray that has NeMo-RL.

    python examples/nemo_rl_on_ray.py examples/run_grpo.py --config CONFIG.yaml

NeMo-RL starts Ray by itself, and its models live in Ray's actors, so `apply()` has to run there. Ray calls a hook in
each process that it starts; this program adds that hook to NeMo-RL's call of `ray.init`. Install `megatron_ext` into
the environments of NeMo-RL's workers: a worker without it runs NeMo-RL's own functions, and prints a line that says so.
"""

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import ray

HOOK = "worker_process_setup_hook"


def apply_in_worker() -> None:
    """Put our functions in the place of NeMo-RL's in this process, before it imports an actor's class."""
    import importlib.util
    import sys

    if importlib.util.find_spec("nemo_rl") is None:
        return
    if importlib.util.find_spec("megatron_ext") is None:
        print("megatron_ext is not installed for this worker: NeMo-RL's own functions run", file=sys.stderr)
        return
    from megatron_ext.integrations import nemo_rl

    nemo_rl.apply()


def with_hook(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ray.init` that adds the hook to its runtime environment; another hook there raises ValueError."""

    @functools.wraps(init)
    def wrapped(*args: Any, runtime_env: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        runtime_env = runtime_env or {}
        if HOOK in runtime_env:
            raise ValueError(f"{HOOK} is {runtime_env[HOOK]!r} already: call apply_in_worker() in that function")
        return init(*args, runtime_env=runtime_env | {HOOK: apply_in_worker}, **kwargs)

    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("script", metavar="SCRIPT", help="a script of NeMo-RL, as examples/run_grpo.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    options = parser.parse_args()
    ray.init = with_hook(ray.init)
    sys.argv = [options.script, *options.args]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
