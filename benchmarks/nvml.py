"""Joules, clocks and the reasons that hold clocks back, from the driver's own library (NVML), without a package."""

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import torch

_SM_CLOCK = 1
# Bits of `nvmlDeviceGetCurrentClocksEventReasons`, without those of an idle card and of an application's setting.
REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}


class Nvml:
    """Counters of the current CUDA device."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def _asked(self, name: str, kind: type[Any], *arguments: Any) -> int:
        found = kind()
        self._call(name, self._device, *arguments, ctypes.byref(found))
        return int(found.value)

    def joules(self) -> float:
        """Return the board's joules since the driver was loaded. The counter moves every 20 to 100 ms."""
        return self._asked("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def megahertz(self) -> float:
        """Return the present clock of the multiprocessors in MHz."""
        return float(self._asked("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_int(_SM_CLOCK)))

    def held_by(self) -> list[str]:
        """Return the names of the reasons that hold the clock back now."""
        bits = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        return [name for bit, name in REASONS.items() if bits & bit]


STAND_IN = SimpleNamespace(  # in a rehearsal: a card at 1980 MHz
    joules=itertools.count(1.0).__next__, megahertz=lambda: 1980.0, held_by=lambda: ["power limit"]
)
