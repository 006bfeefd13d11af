"""Random streams and recomputation of tensor-parallel models. Drop-in for megatron.core.tensor_parallel.random.

The code is in `_random/`: one generator's state, trackers of named streams, this process's tracker, and the seeds of
each rank; and in `_recompute/`: activations that are computed again in backward.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ext.tensor_parallel._random.generator_state import convert_cuda_rng_state
from megatron_ext.tensor_parallel._random.generator_state import get_rng_state as _get_cuda_rng_state
from megatron_ext.tensor_parallel._random.generator_state import set_rng_state as _set_cuda_rng_state
from megatron_ext.tensor_parallel._random.process_tracker import (
    Process,
    get_all_rng_states,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)
from megatron_ext.tensor_parallel._random.process_tracker import fork_rng as _fork_rng
from megatron_ext.tensor_parallel._random.process_tracker import get_all_states as _get_all_rng_states
from megatron_ext.tensor_parallel._random.process_tracker import set_all_states as _set_all_rng_states
from megatron_ext.tensor_parallel._random.rng_tracker import DATA_PARALLEL as _DATA_PARALLEL_RNG_TRACKER_NAME
from megatron_ext.tensor_parallel._random.rng_tracker import EXPERT_GENERALIZED as _EXPERT_GTP_REMAT_RNG_TRACKER_NAME
from megatron_ext.tensor_parallel._random.rng_tracker import EXPERT_PARALLEL as _EXPERT_PARALLEL_RNG_TRACKER_NAME
from megatron_ext.tensor_parallel._random.rng_tracker import GENERALIZED as _GTP_REMAT_RNG_TRACKER_NAME
from megatron_ext.tensor_parallel._random.rng_tracker import MODEL_PARALLEL as _MODEL_PARALLEL_RNG_TRACKER_NAME
from megatron_ext.tensor_parallel._random.rng_tracker import (
    CudaRNGStatesTracker,
    InferenceCudaRNGStatesTracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    get_gtp_remat_rng_tracker_name,
)
from megatron_ext.tensor_parallel._random.seeds import model_parallel_cuda_manual_seed
from megatron_ext.tensor_parallel._random.transformer_engine import have_transformer_engine
from megatron_ext.tensor_parallel._recompute.checkpoint import CheckpointFunction, checkpoint
from megatron_ext.tensor_parallel._recompute.checkpoint_without_output import (
    CheckpointWithoutOutput,
    CheckpointWithoutOutputFunction,
    CheckpointWithoutOutputManager,
)
from megatron_ext.tensor_parallel._recompute.replay_forward import Depth, is_checkpointing
from megatron_ext.tensor_parallel._recompute.replay_forward import set_checkpointing as _set_checkpointing
from megatron_ext.tensor_parallel._recompute.replay_forward import unset_checkpointing as _unset_checkpointing
from megatron_ext.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

__all__ = [
    "_DATA_PARALLEL_RNG_TRACKER_NAME",
    "_EXPERT_GTP_REMAT_RNG_TRACKER_NAME",
    "_EXPERT_PARALLEL_RNG_TRACKER_NAME",
    "_GTP_REMAT_RNG_TRACKER_NAME",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "CheckpointFunction",
    "CheckpointWithoutOutput",
    "CheckpointWithoutOutputFunction",
    "CheckpointWithoutOutputManager",
    "CudaRNGStatesTracker",
    "InferenceCudaRNGStatesTracker",
    "_fork_rng",
    "_get_all_rng_states",
    "_get_cuda_rng_state",
    "_set_all_rng_states",
    "_set_checkpointing",
    "_set_cuda_rng_state",
    "_unset_checkpointing",
    "checkpoint",
    "convert_cuda_rng_state",
    "gather_split_1d_tensor",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "get_gtp_remat_rng_tracker_name",
    "initialize_rng_tracker",
    "is_checkpointing",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "split_tensor_into_1d_equal_chunks",
]


def _living_in(owner: Any, name: str, kind: Callable[[Any], Any]) -> property:
    """Make a property for `owner.name`, converted by `kind`. `mock.patch` deletes a variable before it sets it back."""
    return property(
        lambda _: kind(getattr(owner, name)),
        lambda _, value: setattr(owner, name, value),
        lambda _: delattr(owner, name),
    )


class _Random(ModuleType):
    """Class of this module: its changing variables are read from, and written to, the objects that hold them."""

    IS_CHECKPOINTING = _living_in(Depth, "now", bool)
    _CUDA_RNG_STATE_TRACKER = _living_in(Process, "tracker", lambda tracker: tracker)

    @property
    def HAVE_TE(self) -> bool:
        return have_transformer_engine()

    @property
    def _CUDA_RNG_STATE_TRACKER_INITIALIZED(self) -> bool:
        return Process.tracker is not None

    @_CUDA_RNG_STATE_TRACKER_INITIALIZED.setter
    def _CUDA_RNG_STATE_TRACKER_INITIALIZED(self, value: bool) -> None:
        if not value:
            Process.tracker = None


sys.modules[__name__].__class__ = _Random
