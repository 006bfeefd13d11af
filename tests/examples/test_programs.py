"""The examples as a user starts them: commands, Ctrl-C, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint
import psutil
import pytest

from tests.examples import EXAMPLES
from tests.programs import python
from tests.ranks import TIMEOUT_S

ROOT = EXAMPLES.parent
PRETRAIN, FINETUNE = str(EXAMPLES / "pretrain_gpt.py"), str(EXAMPLES / "finetune_hf.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 512 "
    f"--device cpu --data {ROOT / 'LICENSE'}"
).split()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*command: str, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_S, **kwargs)


# The demo with a model that takes no time.
DEMO = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import demo
sizes = {"num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 32, "vocab-size": 512}
assert not sizes.keys() - demo.MODEL.keys()
demo.MODEL |= sizes
demo.main()
"""


def small_demo(*arguments: str) -> list[str]:
    data = str(ROOT / "LICENSE")
    return [sys.executable, "-c", DEMO, str(EXAMPLES), "--device", "cpu", *arguments, "--data", data]


def interrupt_when(seen: Callable[[], bool], command: list[str], log: Path, cwd: Path) -> tuple[bool, str, list]:
    """Starts `command`, sends it SIGINT once there is something to be `seen`.

    Returns whether it ended soon, its output, and the processes that it left. Soon is well before a launcher that
    waits for its ranks would kill them, or, where the machine is too slow for that, sooner than it began.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=ENVIRONMENT, cwd=cwd, start_new_session=True
        )
        begun = time.monotonic()
        while not seen() and process.poll() is None and time.monotonic() < begun + TIMEOUT_S:
            time.sleep(0.05)
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        assert process.poll() is None, log.read_text()
        assert len(family) >= 3, "two ranks and their parent"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(TIMEOUT_S)
        finally:
            soon = time.monotonic() - start < max(10, start - begun)
            time.sleep(0.5)  # for the kernel to clear up
            left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
            for one in left:
                one.kill()
    return soon, log.read_text(), left


@pytest.mark.slow
def test_interrupting_the_demo_ends_all_ranks(tmp_path):
    log = tmp_path / "log"
    command = small_demo("--train-iters", "100000")
    soon, output, left = interrupt_when(lambda: re.search("[1-9]/100000", log.read_text()), command, log, tmp_path)
    assert not left
    assert soon, output
    assert "interrupted: all ranks have ended" in output
    for word in ("Traceback", "Warning", "RNG"):
        assert word not in output


@pytest.mark.slow
def test_interrupting_torchrun_ends_the_checkpoint_writers_too(tmp_path):
    command = [*TORCHRUN, PRETRAIN, *SMALL, "--tensor-model-parallel-size", "2", "--train-iters", "100000"]
    command += ["--save", str(tmp_path / "run"), "--save-interval", "10"]
    saved = tmp_path / "run" / checkpoint.LATEST  # which is written last
    soon, output, left = interrupt_when(saved.exists, command, tmp_path / "log", tmp_path)
    assert (tmp_path / "run" / "iter_0000010").exists()
    assert not left
    assert soon, output


# A program and its words, the number of ranks, the exit status, and what stderr begins with.
REFUSED = [
    ("pretrain_gpt.py --device cpu --tensor-model-parallel-size 4", 2, 1, ".*ranks is 2: it must be a multiple of"),
    ("finetune_hf.py --tensor-parallel-size 4", 2, 1, ".*it must divide the number of ranks, which is 2"),
    ("distill_from_hidden_states.py --steps 0 --top-k 4096", 0, 2, ".*--steps is 0, --top-k 4096: .* from 0 to 4095"),
    ("entropy_and_top_k.py --top-k 257", 0, 1, r"entropy_and_top_k.py: [^\n]*257[^\n]*\n$"),
    ("entropy_and_top_k.py --model .", 0, 1, r"entropy_and_top_k.py: [^\n]*which has no config.json[^\n]*\n$"),
    ("rl_logprobs.py --steps 0", 0, 1, r"rl_logprobs.py: --steps is 0: it must be at least 1\n$"),
    ("pipeline_stage.py", 3, 1, ".*started on 3 ranks, runs on 1 or 2 or 4: torchrun --nproc-per-node 4"),
    ("pipeline_vocabulary.py", 3, 1, ".*started on 3 ranks, runs on 2 or 4: torchrun --nproc-per-node 4"),
    ("patch_gpt.py", 3, 1, ".*patch_gpt.py: started on 3 ranks, runs on 1 or 2 or 4: torchrun --nproc-per-node 4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command, ranks, status, said", REFUSED, ids=[f"{case[0]} refused" for case in REFUSED])
def test_bad_arguments_end_every_rank_with_the_reason(command, ranks, status, said, tmp_path):
    program, *words = command.split()
    done = python(str(EXAMPLES / program), *words, cwd=tmp_path, ranks=ranks)
    assert done.returncode == status
    assert re.match(said, done.stderr, re.DOTALL), done.stderr
    assert "Traceback" not in done.stderr
    assert "step" not in done.stdout


@pytest.mark.slow
def test_the_script_runs_without_a_launcher(tmp_path):
    words = ["--train-iters", "2", "--metrics", "metrics.json", "--head", "fused"]
    done = python(PRETRAIN, *SMALL, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "metrics.json").read_text())["losses"]
    # The last it says: what came out, and what was fused.
    assert f"pretrain_gpt.py: loss {losses[0]:.4f} first, {losses[1]:.4f} last; 2 steps" in done.stdout
    assert re.search(r"^fused head.*logits made 0 times", done.stdout, re.M), done.stdout
