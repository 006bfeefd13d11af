"""Run the first steps of a script twice on the ranks of this job, stock and changed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import distributed as dist

from megatron_ext.proof.proofs import FUSION_VARIABLE
from megatron_ext.verify.side_by_side import TwoRuns
from megatron_ext.verify.step_recorder import file_of_rank, read_steps

_STORES: list[dist.TCPStore] = []  # other ranks may need one for longer than rank 0 does


def run_twice(ways: Sequence[str], script: Sequence[str], steps: int, tolerance: float) -> TwoRuns:
    """The first steps of `script`, with its arguments, stock and by the launcher's options `ways`, on this rank.

    Each rank of a job calls it, and starts a process of its own for each run. `--cpu` and its kin stand in both. The
    stock run has fusion turned off, so that a script which calls the patch itself is stock there; one that asks the
    patch for what Megatron's loss does not have, such as `z_loss`, fails.

    Raises:
        ValueError: there are several ranks, and torchrun has not started them.
        RuntimeError: a run failed; its last lines are in the message.
    """
    check_ranks()
    on_cpu = [way for way in ways if way in ("--cpu", "--nccl-rules", "--transformer-engine")]
    folder = Path(tempfile.mkdtemp(prefix="megatron_ext-verify-"))
    for name, options, switch in (("stock", on_cpu, {FUSION_VARIABLE: "off"}), ("ours", list(ways), {})):
        log = file_of_rank(folder, name).with_suffix(".log")
        record = ["--record", str(steps), str(file_of_rank(folder, name))]
        command = [sys.executable, "-m", "megatron_ext.run", *options, *record, *script]
        code = _exit_code(command, _meeting_place(name) | switch, log)
        if code:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            which = " ".join([f"the {name} run", *(f"({variable}={value})" for variable, value in switch.items())])
            raise RuntimeError(f"{which} of {script[0]} failed with exit code {code}:\n{last}\n{log}")
    stock, ours = (read_steps(file_of_rank(folder, name)) for name in ("stock", "ours"))
    shutil.rmtree(folder)
    return TwoRuns(stock, ours, tolerance)


def _exit_code(command: list[str], environment: dict[str, str], log: Path) -> int:
    with log.open("w") as file:
        return subprocess.run(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT).returncode


def _meeting_place(name: str) -> dict[str, str]:
    """The environment in which the ranks of one run find each other, at a store of their own that rank 0 holds.

    In torchrun's, where the ranks of this job meet to train, each run would read what the one before has left.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}
    host = os.environ["MASTER_ADDR"]
    torchruns = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        _STORES.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False))
        torchruns.set(f"megatron_ext/verify/{name}", str(_STORES[-1].port))
    return {"MASTER_PORT": torchruns.get(f"megatron_ext/verify/{name}").decode()}


def check_ranks() -> None:
    """Raise where the ranks of two runs could not find each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "--verify runs the script twice before it trains, and several ranks find each other again by torchrun's "
            "store: start the job with torchrun, or verify it on one rank"
        )
