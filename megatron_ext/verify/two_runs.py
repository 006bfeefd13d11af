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

_STORES: list[dist.TCPStore] = []  # kept alive, as other ranks may need a store for longer than rank 0


def run_twice(ways: Sequence[str], script: Sequence[str], steps: int, tolerance: float) -> TwoRuns:
    """Run the first `steps` of `script`, given with its arguments, stock and with the launcher's options `ways`.

    Each rank of a job calls it, and starts a process for each run. Options of the emulation (`--cpu`, `--nccl-rules`,
    `--transformer-engine`) are given to both runs. The stock run has fusion turned off, so that a script that patches
    models itself is stock too; a script that asks the patch for options that Megatron's loss lacks, such as `z_loss`,
    fails there.

    Raises:
        ValueError: there are several ranks, and torchrun has not started them.
        RuntimeError: a run failed; the message has its last lines.
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
    """Return environment variables by which the ranks of one run find each other, at a new store that rank 0 holds.

    Under torchrun's own environment both runs would use the job's store, and the second would read keys that the first
    has left.
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
    """Raise ValueError if the ranks of the two runs could not find each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "--verify runs the script twice before it trains, and several ranks find each other again by torchrun's "
            "store: start the job with torchrun, or verify it on one rank"
        )
