"""A host that answers nothing any more is named within 10 seconds, with its ranks."""

import re
import subprocess
import sys

import pytest

from tests.policy.lost_host import NOT_PERMITTED
from tests.policy.test_liveness import SOON_S
from tests.ranks import TIMEOUT_S

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_a_host_that_answers_nothing_is_named(how):
    """Seconds and not the minute after which Ray says it: connections to a frozen or unreachable host stay open."""
    program = [sys.executable, "-m", "tests.policy.lost_host", how]
    done = subprocess.run(program, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stdout.strip())
    told = re.search(
        r"after ([\d.]+) s: host \S+ with ranks \[([01])\] of 2 has not answered for \d+ s: (.*)", done.stdout
    )
    assert told, done.stdout + done.stderr
    assert float(told[1]) < min(SOON_S, 60)
    assert f"network is cut; rank {told[2]} of 2 " in told[3]
    assert "is in sleep, at Sleeper.sleep (lost_host.py:" in told[3]
    assert "restart(weights_path) goes on" in told[3]
