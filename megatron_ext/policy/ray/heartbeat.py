"""Once a second, a thread beside a call tells where the call stands, and for how long the process has stood still."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_ext.policy import outside_waits

PERIOD_S = 1.0
# Where a call that does not move waits for other ranks; autograd's engine runs collectives without a Python frame.
_WAITS_IN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/autograd/graph.py",
    "megatron_ext/distributed/collectives.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",
)
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])


@contextmanager
def beating(send: Callable[[dict[str, Any]], object], call: str) -> Iterator[None]:
    """While it lasts, `send` gets each `PERIOD_S`: "doing", in words; "waits", whether this thread stands where ranks
    wait for others; "idle_s", for how long it has run no other line, and this process not moved (0 in `outside_wait`).
    """
    import psutil  # comes with Ray's extra

    thread, ended, process = threading.get_ident(), threading.Event(), psutil.Process()

    def beat() -> None:
        before, since, used = None, 0.0, _used(process)
        while not ended.wait(PERIOD_S):
            if not (lines := _lines(thread)):  # before its first line, or in compiled code that has no frames
                continue
            if lines != before or outside_waits.now or _moves(process, used):
                since = time.monotonic()
            before, used = lines, _used(process)
            innermost = next((line for file, line in lines if file.endswith(_WAITS_IN)), None)
            told = f"in {call}, {'waiting for others in' if innermost else 'at'} {innermost or lines[0][1]}"
            own = next((line for file, line in lines if not _is_library(file)), "")
            told += f", from {own}" if own not in told else ""
            told += "".join(f", waiting for {what}" for what in outside_waits.now[-1:])
            send({"doing": told, "waits": innermost is not None, "idle_s": time.monotonic() - since})

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _lines(thread: int) -> list[tuple[str, str]]:
    """File and line of each frame of a call, innermost first, without Ray's."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None and frame.f_code.co_name != "_worker_call":
        code, file = frame.f_code, os.path.basename(frame.f_code.co_filename)
        found.append((code.co_filename, f"{code.co_qualname} ({file}:{frame.f_lineno})"))
        frame = frame.f_back
    return found


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and "megatron_ext" not in file


def _used(process: Any) -> tuple[float, float, int]:
    """Clock, processor seconds, and bytes read and written until now."""
    nbytes = 0
    with suppress(Exception):  # macOS has no counters, and a system may refuse them
        counters = process.io_counters()
        nbytes = counters.read_chars + counters.write_chars
    return time.monotonic(), time.process_time(), nbytes


def _moves(process: Any, before: tuple[float, float, int]) -> bool:
    """Return whether the process has computed, read or written since, or it or one that it has started runs."""
    passed_s, processor_s, nbytes = (new - old for new, old in zip(_used(process), before, strict=True))
    # Idle threads wake a hundred times a second each, and gloo has several a group.
    if processor_s > (0.03 + 0.003 * process.num_threads()) * passed_s or nbytes > 1 << 16:
        return True
    with suppress(Exception):  # one of them has ended
        return any(one.status() in ("running", "disk-sleep") for one in [process, *process.children(recursive=True)])
    return True
