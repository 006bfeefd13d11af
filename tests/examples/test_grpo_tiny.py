"""GRPO learns, and not without a learning rate; an interrupted run goes on where it was."""

import os
import re
from pathlib import Path

import grpo_tiny
import pytest

from megatron_ext.policy.ray_policy import local_ray
from tests.programs import alone

STEPS = ("--steps", "60")  # half of what the example takes by itself: the curve is steep by then


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RAY_AUTH_MODE", "disabled")  # else Ray writes a token to the home folder
        with local_ray(2):
            yield


def learn(out: Path, *arguments: str) -> list[float]:
    return grpo_tiny.learn(grpo_tiny.arguments(["--out", str(out), *arguments]))


@pytest.mark.slow
def test_the_program_with_seed_0(tmp_path):
    done = alone("examples/grpo_tiny.py", "--out", str(tmp_path), *STEPS)
    assert "unexpected system error" not in done.stdout + done.stderr  # what Ray says of actors that others have killed
    said = re.search(r"first tenth ([\d.]+), last tenth ([\d.]+)", done.stdout)
    assert float(said[2]) - float(said[1]) >= 0.3
    assert (tmp_path / "reward.png").stat().st_size > 5000


@pytest.mark.slow
def test_nothing_is_learned_without_a_learning_rate(ray, tmp_path):
    first, last = grpo_tiny.tenths(learn(tmp_path, "--lr", "0", "--steps", "20"))
    assert abs(last - first) < 0.1
    assert last < 0.3


@pytest.mark.slow
def test_resumed_as_if_never_interrupted(ray, tmp_path):
    few = ("--prompts", "4", "--samples", "4", "--save-every", "3")
    whole = learn(tmp_path / "whole", "--steps", "8", *few)
    learn(tmp_path / "cut", "--steps", "5", *few)
    cut = learn(tmp_path / "cut", "--steps", "8", *few, "--resume", "--tensor-parallel-size", "2")
    assert whole == cut == grpo_tiny.progress(tmp_path / "cut")["rewards"]
    assert [folder.name for folder in (tmp_path / "cut").glob("step-*")] == ["step-00008"]


def test_only_the_runs_own_checkpoint_is_removed(tmp_path):
    class Policy:
        def save_checkpoint(self, weights: str, optimizer: str) -> None:
            Path(weights).mkdir(parents=True)

    (tmp_path / "step-by-step.md").mkdir()
    for steps in (1, 2):
        grpo_tiny.save([0.5] * steps, tmp_path, Policy())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "step-00002", "step-by-step.md"]


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SystemExit):
        grpo_tiny.arguments(["--out", str(tmp_path / "taken")])
    assert "--out writes to" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--resume",), "there is no checkpoint in"),
        (("--samples", "1"), "--samples is 1"),
        (("--workers", "3", "--tensor-parallel-size", "2"), "--workers 3"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        grpo_tiny.arguments(["--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
