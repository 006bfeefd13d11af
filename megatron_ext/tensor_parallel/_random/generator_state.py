"""The state of one random generator (CPU, CUDA, graph-safe): read, written and converted.

Dropout and initialisation draw from the default generator of the device that a program computes on. With no tensor at
hand that device is the current CUDA device where the process has one, else the CPU; a process that has a GPU and yet
computes on the CPU says so with `device="cpu"`. A state is either
- a tensor: the generator's state as bytes (uint8, on the CPU), a value; or
- a `torch.Generator`: a graph-safe state, an object. Registered with a CUDA graph it moves on at each replay, so it
  must stay the same object, and the generator in use shares it instead of copying it. CPU generators cannot share:
  there a graph-safe state is a copy like any other, and the same program runs.
"""

import torch
from torch import Generator, Tensor

State = Tensor | Generator
Device = int | str | torch.device


def generator_of(device: Device | None = None) -> Generator:
    """The default generator of `device`. None, -1, "cuda": of the current CUDA device if there is one, else the CPU."""
    if device is None or device == -1:
        device = "cuda"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # fills the list of default generators
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    if device.type == "cpu" or device.index is None:
        return torch.default_generator
    raise ValueError(
        f"device is {device}, but this process has no CUDA device; pass 'cpu', or None for the device in use"
    )


def capturing(generator: Generator) -> bool:
    """True while a CUDA graph is captured: then states can be shared, but neither read nor written."""
    return generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def get_rng_state(device: Device | None = "cuda", clone: bool = False, graph_safe: bool = False) -> State:
    """The state of `device`'s generator (see the top of this file).

    Args:
        device: As `generator_of` takes it.
        clone: With `graph_safe`: an independent copy, instead of the very state that the generator goes on to use.
        graph_safe: A `torch.Generator` instead of bytes.
    """
    generator = generator_of(device)
    if not graph_safe:
        return generator.get_state()
    if clone or generator.device.type != "cuda":
        return generator.clone_state()
    return generator.graphsafe_get_state()


def set_rng_state(new_state: State, device: Device | None = -1, graph_safe: bool = False) -> None:
    """Make `device`'s generator go on from `new_state`.

    With `graph_safe`, and a `new_state` that is a CUDA `torch.Generator`, the two share it from now on; otherwise its
    value is taken over.
    """
    generator = generator_of(device)
    if graph_safe and isinstance(new_state, Generator) and generator.device.type == "cuda":
        generator.graphsafe_set_state(new_state)
    else:
        generator.set_state(value_of(new_state))


def value_of(state: State) -> Tensor:
    """`state` as bytes."""
    return state if isinstance(state, Tensor) else state.get_state()


def convert_cuda_rng_state(state: State, to_graphable: bool = False) -> State:
    """`state` as bytes, or with `to_graphable` as a `torch.Generator`; `state` itself where it is one already.

    Raises:
        ValueError: `state` is neither.
    """
    if not isinstance(state, Tensor | Generator):
        raise ValueError(
            f"state is a {type(state).__name__}: it must be a uint8 tensor or a torch.Generator; "
            f"pass what get_states() of an RNG tracker returned"
        )
    if not to_graphable:
        return value_of(state)
    if isinstance(state, Generator):
        return state
    generator = generator_of().clone_state()
    generator.set_state(state)
    return generator


def copy_state(state: State) -> State:
    """A copy that does not move on with `state`; `state` itself while a CUDA graph is captured: no copies then."""
    if isinstance(state, Tensor):
        return state.clone()
    return state.clone_state() if isinstance(state, Generator) and not capturing(state) else state
