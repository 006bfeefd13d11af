"""The program that measures on a GPU, run on the CPU: every line of it, and what it does when heads fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.gpu import NOT_MEASURED

ROOT = Path(__file__).parents[2]
FAILING = """
import sys
from pathlib import Path
from benchmarks import gpu
from benchmarks.implementations import Implementation, ours
def fails(case, group):
    raise ImportError("no such package")
wrong = lambda case, group: lambda x, w, y: 2 * ours(1).build(case, group)(x, w, y)
gpu.main(Path(sys.argv[1]), 0.0, True, [Implementation("fails", fails), Implementation("wrong", wrong)])
"""


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    """All heads are timed by turns with ours; what fails or is wrong leaves a row; a second run measures nothing."""
    out = tmp_path / "rows.csv"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def rows():
        subprocess.run([sys.executable, "-W", "ignore", "-c", FAILING, out], cwd=ROOT, env=env, check=True)
        return {(row.impl, row.metric): row for row in record.read(out)}

    found = rows()
    for name in ("ours, cache 1", "ours, cache 0.5", "ours, cache 0", "megatron unfused", "megatron fused"):
        assert found[name, "time"].p50 > 0, name
        assert found[name, "error / plain"].p50 <= 2.5  # the interpreter cuts 16-bit results off
        assert (name, NOT_MEASURED) not in found
    assert found["ours, cache 1", "FLOPs / NVH"].p50 == 6
    assert found["ours, cache 0", "FLOPs / NVH"].p50 == 8
    for name in ("logits of a chunk", "logits of a block", "dx", "dx of a block", "dW"):
        assert found[f"product: {name}", "rate"].p50 > 0
    assert "no such package" in found["fails", NOT_MEASURED].unit
    assert "its time does not count" in found["wrong", NOT_MEASURED].unit
    assert ("wrong", "time") not in found
    assert rows() == found, "what is measured is not measured again"
