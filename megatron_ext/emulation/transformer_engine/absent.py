"""What of the compiled module is not emulated: it is there by name, and says so when it is called."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_USER_BUFFERS = "user buffers (tp_comm_overlap)"
_NVSHMEM = "NVSHMEM"
_NVFP4 = "NVFP4"
_GROUPED = "tensors that hold a group of experts in one piece, which need compute capability 10"
_NEWTON_SCHULZ = "cuSolverMp's Newton-Schulz iteration"
_PARAMETERS = "FP8 parameters that are blockwise or MXFP8 in the distributed optimizer (fp8_param_gather)"

_REASONS = {
    "CommOverlap": _USER_BUFFERS,
    "CommOverlapBase": _USER_BUFFERS,
    "CommOverlapCore": _USER_BUFFERS,
    "CommOverlapHelper": _USER_BUFFERS,
    "CommOverlapP2P": _USER_BUFFERS,
    "CommOverlapP2PBase": _USER_BUFFERS,
    "bulk_overlap_ag_with_external_gemm": _USER_BUFFERS,
    "init_nvshmem_backend": _NVSHMEM,
    "create_nvshmem_tensor": _NVSHMEM,
    "nvshmem_send_on_current_stream": _NVSHMEM,
    "nvshmem_wait_on_current_stream": _NVSHMEM,
    "nvshmem_finalize": _NVSHMEM,
    "fp8_block_scaling_compute_partial_amax": _PARAMETERS,
    "fp8_block_scaling_partial_cast": _PARAMETERS,
    "mxfp8_scaling_compute_partial_amax": _PARAMETERS,
    "mxfp8_scaling_partial_cast": _PARAMETERS,
}
_SINCE_2_20 = {
    _NVFP4: (
        "nvfp4_2d_compute_partial_amax nvfp4_2d_multi_tensor_transpose nvfp4_2d_partial_cast nvfp4_2d_scale_transpose "
        "nvfp4_compute_global_scale nvfp4_compute_per_block_scale nvfp4_data_transpose nvfp4_expand_scale_to_fp8 "
        "nvfp4_fused_scale nvfp4_group_quantize_with_amax nvfp4_multi_tensor_2d_partial_cast "
        "nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale nvfp4_quantize_with_amax"
    ),
    _GROUPED: (
        "bgrad_group_quantize group_dequantize group_quantize group_requantize_inplace grouped_swizzle_for_gemm "
        "get_grouped_gemm_setup_workspace_size te_general_grouped_gemm_for_discrete_in copy_data_ptrs_to_device "
        "te_general_grouped_gemm_for_discrete_out te_general_grouped_gemm_for_grouped_tensor splits_to_offsets "
        "splits_to_offsets_multi group_scaled_swiglu group_scaled_clamped_swiglu"
    ),
    _NEWTON_SCHULZ: "newton_schulz cusolvermp_ctx_create cusolvermp_ctx_destroy",
    "attention in FP8": "multi_tensor_transpose_to_bhsd multi_tensor_pad_last_dim",
    "scales in the order of the GPU's products": (
        "swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_unchecked_"
    ),
    "context parallelism that reorders packed sequences": (
        "thd_copy_valid_tokens_from_per_split_to_rank_local thd_cp_rank_order_to_sequence_order "
        "thd_sequence_order_to_cp_rank_order"
    ),
    "routers that count quantiles": "fused_topk_with_score_function_qb_fwd",
    "allocation in bulk": "bulk_allocate",
}
# Of a module in the module, of one function.
_SUBMODULE, _OF_SUBMODULE = "grouped_mlp_experimental", "swizzle_scales_and_pack_ptrs_for_discrete_weights"


def reasons(version: tuple[int, int]) -> dict[str, str]:
    """Why each name that is not there in this version is not."""
    later = {name: why for why, names in _SINCE_2_20.items() for name in names.split()}
    return _REASONS | later if version >= (2, 20) else _REASONS


def refusals(version: tuple[int, int]) -> dict[str, Any]:
    """A function or class for each of these names."""
    found: dict[str, Any] = {
        name: _refusing_class(name, why) if name.startswith("Comm") else _refusing(name, why)
        for name, why in reasons(version).items()
    }
    if version >= (2, 20):
        found[_SUBMODULE] = SimpleNamespace(**{_OF_SUBMODULE: _refusing(f"{_SUBMODULE}.{_OF_SUBMODULE}", _GROUPED)})
    return found


def _refusing(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name}: the CPU emulation of Transformer Engine does not have {why}; "
            "turn that off"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _refusing_class(name: str, why: str) -> type:
    return type(name, (), {"__init__": _refusing(name, why)})
