"""`CudaRNGStatesTracker`: several named random streams on one generator.

Tensor-parallel ranks must draw the same numbers for tensors that they hold in common, and different ones for sharded
tensors. So each rank has named streams, seeded apart, and `fork(name)` lets the generator draw from one for a while:

    with get_cuda_rng_tracker().fork():      # this tensor-parallel rank's own stream
        dropout(partial_hidden)
    dropout(hidden)                          # the default stream: the same on all ranks

One stream is in use, the others are parked; the default stream is one like the others. The idea and the names are
Megatron-LM's (https://arxiv.org/abs/1909.08053). Nothing here communicates.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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

MODEL_PARALLEL = "model-parallel-rng"  # this tensor-parallel rank's own numbers
EXPERT_PARALLEL = "expert-parallel-rng"  # the experts': one stream per (expert-parallel, expert-tensor-parallel) rank
DATA_PARALLEL = "data-parallel-rng"  # the same on all tensor-parallel ranks
GENERALIZED = "gtp-remat-rng"  # first values of weights under generalized tensor parallelism: one stream per rank of it
EXPERT_GENERALIZED = "egtp-remat-rng"  # the same for experts
DEFAULT = "default-rng"  # the stream outside of any fork; has no entry in states_


def get_data_parallel_rng_tracker_name() -> str:
    """Name the stream that is the same on all tensor-parallel ranks."""
    return DATA_PARALLEL


def get_expert_parallel_rng_tracker_name() -> str:
    """Name the experts' stream."""
    return EXPERT_PARALLEL


def get_gtp_remat_rng_tracker_name(is_expert: bool = False) -> str:
    """Name the stream of first values under generalized tensor parallelism, which exists if that has several ranks."""
    return EXPERT_GENERALIZED if is_expert else GENERALIZED


class Moment(NamedTuple):
    """The states of a tracker's streams, as values, to which a recomputation goes back."""

    in_use: str
    default: Tensor
    named: dict[str, Tensor]


class CudaRNGStatesTracker:
    """Named random streams of one device's default generator.

    Args:
        use_cudagraphable_rng: States are `torch.Generator`s, for registration with CUDA graphs, instead of tensors.
        is_inference_rng_tracker: Only stored, for callers that read it; see `InferenceCudaRNGStatesTracker`.
        device: The device whose generator draws; None: the current CUDA device if the process has one, else the CPU.
    """

    def __init__(
        self,
        use_cudagraphable_rng: bool = False,
        is_inference_rng_tracker: bool = False,
        device: Device | None = None,
    ):
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self.device = device
        self.reset()

    def is_initialized(self) -> bool:
        """True if streams were added or set since the tracker was made or reset."""
        return self._is_initialized

    def reset(self) -> None:
        """Forget all streams. The generator stays as it is; a fork that is open ends without touching it."""
        self._is_initialized = False
        self.states_: dict[str, State] = {}  # that of the stream in use is as it was parked last
        self.seeds_: set[int] = set()
        self._in_use = DEFAULT
        self._default: State | None = None  # as it was parked last

    def get_states(self) -> dict[str, State]:
        """Return a copy of every named stream's present state, which does not move on with the tracker."""
        if self._in_use != DEFAULT:
            self._park()
        return {name: copy_state(state) for name, state in self.states_.items()}

    def set_states(self, states: Mapping[str, State]) -> None:
        """Replace all named streams by a copy of `states`, in either form (bytes or `torch.Generator`).

        A graph-safe state stays the object that it is and takes over the value, so that the graphs it is registered
        with follow. A stream in use goes on as it is, and overwrites its state when its fork ends.
        """
        self._is_initialized = True
        self.states_ = {name: self._adopt(self.states_.get(name), copy_state(state)) for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Add a stream `name`, seeded with `seed`.

        Raises:
            ValueError: the tracker has a stream of this name, or one of this seed, which would draw the same numbers.
        """
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists: two streams would draw the same numbers; pass another one")
        if name in self.states_:
            raise ValueError(f"name {name!r} already exists among {sorted(self.states_)}; pass another one, or reset()")
        self._is_initialized = True
        self.seeds_.add(seed)
        generator = Generator(generator_of(self.device).device).manual_seed(seed)
        self.states_[name] = generator if self.use_cudagraphable_rng else generator.get_state()

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the stream `name` inside the context; afterwards from the stream before. Nests.

        Raises:
            ValueError: there is no such stream.
        """
        if name not in self.states_:
            raise ValueError(
                f"name {name!r} is no stream of this tracker, which has {sorted(self.states_)}: "
                f"call model_parallel_cuda_manual_seed(seed), or add(name, seed), first"
            )
        before = self._in_use
        self._use(name)
        on_cpu = generator_of(self.device).device.type == "cpu"
        cpu_state = None if on_cpu else torch.get_rng_state()
        try:
            yield
        finally:
            if cpu_state is not None and not torch.equal(cpu_state, torch.get_rng_state()):
                logging.getLogger(__name__).warning(
                    "random numbers were drawn on the CPU inside fork(%r), which is about the GPU's: they come from "
                    "the CPU's only stream",
                    name,
                )
            if self._in_use == name:  # else reset() came in between
                self._use(before)

    def moment(self) -> Moment | None:
        """Return the states of all streams; None while a CUDA graph is captured, when states cannot be read."""
        if capturing(generator_of(self.device)):
            return None
        self._park()
        assert self._default is not None
        values = {name: value_of(state) for name, state in self.states_.items()}
        return Moment(self._in_use, value_of(self._default), values)

    def go_to(self, moment: Moment | None) -> None:
        """Take the streams, the generator and the choice of the stream in use (back) to a `moment()`."""
        if moment is None:
            return
        self._park()
        self.states_ = {name: self._adopt(self.states_.get(name), value) for name, value in moment.named.items()}
        self._default = self._adopt(self._default, moment.default)
        self._unpark(moment.in_use)

    def _use(self, name: str) -> None:
        self._park()
        self._unpark(name)

    def _park(self) -> None:
        """Store the generator's state as that of the stream in use."""
        state = get_rng_state(self.device, graph_safe=self.use_cudagraphable_rng)
        if self._in_use == DEFAULT:
            self._default = state
        else:
            self.states_[self._in_use] = state

    def _unpark(self, name: str) -> None:
        """Give the generator the state of the stream `name`; if the generator refuses that, all stays as it was."""
        state = self._default if name == DEFAULT else self.states_[name]
        assert state is not None
        set_rng_state(state, self.device, graph_safe=self.use_cudagraphable_rng)
        self._in_use = name

    def _adopt(self, own: State | None, state: State) -> State:
        """Convert `state` to this tracker's form; write a graph-safe one into the object `own`, if there is one."""
        if not isinstance(state, Tensor | Generator) or (isinstance(state, Generator) and capturing(state)):
            return state
        if not self.use_cudagraphable_rng:
            return value_of(state)
        own = own if isinstance(own, Generator) else Generator(generator_of(self.device).device)
        own.set_state(value_of(state))
        return own


class InferenceCudaRNGStatesTracker(CudaRNGStatesTracker):
    """Tracker without streams: inference draws no numbers that depend on the sharding, and forks cost nothing."""

    def add(self, name: str, seed: int) -> None:
        """Do nothing."""

    def set_states(self, states: Mapping[str, State]) -> None:
        """Do nothing."""

    def fork(self, name: str = MODEL_PARALLEL) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Return a context that changes nothing."""
        return contextlib.nullcontext()
