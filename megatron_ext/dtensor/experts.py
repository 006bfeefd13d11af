"""Experts of a mixture, stored as parameters with the experts in dim 0, over tensor-parallel ranks.

Every rank gets all tokens and the router's choices. Each rank holds either some of the experts, or a piece of every
expert. In both cases outputs are summed over the ranks, and so are the gradients of tokens and of router weights.

Legend: T tokens, K experts chosen for each, E experts, F intermediate size, D hidden size, R tensor-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_ext.dtensor.styles import local_parameters, own_parts, shard_parameter


class ExpertsByExpert(ParallelStyle):
    """Style by which a rank holds E / R whole experts, of any formula and layout, and computes their tokens."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters()):
            shard_parameter(module, name, device_mesh, Shard(0))
        module.num_experts //= device_mesh.size()
        own, first = module.num_experts, module.num_experts * device_mesh.get_local_rank()
        compute = module.forward

        def forward(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
            hidden_TD, weights_TK = _copied(hidden_TD, device_mesh), _copied(weights_TK, device_mesh)
            own_TK = chosen_TK - first
            token, slot = ((own_TK >= 0) & (own_TK < own)).nonzero(as_tuple=True)
            expert, weight = own_TK[token, slot], weights_TK[token, slot]
            if token.numel() == 0:  # a token with weight 0: FSDP2 reduces gradients, which each rank must have
                token = expert = token.new_zeros(1)
                weight = weights_TK[:1, 0] * 0
            with local_parameters(module, {name: p.to_local() for name, p in module.named_parameters()}):
                out = compute(hidden_TD[token], expert[:, None], weight[:, None])
            wide = torch.promote_types(hidden_TD.dtype, torch.float32)
            total_TD = torch.zeros(hidden_TD.shape, dtype=wide, device=hidden_TD.device)
            return _summed(total_TD.index_add(0, token, out.to(wide)).to(hidden_TD.dtype), device_mesh)

        module.forward = forward
        return module


class ExpertsByColumn(ParallelStyle):
    """Style by which a rank holds F / R of every expert, whose parameters must have a known layout: `column_layout`."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if reason := column_layout(module, ranks):
            raise ValueError(f"tensor parallelism cannot cut this model: {reason}")
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        dims = {name: _column_dim(module, name) for name in shapes}
        for name, dim in dims.items():
            shard_parameter(module, name, device_mesh, Replicate() if dim is None else Shard(dim))
        compute: Callable[..., Tensor] = module.forward

        def own(name: str, parameter: Any) -> Tensor:
            dim = dims[name]
            if dim is None:  # the bias that is added after the sum over ranks
                return parameter.to_local(grad_placements=[Partial()]) / ranks
            if module.is_concatenated and name.startswith("gate_up_proj"):
                half = shapes[name][dim] // 2
                return own_parts(parameter, (half, half), dim)
            return parameter.to_local()

        def forward(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
            hidden_TD, weights_TK = _copied(hidden_TD, device_mesh), _copied(weights_TK, device_mesh)
            with local_parameters(module, {name: own(name, p) for name, p in module.named_parameters()}):
                return _summed(compute(hidden_TD, chosen_TK, weights_TK), device_mesh)

        module.forward = forward
        return module


def are_stacked(module: nn.Module) -> bool:
    """Return whether `module` holds experts as parameters `[E, ...]`, and nothing else."""
    count = getattr(module, "num_experts", None)
    parameters = list(module.named_parameters())
    direct = len(parameters) == len(list(module.named_parameters(recurse=False))) > 0
    return direct and isinstance(count, int) and all(p.shape[0] == count for _, p in parameters)


def column_layout(module: Any, ranks: int) -> str | None:
    """Return why `ExpertsByColumn` cannot cut these experts over `ranks`; None if it can."""
    if not all(hasattr(module, name) for name in ("is_concatenated", "is_transposed", "has_bias", "has_gate")):
        return "the layout of its experts is not known; set expert_parallel_size to the tensor-parallel size"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts end in a norm; set expert_parallel_size to the tensor-parallel size"
    down = dict(module.named_parameters()).get("down_proj")
    if down is None or down.dim() != 3:
        return "its experts have no down_proj; set expert_parallel_size to the tensor-parallel size"
    size = down.shape[1 if module.is_transposed else 2]
    if size % ranks:
        return f"an expert's intermediate size is {size}, no multiple of {ranks} ranks; use fewer"
    return None


def reach_all(block: nn.Module, experts: nn.Module) -> None:
    """Give experts without tokens gradients of zero: FSDP2 hangs if some ranks have a gradient and others none."""

    def reach(module: nn.Module, args: tuple, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in experts.parameters())
        nothing = sum(p.flatten()[:1].sum() * 0 for p in parameters)
        return (first + nothing, *output[1:]) if isinstance(output, tuple) else first + nothing

    block.register_forward_hook(reach)


def _column_dim(module: Any, name: str) -> int | None:
    if name == "down_proj":
        return 1 if module.is_transposed else 2
    if name == "down_proj_bias":
        return None
    return 1 if name.endswith("_bias") or not module.is_transposed else 2


def _copied(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, which all ranks hold alike; its gradient is summed over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
