"""`transformer_engine_torch` in plain PyTorch, as a module."""

from types import ModuleType
from typing import Any

from megatron_on_cpu.transformer_engine import absent, activations, device, enums, gemm, norms, optimizers
from megatron_on_cpu.transformer_engine.attention import fused, packed_sequences, rope, softmax
from megatron_on_cpu.transformer_engine.experts import permutation, router
from megatron_on_cpu.transformer_engine.quantisation import scales, tensors
from megatron_on_cpu.transformer_engine.since_2_20 import activations as new_activations
from megatron_on_cpu.transformer_engine.since_2_20 import attention as new_attention
from megatron_on_cpu.transformer_engine.since_2_20 import enums as new_enums
from megatron_on_cpu.transformer_engine.since_2_20 import routers as new_routers
from megatron_on_cpu.transformer_engine.since_2_20 import tensors as new_tensors

NAME = "transformer_engine_torch"
_WHOLE_FILES = (device, enums, gemm, norms, optimizers, packed_sequences, permutation, rope, router, softmax)
_SINCE_2_20 = (new_attention, new_enums, new_routers, new_tensors)
_OF_ATTENTION = "get_fused_attn_backend fused_attn_fwd fused_attn_bwd"
_OF_TENSORS = "quantize dequantize bgrad_quantize multi_tensor_quantize split_quantize fp8_transpose swap_first_dims"
_OF_SCALES = (
    "compute_amax fused_amax_and_scale_update_after_reduction multi_tensor_compute_scale_and_scale_inv "
    "multi_tensor_compute_scale_inv_e8m0"
)


def compiled_module(version: tuple[int, int]) -> ModuleType:
    """Return a module of all functions and classes of this version: those that are not emulated raise when called."""
    module = ModuleType(NAME, "Stands in for Transformer Engine's compiled module on the CPU.")
    names = vars(module)
    for file in _WHOLE_FILES:
        names.update(_made_in(file))
    for file, some in (fused, _OF_ATTENTION), (tensors, _OF_TENSORS), (scales, _OF_SCALES):
        names.update({name: getattr(file, name) for name in some.split()})
    names.update(activations.functions())
    if version >= (2, 20):
        for file in _SINCE_2_20:
            names.update(_made_in(file))
        names.update(new_activations.functions())
        names["fused_moe_aux_loss_fwd_graph_safe"] = router.fused_moe_aux_loss_fwd
    names.update(absent.refusals(version))
    names["__version__"] = "emulated"
    return module


def _made_in(file: ModuleType) -> dict[str, Any]:
    """Return the public functions and classes that `file` defines, by name."""
    own = {name: value for name, value in vars(file).items() if getattr(value, "__module__", "") == file.__name__}
    return {name: value for name, value in own.items() if not name.startswith("_")}
