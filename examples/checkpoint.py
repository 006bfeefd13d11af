"""Save and load a training run with Megatron's `dist_checkpointing`, at any tensor- and pipeline-parallel size.

    DIR/latest_checkpointed_iteration.txt     60
    DIR/iter_0000060/                         weights, optimizer, schedule, random numbers, samples consumed

The files are laid out by the model's global shapes, not by rank: a run saved at one size goes on at another.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

LATEST = "latest_checkpointed_iteration.txt"

# The distributed optimizer stores its state by parameter, which a run with any other sharding can read.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def model_parallel_sizes() -> tuple[int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def seed_everything(seed: int) -> None:
    """Seed as Megatron does: each pipeline stage has its own seed, and in tensor-parallel regions each rank."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _random_state() -> ShardedObject:
    """Return the state of this rank's random generators; data-parallel ranks draw alike, so the first one saves."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    own = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return ShardedObject("rng", state, model_parallel_sizes(), own, replica_id=parallel_state.get_data_parallel_rank())


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _sharded_state(model, optimizer, scheduler, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict(metadata=dict(METADATA))
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(METADATA)),
        "scheduler": scheduler.state_dict(),
    }
    return state | {"rng": _random_state()} if with_random_state else state


def save(directory: str, iteration: int, consumed_samples: int, model, optimizer, scheduler) -> None:
    """Write a checkpoint of `iteration` under `directory`; all ranks call it. `model` is wrapped by Megatron's DDP.

    The file that names the newest checkpoint is written when all files of the checkpoint are complete.
    """
    folder = Path(directory) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = _sharded_state(model, optimizer, scheduler, is_loading=False, with_random_state=True)
    state |= {"iteration": iteration, "consumed_samples": consumed_samples, "sizes": model_parallel_sizes()}
    dist_checkpointing.save(state, str(folder))
    if dist.get_rank() == 0:
        (Path(directory) / LATEST).write_text(f"{iteration}\n")
    dist.barrier()


def find_latest(directory: str) -> Path:
    """Return the folder of the newest checkpoint under `directory`.

    Raises:
        ValueError: there is none.
    """
    pointer = Path(directory) / LATEST
    if not pointer.is_file():
        raise ValueError(f"--load is {directory!r}: it has no {LATEST}; give the folder that --save was given")
    return Path(directory) / f"iter_{int(pointer.read_text()):07d}"


def iteration_of(folder: Path) -> int:
    """Return the number of iterations before the checkpoint."""
    return int(folder.name.removeprefix("iter_"))


def load(directory: str, seed: int, model, optimizer, scheduler) -> tuple[int, int]:
    """Restore what `save` wrote; all ranks call it. Returns the iterations done and the samples consumed.

    Random number generators go on where they stopped if the model-parallel sizes are the same. At other sizes dropout
    is drawn in other shapes, so the generators are seeded anew, from `seed` and the iteration.

    Raises:
        ValueError: there is no checkpoint, another script has written it, or its vocabulary has another size, to which
            Megatron would pad or cut the weights.
    """
    folder = str(find_latest(directory))
    saved = dist_checkpointing.load_common_state_dict(folder)
    missing = [name for name in ("iteration", "consumed_samples", "sizes") if name not in saved]
    if missing:
        raise ValueError(
            f"--load has a checkpoint without {', '.join(missing)}: it was not written by this script; give a folder "
            f"that --save was given"
        )
    tensors, vocab_size = dist_checkpointing.load_tensors_metadata(folder), model.module.vocab_size
    saved_size = tensors["embedding.word_embeddings.weight"].global_shape[0]
    if saved_size != vocab_size:
        raise ValueError(
            f"--load has a checkpoint of {saved_size} words, and --vocab-size is {vocab_size}: a tokenizer of another "
            f"size has other words; give the one that was trained with"
        )
    same_sizes = tuple(saved["sizes"]) == model_parallel_sizes()
    wanted = _sharded_state(model, optimizer, scheduler, is_loading=True, with_random_state=same_sizes)
    state = dist_checkpointing.load(wanted, folder)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if same_sizes:
        _set_random_state(state["rng"])
    else:
        seed_everything(seed + state["iteration"])
    return state["iteration"], state["consumed_samples"]
