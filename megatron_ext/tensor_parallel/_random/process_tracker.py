"""This process's RNG tracker, and all of its generator states saved and restored together.

Whoever draws, seeds or recomputes asks `get_cuda_rng_tracker()`. The tracker is made at the first call and stays.
Asking later for what it does not have is an error: part of the program would go on with streams that the rest no longer
sees.
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
    """This process's tracker (None until somebody asks for it) and its kind."""

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
    """Make this process's RNG tracker. Called again it changes nothing; what is asked for has to be there then.

    False asks for nothing, so that seeding by default keeps a tracker that was made with options. But where
    `inference_rng_tracker` is False, a tracker without streams does not do.

    Args:
        use_te_rng_tracker: Transformer Engine's tracker (CUDA, graph-safe) instead of ours.
        inference_rng_tracker: One without streams, whose forks change nothing; goes before `use_te_rng_tracker`.
        use_cudagraphable_rng: States that CUDA graphs can be registered with.
        force_reset: Throw the present tracker away first, with its streams.
        device: Whose generator draws; None: the current CUDA device's where the process has one, else the CPU's.

    Raises:
        ValueError: there is a tracker already, which lacks what is asked for, or is on another device.
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
    """True if the tracker that there is was made without something that is asked for."""
    return any(asked and not has for asked, has in zip(kind, Process.kind, strict=True))


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> Tracker:
    """This process's RNG tracker; one is made if there is none.

    False says nothing about an existing tracker: `get_cuda_rng_tracker()` returns whichever there is.

    Raises:
        ValueError: something is asked for that the existing tracker does not have.
    """
    kind = TrackerOptions(bool(use_te_rng_tracker), bool(inference_rng_tracker), bool(use_cudagraphable_rng))
    if Process.tracker is None or _lacks(kind):
        initialize_rng_tracker(*kind)
    return Process.tracker


def get_all_rng_states() -> dict[str, State]:
    """The named states of this process's tracker, themselves: what to register with a CUDA graph.

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

    And the streams of Megatron's own tracker, from which its layers draw where ours is not in its place.
    """

    def __init__(self, devices: Iterable[torch.device] = ()):
        self._devices = [device for device in devices if device.type == "cuda"]
        self._tracker = Process.tracker
        # As torch.get_rng_state has it: with a device emulated, the host's, which is no longer torch.default_generator.
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
        """Set them all back. Generators that were busy with capturing a CUDA graph stay as they are."""
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
    """Put all generators and streams back afterwards, whatever is drawn or seeded inside."""
    return RandomMoment().again()


def get_all_states() -> tuple[Tensor, State, dict[str, State]]:
    """The CPU generator's state, that of the tracker's device, and the tracker's streams, all as they stand now.

    While a CUDA graph is captured the last two are the states themselves, since they cannot be copied then.
    """
    tracker = get_cuda_rng_tracker()
    on_device = get_rng_state(tracker.device, graph_safe=capturing(generator_of(tracker.device)))
    return torch.get_rng_state(), on_device, tracker.get_states()


def set_all_states(cpu_rng_state: Tensor, cuda_rng_state: State, cuda_rng_state_tracker: Mapping[str, State]) -> None:
    """Set what `get_all_states()` returned."""
    tracker = get_cuda_rng_tracker()
    torch.set_rng_state(cpu_rng_state)
    set_rng_state(cuda_rng_state, tracker.device, graph_safe=is_graph_safe_cuda_rng_tracker(tracker))
    tracker.set_states(cuda_rng_state_tracker)
