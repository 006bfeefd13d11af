"""`transformer_engine_torch` in plain PyTorch, as a module."""

from types import ModuleType

from megatron_ext.emulation.transformer_engine import absent, activations, device, enums, gemm, norms, optimizers
from megatron_ext.emulation.transformer_engine.attention import fused, packed_sequences, rope, softmax
from megatron_ext.emulation.transformer_engine.experts import permutation, router
from megatron_ext.emulation.transformer_engine.quantisation import scales, tensors

NAME = "transformer_engine_torch"
_WHOLE_FILES = (device, fused, gemm, norms, optimizers, packed_sequences, permutation, rope, router, softmax)
_OF_TENSORS = "quantize dequantize bgrad_quantize multi_tensor_quantize split_quantize fp8_transpose swap_first_dims"
_OF_SCALES = (
    "compute_amax fused_amax_and_scale_update_after_reduction multi_tensor_compute_scale_and_scale_inv "
    "multi_tensor_compute_scale_inv_e8m0"
)


def compiled_module() -> ModuleType:
    """All that is emulated by its name there, and refusals for the rest."""
    module = ModuleType(NAME, "Stands in for Transformer Engine's compiled module on the CPU.")
    names = vars(module)
    for file in _WHOLE_FILES:
        own = {name: value for name, value in vars(file).items() if getattr(value, "__module__", "") == file.__name__}
        names.update({name: value for name, value in own.items() if not name.startswith("_")})
    for file, some in (tensors, _OF_TENSORS), (scales, _OF_SCALES):
        names.update({name: getattr(file, name) for name in some.split()})
    for name, value in vars(enums).items():
        if isinstance(value, type) and value.__module__ == enums.__name__:
            names[name] = value
    names.update(activations.functions() | absent.refusals())
    names["__version__"] = "emulated"
    return module
