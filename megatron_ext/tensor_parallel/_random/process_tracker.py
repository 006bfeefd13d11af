"""This process's RNG tracker, and all of its generator states saved and restored together.

All code that draws, seeds or recomputes calls `get_cuda_rng_tracker()`. The tracker is made at the first call and
stays. Asking later for options that it lacks is an error: part of the program would go on with streams that the rest no
longer sees.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from megatron_ext.tensor_parallel._random.generator_state import (
    Device,
    State,
    capturing,
    copy_state,
    generator_of,
    get_rng_state,
    set_rng_state,
    value_of,
)
from megatron_ext.tensor_parallel._random.rng_tracker import CudaRNGStatesTracker, InferenceCudaRNGStatesTracker
from megatron_ext.tensor_parallel._random.transformer_engine import is_te_tracker, make_te_tracker

Tracker = Any  # a CudaRNGStatesTracker, or Transformer Engine's class of the same methods


class TrackerOptions(NamedTuple):
    """The options with which the tracker was made."""

    use_te_rng_tracker: bool = False
    inference_rng_tracker: bool = False
    use_cudagraphable_rng: bool = False


class Process:
    """This process's tracker (None until it is asked for) and the options with which it was made."""

    tracker: Tracker | None = None
    kind = TrackerOptions()


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
    *,
    device: Device | None = None,
) -> None:
    """Make this process's RNG tracker. If there is one already, nothing changes, and it must have the options given.

    False asks for nothing, so that seeding by default keeps a tracker that was made with options. But with
    `inference_rng_tracker` False a tracker without streams is refused.

    Args:
        use_te_rng_tracker: Transformer Engine's tracker (CUDA, graph-safe) instead of ours.
        inference_rng_tracker: A tracker without streams, whose forks change nothing; overrides `use_te_rng_tracker`.
        use_cudagraphable_rng: States that CUDA graphs can be registered with.
        force_reset: Discard the present tracker first, with its streams.
        device: The device whose generator draws; None: the current CUDA device if the process has one, else the CPU.

    Raises:
        ValueError: there is a tracker already, which lacks an option given, or is on another device.
        ImportError: Transformer Engine's tracker is asked for and missing.
    """
    kind = TrackerOptions(bool(use_te_rng_tracker), bool(inference_rng_tracker), bool(use_cudagraphable_rng))
    if Process.tracker is not None and not force_reset:
        existing = generator_of(Process.tracker.device)
        no_streams = Process.kind.inference_rng_tracker and not kind.inference_rng_tracker
        if no_streams or _lacks(kind) or (device is not None and generator_of(device) is not existing):
            raise ValueError(
                f"the RNG tracker was made with {Process.kind._asdict()} on {existing.device}; now "
                f"{kind._asdict()} on {device or existing.device} is asked for, while its streams may be in use: ask "
                f"for the same, or pass force_reset=True (force_reset_rng=True when seeding) to start anew"
            )
        return
    if kind.inference_rng_tracker:
        Process.tracker = InferenceCudaRNGStatesTracker(kind.use_cudagraphable_rng, True, device)
    elif kind.use_te_rng_tracker:
        Process.tracker = make_te_tracker()
    else:
        Process.tracker = CudaRNGStatesTracker(kind.use_cudagraphable_rng, False, device)
    Process.kind = kind


def _lacks(kind: TrackerOptions) -> bool:
    """Return whether the existing tracker was made without an option that is asked for."""
    return any(asked and not has for asked, has in zip(kind, Process.kind, strict=True))


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> Tracker:
    """Return this process's RNG tracker; one is made if there is none.

    False asks for nothing: `get_cuda_rng_tracker()` returns whichever tracker there is.

    Raises:
        ValueError: an option is asked for that the existing tracker does not have.
    """
    kind = TrackerOptions(bool(use_te_rng_tracker), bool(inference_rng_tracker), bool(use_cudagraphable_rng))
    if Process.tracker is None or _lacks(kind):
        initialize_rng_tracker(*kind)
    return Process.tracker


def get_all_rng_states() -> dict[str, State]:
    """Return the named states of this process's tracker, and no copies, to be registered with a CUDA graph.

    Raises:
        RuntimeError: there is no tracker yet.
    """
    if Process.tracker is None:
        raise RuntimeError("there is no RNG tracker yet: call model_parallel_cuda_manual_seed(seed) first")
    return Process.tracker.states_


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: Tracker) -> bool:
    """True if the tracker's states are `torch.Generator`s, which CUDA graphs can be registered with."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False)) or is_te_tracker(cuda_rng_tracker)


class RandomMoment:
    """The states of all generators that a function may draw from: the CPU's, the tracker's, those of CUDA `devices`.

    Megatron's own tracker is included, from which Megatron's layers draw if ours does not replace it.
    """

    def __init__(self, devices: Iterable[torch.device] = ()):
        self._devices = [device for device in devices if device.type == "cuda"]
        self._tracker = Process.tracker
        # The host's, as in torch.get_rng_state: if a device is emulated, torch.default_generator is another one.
        generators = [torch.random.default_generator, *map(generator_of, self._devices)]
        if self._tracker is not None:
            self._streams = self._tracker.moment()
            by_tracker = generator_of(self._tracker.device)
            generators = [generator for generator in generators if generator is not by_tracker]
        elif torch.cuda.is_initialized():
            generators.append(generator_of())
        self._states = [(g, g.get_state()) for g in generators if not capturing(g)]
        megatron = sys.modules.get("megatron.core.tensor_parallel.random")
        megatrons = getattr(megatron, "_CUDA_RNG_STATE_TRACKER", None)
        self._megatrons: Any = None if megatrons is self._tracker else megatrons
        named = {} if self._megatrons is None else self._megatrons.states_
        self._megatrons_streams = {name: copy_state(state) for name, state in named.items()}

    def restore(self) -> None:
        """Set all states back. Generators that were capturing a CUDA graph stay as they are."""
        for generator, state in self._states:
            generator.set_state(state)
        if self._tracker is not None:
            self._tracker.go_to(self._streams)
        for name, megatrons in self._megatrons_streams.items():
            own = self._megatrons.states_.get(name)
            if not isinstance(own, Generator):
                self._megatrons.states_[name] = megatrons
            elif own is not megatrons:
                own.set_state(value_of(megatrons))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw this moment's numbers again inside the context; afterwards put the generators back."""
        now = RandomMoment(self._devices)
        try:
            self.restore()
            yield
        finally:
            now.restore()


def fork_rng() -> contextlib.AbstractContextManager[None]:
    """Return a context that sets all generators and streams back afterwards, whatever is drawn or seeded inside."""
    return RandomMoment().again()


def get_all_states() -> tuple[Tensor, State, dict[str, State]]:
    """Return the present states of the CPU's generator, of the tracker's device's, and of the tracker's streams.

    While a CUDA graph is captured the last two are the states themselves, since they cannot be copied then.
    """
    tracker = get_cuda_rng_tracker()
    on_device = get_rng_state(tracker.device, graph_safe=capturing(generator_of(tracker.device)))
    return torch.get_rng_state(), on_device, tracker.get_states()


def set_all_states(cpu_rng_state: Tensor, cuda_rng_state: State, cuda_rng_state_tracker: Mapping[str, State]) -> None:
    """Set the states that `get_all_states()` returned."""
    tracker = get_cuda_rng_tracker()
    torch.set_rng_state(cpu_rng_state)
    set_rng_state(cuda_rng_state, tracker.device, graph_safe=is_graph_safe_cuda_rng_tracker(tracker))
    tracker.set_states(cuda_rng_state_tracker)
