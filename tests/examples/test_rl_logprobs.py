"""GRPO's terms and updates are those of one process, whatever the layout."""

import pytest
import rl_logprobs
import torch.distributed as dist

from tests.examples import EXAMPLES
from tests.gpt import model_parallel
from tests.programs import python
from tests.ranks import ranks

SCRIPT = str(EXAMPLES / "rl_logprobs.py")


def trained(tp: int, cp: int) -> list[dict[str, float]]:
    with model_parallel(tp=tp, cp=cp):
        return rl_logprobs.train(steps=2, prompts=1, seed=1)


@ranks(2, 4)
def test_every_layout_finds_what_one_process_finds():
    expected = trained(1, 1)
    assert expected[1]["KL"] > 0.01, "the policy has moved"
    assert expected[0]["ratio"] == 1
    for tp, cp in rl_logprobs.LAYOUTS.values():
        if tp * cp == dist.get_world_size():
            for terms, wanted in zip(trained(tp, cp), expected, strict=True):
                assert terms == pytest.approx(wanted, rel=1e-5, abs=1e-6), (tp, cp)


@pytest.mark.slow
def test_as_a_program():
    done = python(SCRIPT, ranks=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["one", "process", "TP", "2", "CP", "2"]
    assert len([line for line in lines if line.startswith("step")]) == 10
    assert all(float(x) < 1e-5 for x in lines[-2].removeprefix("largest difference").split())
    assert lines[-1].startswith("2 ranks: no TP 2 x CP 2")
