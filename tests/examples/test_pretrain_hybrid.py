"""The hybrid example without the launcher: a sentence that says how to start it, not an error of Python or torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_hybrid.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}])
def test_without_the_launcher(ranks):
    """By python, and by torchrun on a machine without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | ranks
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "run it by torchrun, which says who is who, and without a GPU by the launcher: "
        "torchrun --nproc-per-node 2 -m megatron_ext.run --cpu --linear-ce examples/pretrain_hybrid.py"
    )
