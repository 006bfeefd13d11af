"""Run the first steps of a script twice on the ranks of this job, stock and changed, and compare them step by step."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import distributed as dist

from megatron_ext.verify.step_recorder import RecordedStep, file_of_rank, read_steps

_NORMS_DIFFER = 10  # times as much as losses, which are means over tokens
_STORES: list[dist.TCPStore] = []  # other ranks may need one for longer than rank 0 does


def relative_difference(a: float, b: float) -> float:
    """The difference of two numbers relative to the first; 0 if both are NaN, infinite where one of them is."""
    if (math.isnan(a) and math.isnan(b)) or a == b:
        return 0.0
    difference = abs(a - b) / abs(a) if a else math.inf
    return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True)
class TwoRuns:
    """The steps of one rank in both runs, and how much their losses may differ, relatively."""

    stock: Sequence[RecordedStep]
    ours: Sequence[RecordedStep]
    tolerance: float

    @property
    def largest(self) -> tuple[float, float]:
        """The largest relative difference of a step's loss, and of its gradient norm; 0 where neither run has one."""
        return self._largest("loss"), self._largest("gradient_norm")

    def _largest(self, name: str) -> float:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(self.stock, self.ours, strict=False)]
        found = [relative_difference(*pair) if None not in pair else math.inf for pair in pairs if pair != (None, None)]
        return max(found, default=0.0)

    @property
    def fault(self) -> str | None:
        """Why the runs are not the same; None if they are, within the tolerance."""
        if not self.stock or len(self.stock) != len(self.ours):
            return (
                f"the stock run took {len(self.stock)} steps of an optimizer, the other one {len(self.ours)}: "
                f"there is nothing to compare beyond the shorter one"
            )
        for name, found, limit in zip(
            ("loss", "gradient norm"), self.largest, (self.tolerance, _NORMS_DIFFER * self.tolerance), strict=True
        ):
            if found > limit:
                return f"the {name} of a step differs by {found:.1e}, and at most {limit:.1e} is allowed"
        return None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("step", "loss", "", "gradient norm", "", "peak MiB", "", "ms", "")]
        rows.append(("", *("stock", "ours") * 4))
        for at, (a, b) in enumerate(zip(self.stock, self.ours, strict=False), 1):
            cells = [_shown(a.loss, "#.7g"), _shown(b.loss, "#.7g")]
            cells += [_shown(a.gradient_norm, "#.6g"), _shown(b.gradient_norm, "#.6g")]
            cells += [_shown(a.peak_mib, ".0f"), _shown(b.peak_mib, ".0f")]
            cells += [_shown(s.seconds and 1e3 * s.seconds, ".0f") for s in (a, b)]
            rows.append((str(at), *cells))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        loss, norm = self.largest
        return "\n".join([*lines, f"largest relative difference: loss {loss:.1e}, gradient norm {norm:.1e}"])


def _shown(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def run_twice(ways: Sequence[str], script: Sequence[str], steps: int, tolerance: float) -> TwoRuns:
    """The first steps of `script`, with its arguments, stock and by the launcher's options `ways`, on this rank.

    Each rank of a job calls it, and starts a process of its own for each run. `--cpu` and its kin stand in both.

    Raises:
        ValueError: there are several ranks, and torchrun has not started them.
        RuntimeError: a run failed; its last lines are in the message.
    """
    check_ranks()
    on_cpu = [way for way in ways if way in ("--cpu", "--nccl-rules", "--transformer-engine")]
    folder = Path(tempfile.mkdtemp(prefix="megatron_ext-verify-"))
    for name, options in (("stock", on_cpu), ("ours", list(ways))):
        log = file_of_rank(folder, name).with_suffix(".log")
        record = ["--record", str(steps), str(file_of_rank(folder, name))]
        command = [sys.executable, "-m", "megatron_ext.run", *options, *record, *script]
        code = _exit_code(command, _meeting_place(name), log)
        if code:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the {name} run of {script[0]} failed with exit code {code}:\n{last}\n{log}")
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
