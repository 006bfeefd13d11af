"""The functions of torch.distributed that ask for NCCL's group by its type: replaced once, for groups of ours alone."""

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_on_cpu.nccl_rules.process_group import NcclRulesGroup

_device_is_set = False


def replace() -> None:
    """Has no effect on groups of other backends."""
    if hasattr(distributed_c10d.batch_isend_irecv, "_of_nccl_rules"):
        return
    batch, device = distributed_c10d.batch_isend_irecv, distributed_c10d._get_object_coll_device

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
        return [] if work is None else [work]

    @functools.wraps(device)
    def _get_object_coll_device(group: Any = None) -> str:
        found = group or distributed_c10d._get_default_group()
        if isinstance(found, NcclRulesGroup) and not (_device_is_set or found.rules.device_is_set):
            raise RuntimeError(
                "a collective of objects moves through GPU memory under NCCL, and no device was chosen: every rank "
                "would take cuda:0; call torch.cuda.set_device(local_rank) first, or give `device`"
            )
        return device(group)

    batch_isend_irecv._of_nccl_rules = True  # type: ignore[attr-defined]
    distributed_c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv
    distributed_c10d._get_object_coll_device = _get_object_coll_device


def device_was_set(*args: Any) -> None:
    """What `torch.cuda.set_device` does where there is none."""
    global _device_is_set
    _device_is_set = True
