"""GRPO learns, for every seed, and not without a learning rate; an interrupted run goes on where it was."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_tiny.py"

pytestmark = pytest.mark.slow


def run(out: Path, *arguments: str, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(out), *arguments], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stderr if fails else done.stdout


def tenths(report: str) -> tuple[float, float]:
    found = re.search(r"first tenth ([\d.]+), last tenth ([\d.]+)", report)
    assert found, report
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(tmp_path, seed):
    first, last = tenths(run(tmp_path, "--seed", str(seed)))
    assert last - first >= 0.3
    assert (tmp_path / "reward.png").stat().st_size > 5000


def test_nothing_is_learned_without_a_learning_rate(tmp_path):
    first, last = tenths(run(tmp_path, "--lr", "0", "--steps", "40"))
    assert abs(last - first) < 0.1
    assert last < 0.3


def test_resumed_as_if_never_interrupted(tmp_path):
    few = ("--prompts", "4", "--samples", "4", "--save-every", "3")
    run(tmp_path / "whole", "--steps", "8", *few)
    run(tmp_path / "cut", "--steps", "5", *few)
    run(tmp_path / "cut", "--steps", "8", *few, "--resume", "--tensor-parallel-size", "2")
    whole, cut = (json.loads((tmp_path / name / "progress.json").read_text()) for name in ("whole", "cut"))
    assert whole == cut
    assert [folder.name for folder in (tmp_path / "cut").glob("step-*")] == ["step-00008"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--resume",), "there is no checkpoint in"),
        (("--samples", "1"), "--samples is 1"),
        (("--workers", "3", "--tensor-parallel-size", "2"), "--workers 3"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    assert message in run(tmp_path, *arguments, fails=True)
