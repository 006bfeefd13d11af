"""What of the compiled module is not emulated: it is there by name, and says so when it is called."""

from collections.abc import Callable
from typing import Any

_USER_BUFFERS = "user buffers (tp_comm_overlap)"
_NVSHMEM = "NVSHMEM"
_PARAMETERS = "FP8 parameters that are blockwise or MXFP8 in the distributed optimizer (fp8_param_gather)"

REASONS = {
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


def refusals() -> dict[str, Any]:
    """A function or class for each."""
    return {name: _refusing_class(name) if name.startswith("Comm") else _refusing(name) for name in REASONS}


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name}: the CPU emulation of Transformer Engine does not have {REASONS[name]}; "
            "turn that off"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _refusing_class(name: str) -> type:
    return type(name, (), {"__init__": _refusing(name)})
