"""NCCL's rules for jobs on CPUs: what gloo forgives, and a GPU does not.

    from megatron_on_cpu.nccl_rules import register

    register()
    dist.init_process_group("nccl_rules")

A program that passes on gloo and would hang or be refused on GPUs does so here, where it is told in seconds who waits
for whom, by line of code. `docs/nccl_rules.md` has the list of rules.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_on_cpu.nccl_rules import torch_functions
from megatron_on_cpu.nccl_rules.process_group import NcclRulesGroup
from megatron_on_cpu.nccl_rules.queues.engine import CommunicationHang, CommunicationMismatch, Engine, StallWarning
from megatron_on_cpu.nccl_rules.queues.order import LaunchOrderHazard, LaunchOrderWarning
from megatron_on_cpu.nccl_rules.rules import NcclRules

__all__ = [
    "CommunicationHang",
    "CommunicationMismatch",
    "LaunchOrderHazard",
    "LaunchOrderWarning",
    "NcclRules",
    "StallWarning",
    "register",
]

_rules = NcclRules()
_world: Engine | None = None


def register(rules: NcclRules | None = None) -> None:
    """Make "nccl_rules" a backend of torch.distributed for CPU tensors; a second call only changes `rules`.

    `init_process_group("nccl_rules", pg_options=NcclRules(...))` gives a job rules of its own; its other groups have
    them too.
    """
    global _rules
    _rules = rules or NcclRules()
    if not hasattr(dist.Backend, "NCCL_RULES"):
        dist.Backend.register_backend("nccl_rules", _create, extended_api=True, devices=["cpu"])
    torch_functions.replace()


def _create(found: Any, options: Any) -> NcclRulesGroup:
    """A group as torch describes it. The default group has no list of ranks, and brings the connections of all."""
    global _world
    ranks, timeout = list(found.global_ranks_in_group), found.timeout or timedelta(minutes=10)
    rules = options if isinstance(options, NcclRules) else _rules
    if ranks and _world is not None and not _world.closed:
        return NcclRulesGroup(_world, found.group_id, found.group_rank, ranks, timeout, owns=False)
    engine = Engine(found.store, found.group_rank, found.group_size, rules)
    if not ranks:
        _world = engine
    return NcclRulesGroup(engine, found.group_id, found.group_rank, range(found.group_size), timeout, owns=True)
