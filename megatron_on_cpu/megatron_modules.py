"""Replacements in Megatron's own modules, made after their import, where replacing functions of torch is not enough.

Most of them mend Megatron's fallbacks for missing Transformer Engine and Apex, which nobody runs on GPUs.
"""

import functools
import importlib.machinery
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import NonCallableMock

import torch

Replacements = Iterable[tuple[Any, dict[str, Any]]]


def always(**replacements: Any) -> Callable[[ModuleType], Replacements]:
    """Return a function that replaces these names in any module."""
    return lambda module: [(module, replacements)]


def _inference_layers(module: ModuleType) -> Replacements:
    """Replace mocks of inference layers, made if Transformer Engine is missing, by types, as isinstance needs."""
    mocks = [name for name, value in vars(module).items() if isinstance(value, NonCallableMock)]
    yield module, {name: type(name, (), {}) for name in mocks if name.startswith("Inference")}


def _layers(module: ModuleType) -> Replacements:
    """Silence the module's one warning that recommends CUDA_DEVICE_MAX_CONNECTIONS=1, for the speed of GPUs."""
    yield module.linear_with_grad_accumulation_and_async_allreduce, {"warned": True}


class TorchNorm:
    """torch's LayerNorm or RMSNorm, as the config names it, in the place of Transformer Engine's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        norm = (torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm)(hidden_size, eps=eps)
        for parameter in norm.parameters():  # Megatron sums their gradients over ranks, which have parts of the tokens
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _hybrid_stack(module: ModuleType) -> Replacements:
    """Replace the final norm of hybrid models, which is Transformer Engine's whatever their layer spec says."""
    if importlib.util.find_spec("transformer_engine") is None:
        yield module, {"TENorm": TorchNorm}


def _mamba_mixer(module: ModuleType) -> Replacements:
    """Give Megatron's Mamba mixer the classes and functions of mamba_ssm, which needs a GPU, if it is not installed."""
    if module.HAVE_MAMBA_SSM:
        return
    from megatron_on_cpu import state_space

    class Norm(state_space.GatedRMSNorm):
        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            """Describe the weight as sharded over the tensor-parallel ranks, as the heads are."""
            state = self.state_dict(prefix="", keep_vars=True)
            return module.make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)

    names = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")
    functions = {name: getattr(state_space, name) for name in names}
    norms = {"RMSNormGated": state_space.GatedRMSNorm, "ExtendedRMSNorm": Norm}
    yield module, {"HAVE_MAMBA_SSM": True, **functions, **norms}


def _mixture_of_experts(module: ModuleType) -> Replacements:
    """Define `te_general_gemm`, which the module compares with None but has only if Transformer Engine is installed."""
    yield module, {"te_general_gemm": getattr(module, "te_general_gemm", None)}


def _distributed_optimizer(module: ModuleType) -> Replacements:
    """Save and load the state of torch's Adam, which takes the place of the fused optimizers.

    Megatron reads the state before the first step has made it, lacks the step count when it fills in a loaded state,
    and shares one step tensor among all parameters, so that each step is counted once for each parameter.
    """
    optimizer = module.DistributedOptimizer
    describe, fill_in = optimizer.state_dict, optimizer._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    if not state:
                        zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                        state.update(step=torch.tensor(0.0), **zeros)
        return describe(self)

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {"step": state["step"], **tensors}
        fill_in(self, model_param, tensors)

    if not module.HAVE_APEX_OR_TE:
        fill = {"_set_main_param_and_optimizer_states": set_main_param_and_optimizer_states}
        yield optimizer, {"state_dict": state_dict, **fill}


def _fsdp_buffers(module: ModuleType) -> Replacements:
    """Set each buffer's `allocation_stream`, which Megatron sets only for tensors on CUDA, and compares later."""
    make = module.DBuffer.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.allocation_stream = torch.cuda.current_stream()

    yield module.DBuffer, {"__init__": init}


Modules = dict[str, Callable[[ModuleType], Replacements]]
MODULES: Modules = {
    # Megatron-LM's initialisation compiles CUDA kernels that nothing uses any more.
    "megatron.legacy.fused_kernels": always(load=lambda *args, **kwargs: None),
    # For older architectures Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1, or, with FSDP, any other value. The
    # variable orders kernels on GPUs, and has no meaning here.
    "megatron.training.arguments": always(get_device_arch_version=lambda: 10),
    # The module initialises CUDA before it refers to a generator's state.
    "megatron.core.tensor_parallel.random": always(_lazy_init=lambda: None),
    "megatron.core.tensor_parallel.layers": _layers,
    "megatron.core.tensor_parallel.inference_layers": _inference_layers,
    "megatron.core.models.hybrid.hybrid_block": _hybrid_stack,  # since 0.18
    "megatron.core.ssm.mamba_block": _hybrid_stack,
    "megatron.core.ssm.mamba_mixer": _mamba_mixer,
    "megatron.core.transformer.moe.moe_utils": _mixture_of_experts,
    # The module logs the memory of its processes. Where psutil is missing, a process dies of that, and the module
    # waits for it forever.
    "megatron.core.dist_checkpointing.strategies.filesystem_async": always(_process_memory=lambda: 0),
    "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
    "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer": _fsdp_buffers,  # on main
}


class AfterImport:
    """A finder for `sys.meta_path`: calls `then(module)` once a module of one of these names has been imported."""

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self._names, self._then = names, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's method shows again
            execute(module)
            self._then(module)

        loader.exec_module = exec_module
        return spec
