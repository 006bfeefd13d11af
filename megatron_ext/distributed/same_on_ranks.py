"""Check that all ranks pass a call the same arguments, before anything is sent that depends on them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.distributed.groups import Group, group_size


def require_same(
    call: str,
    facts: Mapping[str, Any],
    groups: Sequence[Group],
    device: torch.device | str = "cpu",
    fault: Exception | None = None,
    advice: str = "pieces of weights would not fit each other; give every rank the same model (config, weights, code) "
    "and the same arguments",
) -> None:
    """Compare digests of `facts` over all ranks, and raise on every one of them if any differs or has a fault.

    Args:
        call: the name of the call, for the message; `advice`: the consequence of a difference, and the fix.
        facts: values by name, the same names in the same order on all ranks. Values are compared by their `repr`, which
            must not hold addresses or sets.
        groups: this rank's groups along the dims of the grid of ranks that take part; messages are on `device`.
        fault: an error of this rank, passed here instead of being raised at once.

    Communicates: one all-gather of `len(facts) + 1` int64 for each of `groups` with several ranks.
    """
    hashes = (hashlib.sha256(repr(value).encode()).digest() for value in facts.values())
    digests = [int.from_bytes(each[:8], "big", signed=True) for each in hashes]
    # Bit i: ranks differ in fact i; the last bit: one has a fault. Dim by dim the bits reach all ranks of the grid.
    found = 0 if fault is None else 1 << len(facts)
    for group in groups:
        if group_size(group) == 1:
            continue
        row = torch.tensor([[found, *digests]], dtype=torch.int64, device=device)
        others, *columns = all_gather(row, group).t().tolist()
        for other in others:
            found |= other
        for i, column in enumerate(columns):
            found |= (len(set(column)) > 1) << i
    if fault is not None:
        raise fault
    if found >> len(facts):
        raise ValueError(f"{call}: another rank refused what it was given, and its own error says why")
    if found:
        different = ", ".join(name for i, name in enumerate(facts) if found >> i & 1)
        raise ValueError(f"{call}: ranks differ in {different}, so that {advice}")
