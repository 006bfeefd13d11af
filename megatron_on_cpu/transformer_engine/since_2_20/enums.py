"""The enumerations of `transformer_engine_torch` that are different or new in 2.20."""

from enum import IntEnum
from typing import Any

from megatron_on_cpu.transformer_engine import enums


def _with(enumeration: Any, **more: int) -> Any:
    """Return `enumeration` with more members."""
    return IntEnum(enumeration.__name__, dict(enumeration.__members__) | more, module=__name__)


NVTE_QKV_Format = _with(enums.NVTE_QKV_Format, NVTE_BHSD=7, NVTE_QKV_Format_NOT_SET=8)
NVTE_QKV_Layout = _with(enums.NVTE_QKV_Layout, NVTE_BHSD_BHSD_BHSD=25, NVTE_QKV_Layout_NOT_SET=26)
Float8BlockScaleTensorFormat = _with(enums.Float8BlockScaleTensorFormat, INVALID=2)
NVTE_Fused_Attn_Backend: Any = IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}, module=__name__
)
NVTEScalingMode: Any = IntEnum(
    "NVTEScalingMode",
    {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
    module=__name__,
)
NVTERoutingMapFormat: Any = IntEnum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8", start=0, module=__name__)
NVTEQBHistogramMode: Any = IntEnum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC", start=0, module=__name__)
