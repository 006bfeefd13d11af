"""The random numbers of the emulated device, and those of the host: two generators, as beside a GPU.

torch's operators on CPU tensors, dropout among them, all draw from `torch.default_generator`. Inside the emulation this
generator is the device's, and the host has another one, which starts with the default generator's state.
`torch.manual_seed` seeds both; `torch.get_rng_state` returns the host's state. Factories that do not name the device
(`torch.rand(2)`) and `Tensor.random_`, with which data loaders and samplers make their seeds, draw from the host's.
So a run that resumes from a checkpoint and then makes its data loaders draws the device's numbers as before.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import dataset

_HOST_FACTORIES = "rand randn randint randperm"


class _State(torch.Generator):
    """A state of the device's generator, held by reference: the present state or one that is not in use.

    Megatron and Transformer Engine keep such states where they record CUDA graphs.
    """

    _device: "DeviceGenerator"

    def get_state(self) -> Tensor:
        return self._device.get_state() if self._is_current else super().get_state()

    def set_state(self, new_state: Tensor) -> torch.Generator:
        return self._device.set_state(new_state) if self._is_current else super().set_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return self._device.manual_seed(seed) if self._is_current else super().manual_seed(seed)

    def initial_seed(self) -> int:
        return self._device.initial_seed() if self._is_current else super().initial_seed()

    def clone_state(self) -> torch.Generator:
        return self._device.state_with(self.get_state())

    def graphsafe_get_state(self) -> torch.Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> torch.Generator:
        return self if state is self else super().graphsafe_set_state(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the state as a state of the device's generator."""
        return _state_with, (self.get_state(),)

    def park(self, state: Tensor) -> None:
        """Keep `state` until this object is the device's present state again."""
        super().set_state(state)

    @property
    def _is_current(self) -> bool:
        return self._device.graphsafe_get_state() is self


def _state_with(state: Tensor) -> torch.Generator:
    device: Any = torch.cuda.default_generators[0]
    return device.state_with(state)


class DeviceGenerator(torch.Generator):
    """`torch.cuda.default_generators[0]`: torch's default generator, with states that can be held by reference."""

    def __init__(self) -> None:
        self._torchs = torch.default_generator
        self._current = self.state_with(self._torchs.get_state())

    def state_with(self, state: Tensor) -> _State:
        """Return a new state with the values of `state`, not in use yet."""
        made = _State()
        made._device = self
        made.park(state)
        return made

    def get_state(self) -> Tensor:
        return self._torchs.get_state()

    def set_state(self, new_state: Tensor) -> torch.Generator:
        return self._torchs.set_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return self._torchs.manual_seed(seed)

    def seed(self) -> int:
        return self._torchs.seed()

    def initial_seed(self) -> int:
        return self._torchs.initial_seed()

    def clone_state(self) -> torch.Generator:
        return self.state_with(self.get_state())

    def graphsafe_get_state(self) -> torch.Generator:
        return self._current

    def graphsafe_set_state(self, state: Any) -> torch.Generator:
        if state is not self._current:
            new = state.get_state()
            self._current.park(self.get_state())
            self._current = state
            self.set_state(new)
        return self


@contextmanager
def two_generators() -> Iterator[tuple[DeviceGenerator, torch.Generator]]:
    """Yield (the device's generator, the host's); at the end torch's default generator takes over the host's state."""
    default = torch.default_generator
    host = torch.Generator()
    host.set_state(default.get_state())
    try:
        yield DeviceGenerator(), host
    finally:
        default.set_state(host.get_state())


def on_host(host: torch.Generator) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the replacements of functions that draw from the host's generator, as (owner, {name: replacement})."""
    yield torch.random, {"default_generator": host}
    factories = {name: _drawing_from(getattr(torch, name), host) for name in _HOST_FACTORIES.split()}
    yield torch, factories
    yield dataset, {"randperm": factories["randperm"]}
    yield Tensor, {"random_": _seed_from(Tensor.random_, host)}


def _drawing_from(factory: Callable[..., Any], host: torch.Generator) -> Callable[..., Any]:
    @functools.wraps(factory)
    def draw(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        device = torch.get_default_device() if device is None else device
        if kwargs.get("generator") in (None, torch.default_generator) and str(device).split(":")[0] == "cpu":
            kwargs["generator"] = host
        return factory(*args, **kwargs)

    return draw


def _seed_from(random_: Callable[..., Any], host: torch.Generator) -> Callable[..., Any]:
    @functools.wraps(random_)
    def draw(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        return random_(*args, generator=host if generator is None else generator, **kwargs)

    return draw
