"""NCCL's rules for jobs on CPUs: a backend that refuses what gloo accepts and NCCL does not.

    from megatron_on_cpu.nccl_rules import register

    register()
    dist.init_process_group("nccl_rules")

A program that passes on gloo, and on GPUs would hang or be refused, hangs or is refused here too; a hang is reported
within seconds, with the lines of code at which ranks wait for each other. `docs/nccl_rules.md` has the list of rules.
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

    `init_process_group("nccl_rules", pg_options=NcclRules(...))` gives a job its own rules, which all its groups share.
    """
    global _rules
    _rules = rules or NcclRules()
    if not hasattr(dist.Backend, "NCCL_RULES"):
        dist.Backend.register_backend("nccl_rules", _create, extended_api=True, devices=["cpu"])
    torch_functions.replace()


def _create(found: Any, options: Any) -> NcclRulesGroup:
    """Make the group that torch describes. The default group, which has no list of ranks, makes the engine, whose
    connections the other groups share."""
    global _world
    ranks, timeout = list(found.global_ranks_in_group), found.timeout or timedelta(minutes=10)
    rules = options if isinstance(options, NcclRules) else _rules
    if ranks and _world is not None and not _world.closed:
        return NcclRulesGroup(_world, found.group_id, found.group_rank, ranks, timeout, owns=False)
    engine = Engine(found.store, found.group_rank, found.group_size, rules)
    if not ranks:
        _world = engine
    return NcclRulesGroup(engine, found.group_id, found.group_rank, range(found.group_size), timeout, owns=True)
