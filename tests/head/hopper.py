"""Triton's kernels as the head launches them, compiled for Hopper without a GPU: registers, spills, instructions."""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OLDER_TRITON = TorchVersion(triton.__version__) < "3.7"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass
class Launch:
    """One launch: the kernel's name, its grid, its constants and what was compiled for exactly these arguments."""

    name: str
    grid: tuple[int, ...]
    arguments: dict
    compiled: object

    def _dump(self, what: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.compiled.asm["cubin"])
            file.flush()
            return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout

    def resources(self) -> dict[str, int]:
        """Registers a thread (REG), bytes of spills and the like (STACK, LOCAL), shared memory (SHARED)."""
        return {
            name: int(number)
            for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", self._dump("-res-usage"))
        }

    def instructions(self) -> list[tuple[int, str]]:
        """(address, instruction), without what fills up the end."""
        found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", self._dump("-sass"))
        return [(int(address, 16), text) for address, text in found if not text.strip().startswith("NOP")]

    def loops(self) -> list[list[str]]:
        """The instructions of each loop, in order."""
        code = self.instructions()
        jumps = [(address, re.search(r"BRA.*?0x([0-9a-f]+)", text)) for address, text in code]
        backwards = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
        return [[text for address, text in code if start <= address <= stop] for start, stop in backwards]

    def skipped(self) -> int:
        """Return how many instructions the tiles of a fused product jump over that have no label: those behind branches
        forward over 128 instructions or more without products, loads or exponentials."""
        code, over = self.instructions(), set()
        for at, text in code:
            to = re.search(r"BRA.*?0x([0-9a-f]+)", text)
            part = [(each, other) for each, other in code if to and at < each < int(to[1], 16)]
            if len(part) >= 128 and not any(re.search("HGMMA|UTMALDG|MUFU.EX2", other) for _, other in part):
                over |= {each for each, _ in part}
        return len(over)

    def check_spills(self) -> None:
        """Fails where a thread uses memory of its own. With every option at once Triton before 3.7 stores one number
        before the loops and loads it after them."""
        used = self.resources()
        if OLDER_TRITON and used["STACK"] == 8 and used["LOCAL"] == 0:
            spills = [text for _, text in self.instructions() if re.search(r"\b(STL|LDL)\b", text)]
            assert len(spills) == 2, (self.name, spills)
            assert not {text for loop in self.loops() for text in loop}.intersection(spills), (self.name, spills)
        else:
            assert used["STACK"] == used["LOCAL"] == 0, (self.name, used)

    def check_programs(self) -> None:
        """Fails where something is spilled, or an SM has not the registers of two programs."""
        self.check_spills()
        used = self.resources()
        assert 2 * 32 * self.arguments.get("num_warps", 4) * used["REG"] <= 65536, (self.name, used)

    def loads(self) -> list[int]:
        """Bytes of each load of a thread from global memory."""
        widths = [re.search(r"LDG\.E(?:\.\w+)*?\.(64|128)\b", text) for _, text in self.instructions() if "LDG" in text]
        return [int(width[1]) // 8 if width else 4 for width in widths]


class _Driver:
    """Stand-in for Triton's driver, with the methods that Triton calls before it compiles for a Hopper GPU."""

    def get_current_device(self):
        return "hopper"  # beside the numbers of real devices

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@contextmanager
def recorded():
    """A list of launches: kernels are compiled for their arguments, and do not run."""
    launches, run = [], JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(kernel.fn.__name__, grid, given, compiled))

    with mock.patch.object(driver, "_active", _Driver()), mock.patch.object(JITFunction, "run", compile_only):
        yield launches
