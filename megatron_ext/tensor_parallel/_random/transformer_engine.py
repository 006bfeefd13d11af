"""Transformer Engine's part in random numbers and recomputation, where it is installed and asked for."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Generator

from megatron_ext.optional_packages import why_not_loaded
from megatron_ext.tensor_parallel._random.generator_state import (
    capturing,
    generator_of,
    get_rng_state,
    set_rng_state,
    value_of,
)

MEGATRON_SIDE = "megatron.core.extensions.transformer_engine"


def have_transformer_engine() -> bool:
    """True if Transformer Engine is installed; asking does not import it."""
    if "transformer_engine" in sys.modules:
        return sys.modules["transformer_engine"] is not None
    return find_spec("transformer_engine") is not None


def is_loaded() -> bool:
    """True if Transformer Engine's layers are imported."""
    return sys.modules.get("transformer_engine.pytorch.distributed") is not None


def transformer_engine(module: str, needed_for: str) -> ModuleType:
    """Import `transformer_engine.pytorch.<module>`; raise ImportError if it is missing or broken."""
    try:
        return import_module(f"transformer_engine.pytorch.{module}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{needed_for} needs Transformer Engine, which is not installed ({error}): "
            f"pip install transformer-engine[pytorch], or do without {needed_for}"
        ) from error
    except Exception as error:  # a broken installation raises RuntimeError, FileNotFoundError
        raise ImportError(
            f"{needed_for} needs Transformer Engine, and {why_not_loaded('transformer_engine', error)}: "
            f"install the build for this torch and this CUDA, or do without {needed_for}"
        ) from error


def is_te_tracker(tracker: Any) -> bool:
    """Return whether the class of `tracker` is Transformer Engine's or derived from it."""
    distributed = sys.modules.get("transformer_engine.pytorch.distributed")
    return distributed is not None and isinstance(tracker, distributed.CudaRNGStatesTracker)


def make_te_tracker() -> Any:
    """Make Transformer Engine's tracker with the methods that Megatron's callers and our recomputation expect of one.

    If Megatron's own class derived from it is loaded, ours is derived from that: Megatron's CUDA graphs look for it.
    """
    distributed = transformer_engine("distributed", needed_for="use_te_rng_tracker=True")
    base = getattr(sys.modules.get(MEGATRON_SIDE), "TECudaRNGStatesTracker", None)
    if not (isinstance(base, type) and issubclass(base, distributed.CudaRNGStatesTracker)):
        base = distributed.CudaRNGStatesTracker

    class TECudaRNGStatesTracker(base):  # type: ignore[valid-type, misc]
        is_inference_rng_tracker = False
        use_cudagraphable_rng = True
        device = "cuda"

        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def is_initialized(self) -> bool:
            return bool(self.states_)

        def moment(self) -> Any:
            """The states of all streams, as values; None while a CUDA graph is captured, when states cannot be read."""
            if capturing(generator_of(self.device)):
                return None
            in_use = get_rng_state(self.device, graph_safe=True)
            assert isinstance(in_use, Generator)
            named = {name: value_of(state).clone() for name, state in self.states_.items()}
            return in_use, in_use.get_state(), named

        def go_to(self, moment: Any) -> None:
            """Take the streams and the generator (back) to a `moment()`."""
            if moment is None:
                return
            in_use, value, named = moment
            for name, state in named.items():
                if isinstance(self.states_[name], Generator):
                    self.states_[name].set_state(state)
                else:  # where generators cannot share states
                    self.states_[name] = state.clone()
            set_rng_state(in_use, self.device, graph_safe=True)
            in_use.set_state(value)

    return TECudaRNGStatesTracker()


class Fp8Recompute:
    """The fp8 settings of a forward, for its recomputation. Transformer Engine then quantizes both runs alike.

    Args:
        told: Tell Transformer Engine of both runs even if the forward runs without fp8.
    """

    def __init__(self, told: bool) -> None:
        self._phase = transformer_engine("distributed", needed_for="fp8").activation_recompute_forward
        try:
            fp8 = import_module("transformer_engine.pytorch.quantization")
        except ModuleNotFoundError:  # before Transformer Engine 2.8
            fp8 = transformer_engine("fp8", needed_for="fp8")
        state = fp8.FP8GlobalStateManager
        self._is_on, enabled = state.is_fp8_enabled, state.is_fp8_enabled()
        self._was_on, self._told = enabled, told or enabled
        recipe, group = (state.get_fp8_recipe(), state.get_fp8_group()) if enabled else (None, None)
        if hasattr(fp8, "autocast"):  # fp8_autocast is deprecated then
            self._autocast = partial(fp8.autocast, enabled=enabled, recipe=recipe, amax_reduction_group=group)
        else:
            self._autocast = partial(fp8.fp8_autocast, enabled=enabled, fp8_recipe=recipe, fp8_group=group)

    def first(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the first run."""
        return self._in_phase(recompute_phase=False)

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        """Enter the context of the second run."""
        with self._autocast() if self._was_on or self._is_on() else contextlib.nullcontext():
            with self._in_phase(recompute_phase=True):
                yield

    def _in_phase(self, recompute_phase: bool) -> contextlib.AbstractContextManager[Any]:
        if not self._told:
            return contextlib.nullcontext()
        return self._phase(activation_recompute=True, recompute_phase=recompute_phase)
