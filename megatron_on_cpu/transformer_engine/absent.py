"""Names of the compiled module that are not emulated: each raises an error when it is called."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_GROUPED = "tensors that hold a group of experts in one piece, which need compute capability 10"

# Names by the feature that is not emulated.
_IN_ALL = {
    "user buffers (tp_comm_overlap)": (
        "CommOverlap CommOverlapBase CommOverlapCore CommOverlapHelper CommOverlapP2P CommOverlapP2PBase "
        "bulk_overlap_ag_with_external_gemm"
    ),
    "NVSHMEM": (
        "init_nvshmem_backend create_nvshmem_tensor nvshmem_send_on_current_stream nvshmem_wait_on_current_stream "
        "nvshmem_finalize"
    ),
    "FP8 parameters that are blockwise or MXFP8 in the distributed optimizer (fp8_param_gather)": (
        "fp8_block_scaling_compute_partial_amax fp8_block_scaling_partial_cast mxfp8_scaling_compute_partial_amax "
        "mxfp8_scaling_partial_cast"
    ),
}
_SINCE_2_20 = {
    "NVFP4": (
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
    "cuSolverMp's Newton-Schulz iteration": "newton_schulz cusolvermp_ctx_create cusolvermp_ctx_destroy",
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
# The compiled module's submodule, and its one function.
_SUBMODULE, _OF_SUBMODULE = "grouped_mlp_experimental", "swizzle_scales_and_pack_ptrs_for_discrete_weights"


def reasons(version: tuple[int, int]) -> dict[str, str]:
    """Return each name of this version that is not emulated, with the feature that it belongs to."""
    absent = _IN_ALL | _SINCE_2_20 if version >= (2, 20) else _IN_ALL
    return {name: why for why, names in absent.items() for name in names.split()}


def refusals(version: tuple[int, int]) -> dict[str, Any]:
    """Return a function or class for each name of `reasons`, which raises NotImplementedError when called."""
    found: dict[str, Any] = {
        name: type(name, (), {"__init__": _refusing(name, why)}) if name.startswith("Comm") else _refusing(name, why)
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
