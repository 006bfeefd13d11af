"""Replacements of functions of torch.distributed that check for the type of NCCL's group, for `NcclRulesGroup`s."""

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_on_cpu.nccl_rules.process_group import NcclRulesGroup

_device_is_set = False


def replace() -> None:
    """Replace the functions, once per process; groups of other backends keep torch's behaviour."""
    if hasattr(distributed_c10d.batch_isend_irecv, "_of_nccl_rules"):
        return
    batch, device = distributed_c10d.batch_isend_irecv, distributed_c10d._get_object_coll_device
    make_group, split = distributed_c10d._new_process_group_helper, distributed_c10d.split_group
    of_make_group = inspect.signature(make_group)

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group if p2p_op_list else None
        group = group or distributed_c10d._get_default_group()
        if not isinstance(group, NcclRulesGroup):
            return batch(p2p_op_list)
        group._start_coalescing()
        try:
            batch(p2p_op_list)
        except BaseException:
            group._grouped = None
            raise
        work = group._end_coalescing()
        assert work is not None
        return [work]

    @functools.wraps(make_group)
    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        """Make a group; on ranks outside of it, take part in its split off an eager default group too."""
        made = make_group(*args, **kwargs)
        if made[0] is dist.GroupMember.NON_GROUP_MEMBER:
            default, given = distributed_c10d._get_default_group(), of_make_group.bind(*args, **kwargs).arguments
            if isinstance(default, NcclRulesGroup) and default.rules.eager and given["backend"] == "nccl_rules":
                default.split(given["group_name"])
        return made

    @functools.wraps(split)
    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        parent = parent_pg or distributed_c10d._get_default_group()
        if not isinstance(parent, NcclRulesGroup):
            return split(parent_pg, split_ranks, timeout, *args, **kwargs)
        if not parent.rules.eager:
            raise RuntimeError("split_group: NCCL splits groups only in a job with init_process_group(device_id=...)")
        if not split_ranks:
            raise ValueError(f"split_ranks={split_ranks!r} must be a list of lists of the parent's ranks")
        mine = next((sorted(ranks) for ranks in split_ranks if parent.getRank() in ranks), None)
        name: Any = parent.split(f"of {split_ranks}")
        if mine is None:
            return None
        name += f" {mine}"
        world, default = distributed_c10d._world, distributed_c10d._get_default_group()
        members = [dist.get_global_rank(parent, r) for r in mine]
        place, backend = mine.index(parent.getRank()), dist.Backend("nccl_rules")
        timeout = timeout or distributed_c10d._get_default_timeout(backend)
        more = {"timeout": timeout, "group_desc": kwargs.get("group_desc")}
        with parent.splitting():
            group, _ = make_group(len(mine), place, members, backend, world.pg_map[default][1], name, **more)
        world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(members)}
        return group

    @functools.wraps(device)
    def _get_object_coll_device(group: Any = None) -> str:
        found = group or distributed_c10d._get_default_group()
        if isinstance(found, NcclRulesGroup) and not (_device_is_set or found.rules.device_is_set):
            raise RuntimeError(
                "a collective of objects moves through GPU memory under NCCL, and no device was chosen: every rank "
                "would take cuda:0; call torch.cuda.set_device(local_rank) first, or pass `device`"
            )
        return device(group)

    distributed_c10d._new_process_group_helper = _new_process_group_helper
    distributed_c10d.split_group = dist.split_group = split_group
    batch_isend_irecv._of_nccl_rules = True  # type: ignore[attr-defined]
    distributed_c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv
    distributed_c10d._get_object_coll_device = _get_object_coll_device


def device_was_set(*args: Any) -> None:
    """Note that a device was set; it replaces `torch.cuda.set_device` in the emulation."""
    global _device_is_set
    _device_is_set = True
