"""Seeds of the random streams as functions of a rank's tensor-, pipeline-, data- and expert-parallel ranks.

The seeds are Megatron's, so that a job continues with the same numbers on either package. Two of its choices are not
sound, and are mended only where it matters:
- the experts' seeds (base + 1024 + 100 ep + etp) run into the tensor-parallel ones (base + 2718 + tp) from ep 17 on:
  an expert stream that would meet one of the job's tensor-parallel streams moves to a range of its own;
- with the usual base, seed + 100 pp, pipeline stage 0's expert rank 1 draws what stage 1's expert rank 0 draws:
  `unique_streams=True` gives every (pp, ep, etp) a stream in that range.
"""

from typing import NamedTuple

from megatron_ext.distributed.groups import Coordinates, coordinates
from megatron_ext.tensor_parallel._random.generator_state import Device, generator_of
from megatron_ext.tensor_parallel._random.process_tracker import get_cuda_rng_tracker, initialize_rng_tracker
from megatron_ext.tensor_parallel._random.rng_tracker import (
    DATA_PARALLEL,
    EXPERT_GENERALIZED,
    EXPERT_PARALLEL,
    GENERALIZED,
    MODEL_PARALLEL,
)

# The range of its own lies above whatever Megatron's formulas reach, and all of it within 32 bits: CPU generators look
# at no more of a seed.
_OWN_RANGE = 1 << 20
_ETP_RANKS, _EP_RANKS, _PP_RANKS = 1 << 6, 1 << 12, 1 << 12


class StreamSeeds(NamedTuple):
    """The seeds of one rank's streams."""

    data: int  # the same on all tensor-parallel ranks; also that of the default stream
    model: int  # this tensor-parallel rank's
    expert: int  # the same wherever (ep, etp) is the same, on whichever tensor-parallel rank


def stream_seeds(seed: int, at: Coordinates, *, unique_streams: bool = False) -> StreamSeeds:
    """The seeds of the rank `at` these coordinates."""
    for name, ranks in (("ep_rank", _EP_RANKS), ("etp_rank", _ETP_RANKS), ("pp_rank", _PP_RANKS), ("tp_rank", 1 << 16)):
        rank = getattr(at, name)
        if not 0 <= rank < ranks:
            raise ValueError(f"{name} is {rank}: it must be in [0, {ranks}); pass this rank's place in its group")
    expert = 1024 + 100 * at.ep_rank + at.etp_rank
    meets_tensor_parallel_stream = expert - 2718 == at.tp_rank or expert - 2718 in range(at.tp_size)
    if unique_streams or meets_tensor_parallel_stream:
        expert = _OWN_RANGE + (at.pp_rank * _EP_RANKS + at.ep_rank) * _ETP_RANKS + at.etp_rank
    return StreamSeeds(data=seed, model=seed + 2718 + at.tp_rank, expert=seed + expert)


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
    *,
    pp_rank: int | None = None,
    tp_size: int | None = None,
    unique_streams: bool = False,
    device: Device | None = None,
) -> None:
    """Seed the default generator and all streams of this process's RNG tracker, once the groups are initialised.

    Nothing should seed the device's generator afterwards. Streams that the tracker had are forgotten.

    Args:
        seed: The base; in Megatron `seed + 100 * pp_rank`.
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, device: As `initialize_rng_tracker` takes them.
        tp_rank, ep_rank, etp_rank, pp_rank: This rank's numbers in these groups; None: those in Megatron's groups.
        gtp_remat_rank, egtp_remat_rank, gtp_remat_world_size, egtp_remat_world_size: This rank's numbers in, and the
            sizes of, generalized tensor parallelism, of dense layers and of experts; None: those of Megatron's groups.
            If it has several ranks the tracker gets a stream for their first values.
        force_reset_rng: Make a new tracker even if there is one. Up to Megatron-Core 0.19 this argument had the place
            of `gtp_remat_rank`: a bool there is taken for it.
        tp_size: Number of tensor-parallel ranks; None: that of Megatron's groups. Pass it with the ranks if there are
            no groups: replicas of an expert on several ranks must agree where Megatron's seeds collide.
        unique_streams: Give every (pp, ep, etp) an expert stream of its own. By default some meet, as in Megatron.

    Raises:
        ValueError: a rank is out of range, or neither given nor known; the tracker that exists lacks an option given.
        ImportError: Transformer Engine's tracker is asked for and missing.
    """
    if isinstance(gtp_remat_rank, bool):
        force_reset_rng = gtp_remat_rank
        gtp_remat_rank = None
    given = {"tp_rank": tp_rank, "ep_rank": ep_rank, "etp_rank": etp_rank, "pp_rank": pp_rank, "tp_size": tp_size}
    given.update(gtp_rank=gtp_remat_rank, gtp_size=gtp_remat_world_size)
    given.update(egtp_rank=egtp_remat_rank, egtp_size=egtp_remat_world_size)
    here = coordinates()
    if here is None:
        needed = ["tp_rank", "ep_rank", "etp_rank"] + ["pp_rank"] * unique_streams
        if missing := [name for name in needed if given[name] is None]:
            raise ValueError(
                f"{', '.join(missing)} not given, and Megatron's parallel_state is not initialised though several "
                f"ranks run: they would all draw the same; pass them, or call initialize_model_parallel() first"
            )
        here = Coordinates()
    at = here._replace(**{name: value for name, value in given.items() if value is not None})
    seeds = stream_seeds(seed, at, unique_streams=unique_streams)
    initialize_rng_tracker(
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset=force_reset_rng, device=device
    )
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    generator_of(tracker.device).manual_seed(seeds.data)
    tracker.add(DATA_PARALLEL, seeds.data)
    tracker.add(MODEL_PARALLEL, seeds.model)
    tracker.add(EXPERT_PARALLEL, seeds.expert)
    if at.gtp_size > 1:
        tracker.add(GENERALIZED, seeds.model + (1 + at.gtp_rank) * (1 << 16))
    if at.egtp_size > 1:
        tracker.add(EXPERT_GENERALIZED, seeds.expert + (1 << 15) + (1 + at.egtp_rank) * (1 << 16))
