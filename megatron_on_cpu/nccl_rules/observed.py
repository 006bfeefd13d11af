"""The view of torch's dispatch modes on the backend: an operator that does nothing for each call, with c10d's name.

c10d's own operators ask for a backend in C++.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NAMES = (
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_base allgather_into_tensor_coalesced "
    "reduce_scatter reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base gather scatter barrier "
    "send recv"
)
_library = torch.library.Library("nccl_rules", "DEF")
for _name in _NAMES.split():
    _library.define(f"{_name}(Tensor[] tensors) -> ()")
    _library.impl(_name, lambda tensors: None, "CompositeExplicitAutograd")


def show(name: str, tensors: Sequence[Tensor]) -> None:
    """Tell the dispatch modes, if there are any, that `name` is called."""
    if torch._C._len_torch_dispatch_stack():
        getattr(torch.ops.nccl_rules, name)(list(tensors))
