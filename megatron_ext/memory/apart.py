"""The table of `megatron-ext memory`, counted by a process of its own: a count changes torch for all threads."""

import os
import subprocess
import sys


def counted_apart(arguments: str, seconds: float = 60.0) -> str:
    """Return the table for these arguments, by a process that sees no GPU; empty if it fails or takes longer."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_ext.memory", *arguments.split()]
    unseen = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, env=unseen, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    table, _, _ = done.stdout.partition("\nTimes on ")
    return table.strip()
