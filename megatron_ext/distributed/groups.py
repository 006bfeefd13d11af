"""Process groups, the ranks that hold the pieces of a tensor, and each rank's token ids. Only this module reads
Megatron's global state.

A group is a `torch.distributed.ProcessGroup`, or None for "not sharded". An object with its methods `size()` and
`rank()` passes for a group, as in Megatron: other methods are needed only where something is sent. Megatron's groups
are looked up in `megatron.core.parallel_state` if that is imported; it is never imported here, since a `parallel_state`
that is not imported cannot have been initialised.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.distributed.sizes import check_size

Group = ProcessGroup | None

# As a tp_group: not sharded, even where Megatron's groups are initialised and None would mean them.
UNSHARDED: Any = "unsharded"


def group_size(group: Group) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """This rank's number in `group`; 0 for None."""
    if group is None:
        return 0
    return dist.get_rank(group) if isinstance(group, ProcessGroup) else group.rank()


def is_registered(group: ProcessGroup) -> bool:
    """Return whether `group` still exists."""
    if not isinstance(group, ProcessGroup):
        return True
    try:
        dist.get_rank(group)
    except ValueError:  # also where torch.distributed was shut down as a whole
        return False
    return True


def check_group(group: Group, argument: str = "tp_group") -> Group:
    """Return `group`, after a check that it holds this rank.

    Raises:
        ValueError: `group` is not a process group, or this rank is not a member of it.
    """
    if group is None:
        return None
    looks_like_one = isinstance(group, ProcessGroup) or (hasattr(group, "size") and hasattr(group, "rank"))
    if group is dist.GroupMember.NON_GROUP_MEMBER or (looks_like_one and group_rank(group) < 0):
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"{argument} does not hold this rank (global rank {rank}): every caller must be a member; "
            f"pass the group that new_group() returned on this rank's own member list"
        )
    if not looks_like_one:
        raise ValueError(
            f"{argument} is a {type(group).__name__}: it must be a torch.distributed.ProcessGroup or None; "
            f"pass for instance parallel_state.get_tensor_model_parallel_group()"
        )
    return group


def parallel_state() -> ModuleType | None:
    """Megatron's `parallel_state` module where its model-parallel groups are initialised, else None."""
    module = sys.modules.get("megatron.core.parallel_state")
    return module if module is not None and module.model_parallel_is_initialized() else None


def tensor_parallel_group(group: Group = None, *, expert: bool = False, argument: str = "tp_group") -> Group:
    """The tensor-parallel group to use: `group` if given, else Megatron's (the experts' one if `expert`), else None.

    None means "not sharded", which is the fused head's default in a process without Megatron.

    Raises:
        ValueError: `group` does not hold this rank.
    """
    if group is UNSHARDED:
        return None
    if group is not None:
        return check_group(group, argument)
    state = parallel_state()
    if state is None:
        return None
    if expert:
        return state.get_expert_tensor_parallel_group(check_initialized=False)
    return state.get_tensor_model_parallel_group(check_initialized=False)


def data_parallel_group() -> Group:
    """Megatron's group of ranks that hold copies of this rank's parameters (data and context parallel), else None."""
    state = parallel_state()
    return None if state is None else state.get_data_parallel_group(with_context_parallel=True)


def context_parallel_group(group: Group = None, *, argument: str = "cp_group") -> Group:
    """The context-parallel group to use: `group` if given, else Megatron's, else None: the sequence is whole.

    Raises:
        ValueError: `group` does not hold this rank.
    """
    if group is not None:
        return check_group(group, argument)
    state = parallel_state()
    return None if state is None else state.get_context_parallel_group(check_initialized=False)


def require_tensor_parallel_group(group: Group = None, *, expert: bool = False, argument: str = "tp_group") -> Group:
    """Return `tensor_parallel_group()` for callers that cannot guess: None only in a process that stands alone.

    The layers and mappings use it: among several ranks without a group they would silently treat a shard as the whole.

    Raises:
        ValueError: several ranks run, and there is neither a `group` nor an initialised `parallel_state`.
    """
    found = tensor_parallel_group(group, expert=expert, argument=argument)
    if found is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{argument} is None and Megatron's parallel_state is not initialised, but {dist.get_world_size()} ranks "
            f"run: which of them share a tensor is unknown; pass {argument}, or call "
            f"megatron.core.parallel_state.initialize_model_parallel() first"
        )
    return found


def generalized_tensor_parallel_group(collection: Any = None, *, expert: bool = False) -> Group:
    """The group over which generalized tensor parallelism cuts each weight once more; None: there is none.

    The group is that of `collection` if it has one (`gtp_remat`, for experts `expt_gtp_remat`), else Megatron's, which
    Megatron-Core has from 0.19 on.
    """
    name = "expt_gtp_remat" if expert else "gtp_remat"
    if collection is not None and name in vars(collection):
        return vars(collection)[name]
    name = "get_expert_gtp_weight_remat_group" if expert else "get_gtp_weight_remat_group"
    get_group = getattr(parallel_state(), name, None)
    return None if get_group is None else get_group(check_initialized=False)


class Coordinates(NamedTuple):
    """This rank's number in each dimension of the model's sharding, and the sizes of some dimensions.

    `gtp` is generalized tensor parallelism, `egtp` that of experts.
    """

    tp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    pp_rank: int = 0
    tp_size: int = 1
    gtp_rank: int = 0
    gtp_size: int = 1
    egtp_rank: int = 0
    egtp_size: int = 1


def coordinates() -> Coordinates | None:
    """Return this rank's coordinates in Megatron's groups; without Megatron in one process, the only ones.

    None: they cannot be known, since several ranks run and `parallel_state` is not initialised.
    """
    state = parallel_state()
    if state is None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return Coordinates() if alone else None
    tp_rank, etp_rank = state.get_tensor_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
    gtp, egtp = generalized_tensor_parallel_group(), generalized_tensor_parallel_group(expert=True)
    return Coordinates(
        tp_rank=tp_rank,
        ep_rank=state.get_expert_model_parallel_rank(),
        etp_rank=tp_rank if etp_rank is None else etp_rank,  # None: the experts are sharded like everything else
        pp_rank=state.get_pipeline_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        gtp_rank=group_rank(gtp),
        gtp_size=group_size(gtp),
        egtp_rank=group_rank(egtp),
        egtp_size=group_size(egtp),
    )


def cuda_graph_phase() -> str | None:
    """Return the phase of Megatron's own CUDA graphs: "warmup" of a layer, "capture", or None."""
    module = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if module is None:
        return None
    if module.is_graph_capturing():
        return "capture"
    warming_up = hasattr(module, "is_graph_warmup") and module.is_graph_warmup()  # not in Megatron-Core 0.14
    return "warmup" if warming_up else None


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns `[start, stop)` of a vocabulary of `size` token ids.

    A vocabulary is often padded so that it divides by the number of ranks: a shard may reach past `size`, and those
    columns never count (they get no probability and no gradient). Shards may be uneven, and even empty.

    Raises:
        ValueError: a number is not whole, `0 <= start <= stop` or `size >= 1` does not hold, or (in the class's
            functions) `group` is no process group that holds this rank.

    Attributes:
        start: first token id of the shard, `size` or more if all its columns are padding.
        stop: one past its last column; `stop - start` is the number of rows of the weight shard.
        size: number of token ids that exist, over all ranks. The largest valid label is `size - 1`.
    """

    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        start, stop, size = self.start, self.stop, self.size
        if type(start) is type(stop) is type(size) is int and 0 <= start <= stop and size > 0:
            return  # the functions below would take a part of a small call's time
        check_size("vocab start", self.start)
        check_size("vocab stop", self.stop)
        check_size("vocab size", self.size, 1)
        if self.stop < self.start:
            raise ValueError(
                f"vocab start {self.start}, stop {self.stop}: must satisfy 0 <= start <= stop; pass where the shard's "
                f"columns begin and one past the last"
            )

    @classmethod
    def equal(cls, columns: int, group: Group, size: int | None = None) -> "VocabShard":
        """The shard of this rank if every rank of `group` holds `columns` columns, in rank order.

        `size`: the true vocabulary size if the last columns are padding; None: all columns count.
        """
        check_size("columns", columns)
        start = columns * group_rank(check_group(group, "group"))
        return cls(start, start + columns, columns * group_size(group) if size is None else size)

    @classmethod
    def split(cls, size: int, group: Group) -> "VocabShard":
        """The shard of this rank when `size` token ids are split over `group`, the first ranks one longer if uneven."""
        check_size("vocab size", size, 1)
        ranks, rank = group_size(check_group(group, "group")), group_rank(group)
        base, extra = divmod(size, ranks)
        start = rank * base + min(rank, extra)
        return cls(start, start + base + (rank < extra), size)

    @classmethod
    def chunk(cls, size: int, group: Group) -> "VocabShard":
        """The shard of this rank when DTensor or `torch.chunk` cut `size` token ids: the last ranks get less."""
        check_size("vocab size", size, 1)
        longest = -(-size // group_size(check_group(group, "group")))
        start = min(longest * group_rank(group), size)
        return cls(start, min(start + longest, size), size)

    @property
    def columns(self) -> int:
        """Number of columns of the shard, padding included."""
        return self.stop - self.start

    @property
    def counted(self) -> int:
        """Number of columns of the shard that count: those below `size`."""
        return max(0, min(self.stop, self.size) - self.start)

    def owns(self, token_ids: Tensor) -> Tensor:
        """Return a bool for each of `token_ids`: whether it is this shard's."""
        return (token_ids >= self.start) & (token_ids < min(self.stop, self.size))
