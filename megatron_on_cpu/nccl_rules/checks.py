"""Refusals of NCCL, or of torch's NCCL process group, with exceptions of the same types."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_OTHER_FLOAT8 = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}  # NCCL moves them as bytes
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
DTYPES = _FLOATS | _FLOAT8 | _OTHER_FLOAT8 | _INTEGERS
_REDUCTIONS = {
    name: getattr(dist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM", "BAND", "BOR", "BXOR")
}


def check_message(what: str, x: Tensor) -> None:
    """Check the tensor of a send or receive as `check_all` does, but let it be dense in any order of its dims."""
    if not x.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(x):
        x = x.as_strided((x.numel(),), (1,))
    check_all(what, [x])


def check_all(what: str, tensors: Sequence[Tensor], strided: Sequence[Tensor] = ()) -> None:
    """Check that tensors are dense, contiguous in their memory format, and of one dtype, which NCCL has.

    Tensors that are also in `strided` may have gaps, since torch's NCCL group copies them.
    """
    for x in tensors:
        contiguous = x.is_contiguous() or _channels_last(x) or any(x is one for one in strided)
        if x.device.type != "cpu":
            raise ValueError(f"{what}: a tensor on {x.device} was given; this backend takes tensors on the CPU")
        if x.layout is not torch.strided:
            raise ValueError(f"{what}: a tensor of layout {x.layout} was given; NCCL takes dense tensors")
        if not contiguous:
            raise ValueError(
                f"{what}: a tensor of shape {list(x.shape)} and strides {list(x.stride())} was given; NCCL takes "
                "contiguous tensors: call .contiguous() first"
            )
        if x.dtype not in DTYPES:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
            raise TypeError(f"{what}: a tensor of {x.dtype} was given; NCCL has {names}")
    if len(dtypes := {x.dtype for x in tensors}) > 1:
        raise TypeError(f"{what}: tensors of one type are needed, not of {', '.join(sorted(map(str, dtypes)))}")


def _channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def check_shapes(what: str, name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for x in tensors:
        if x.shape != like.shape:
            raise ValueError(
                f"{what}: {name} must have the shape {list(like.shape)} of the other tensor, not {list(x.shape)}"
            )


def check_count(what: str, name: str, found: int, size: int) -> None:
    if found != size:
        raise ValueError(
            f"{what}: {name} needs one tensor for each of the {size} ranks of the group, {found} were given"
        )


def check_times(what: str, whole: Tensor, piece: Tensor, size: int) -> None:
    if whole.numel() != piece.numel() * size:
        raise ValueError(
            f"{what}: the larger tensor has {whole.numel()} elements; it needs {size} times the {piece.numel()} of the "
            "smaller one, as many for each rank: NCCL has no uneven pieces here"
        )


def reduction(what: str, op: dist.ReduceOp, dtype: torch.dtype) -> tuple[str, float]:
    """Return the name of `op` in lower case ("sum"), and the factor of PREMUL_SUM, or 1.0; refuse what NCCL lacks."""
    name = next((name for name, known in _REDUCTIONS.items() if op == known), None)
    if name is None:
        raise ValueError(f"{what}: the reduction {op} is not one of NCCL's sum, avg, product, min, max, premul_sum")
    if name in ("BAND", "BOR", "BXOR"):
        raise ValueError(f"{what}: ReduceOp.{name} is a reduction that NCCL does not have")
    if dtype is torch.bool and name == "AVG":
        raise TypeError(f"{what}: ReduceOp.AVG of booleans is refused by NCCL's group")
    if dtype in _OTHER_FLOAT8:
        raise TypeError(f"{what}: a reduction of {dtype} was asked for, which NCCL has on no GPU")
    if name == "PREMUL_SUM" and dtype not in _FLOATS:
        raise TypeError(f"{what}: PREMUL_SUM of {dtype} was asked for; NCCL has it for floats of 16, 32 and 64 bits")
    state: Any = op.__getstate__()  # for a premultiplied sum (PREMUL_SUM, factor)
    return name.lower(), float(state[1]) if name == "PREMUL_SUM" else 1.0


def check_splits(what: str, name: str, splits: Sequence[int], x: Tensor, size: int) -> None:
    if splits and len(splits) != size:
        raise ValueError(f"{what}: {name}={list(splits)} needs one number for each of the {size} ranks")
    rows = x.shape[0] if x.dim() else 1
    if splits and sum(splits) != rows:
        raise ValueError(f"{what}: {name}={list(splits)} must add up to the {rows} rows of its tensor")
    if not splits and rows % size:
        raise ValueError(f"{what}: {rows} rows do not divide by {size} ranks; pass {name}")
