"""Tensors: whether values can be read (the tensor is not fake or traced), errors for wrong values, the distance between
rows of matrices, and the dtypes of sums and of logits.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.torch_version import TorchVersion

# Types that need no test for being fake, which would take a tenth of a small call's time.
_PLAIN = (Tensor, torch.nn.Parameter)


def has_values(x: Tensor) -> bool:
    """Return whether `x` is a real tensor, neither a fake one nor one of a graph that is being compiled."""
    if torch.compiler.is_compiling() or not (x.is_cpu or x.is_cuda):
        return False
    wrapped = torch._C._are_functorch_transforms_active() or torch._is_functional_tensor(x)
    return not is_fake(x) if wrapped or type(x) not in _PLAIN else True


def on_host(x: Tensor) -> bool:
    """Return whether values of `x` can be read without waiting for a device: then Python on a few numbers costs less
    than operators."""
    return not x.is_cuda and has_values(x)


def check_plain(argument: str, x: Any) -> None:
    """Raise ValueError for a DTensor, and in a transform of torch.func, which our autograd functions do not support."""
    if torch.compiler.is_compiling():
        return
    distributed = sys.modules.get("torch.distributed.tensor")  # None: there is no DTensor
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise ValueError(
            f"{argument} is a DTensor: it must be a plain tensor; pass its local tensor, {argument}.to_local(), with "
            f"the process group of the mesh dim that shards it, or all of it, {argument}.full_tensor()"
        )
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            f"{argument} is in a transform of torch.func (grad, vmap, jvp, ...): it must be called outside; use "
            f"torch.autograd.grad or backward(), and pass a batch as leading dims"
        )


class OutsideVocabulary(ValueError):
    """A token id that does not exist, which one rank alone may have been given."""


def raise_unless(right: Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """Raise `error` unless `right`, a bool tensor with a value; on CUDA a device-side assertion without a host sync."""
    if right.is_cuda:
        torch._assert_async(right, message)
    elif not right:
        raise error(message)


def ids_exist(ids: Tensor, size: int, spared: int | None) -> Tensor:
    """Return whether each of the integers `ids` is in [0, size), or `spared`: bool without dims."""
    wide = ids.long()  # a narrow integer would wrap the size
    right = (wide >= 0) & (wide < size)
    if spared is not None:
        right |= wide == spared
    return right.all()


def check_within(
    argument: str,
    ids: Tensor,
    size: int,
    fix: str = "",
    spared: int | None = None,
    exist: Callable[[Tensor, int, int | None], Tensor] = ids_exist,
) -> bool:
    """Raise OutsideVocabulary unless each of the integers `ids` is in [0, size) or `spared`; `fix` ends its sentence.

    The ids of real CPU tensors are read; on CUDA the check is a device-side assertion without a host sync; while
    compiling or on fake tensors there is none. Returns whether all ids were seen to be in [0, size). `exist`:
    `ids_exist`, or a function that returns the same on CUDA.
    """
    if not has_values(ids):
        return False
    found = "one outside"
    if not ids.is_cuda:
        if not ids.numel():
            return True
        lowest, highest = ids.aminmax()
        if lowest.item() >= 0 and highest.item() < size:
            return True
        wide = ids.long()
        outside_N = wide[(wide < 0) | (wide >= size)]
        outside_N = outside_N if spared is None else outside_N[outside_N != spared]
        if not outside_N.numel():
            return False
        found = f"{outside_N[:1].tolist()}, outside"
    raise_unless(
        exist(ids, size, spared),
        f"{argument} holds {found} [0, {size}): each must be a token id of the vocabulary{fix}",
        OutsideVocabulary,
    )
    return False


def fault_within(argument: str, ids: Tensor, size: int, fix: str = "") -> ValueError | None:
    """Return the fault that `check_within` finds, for a rank that tells the others before all of them raise."""
    try:
        check_within(argument, ids, size, fix)
    except OutsideVocabulary as fault:
        return ValueError(str(fault))
    return None


def raise_if(wrong: Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """Raise `error` where `wrong`, a bool tensor with a value, is true: `raise_unless` with a launch more on CUDA."""
    raise_unless(~wrong, message, error)


LINE_BYTES = 64
_READS_ONE_COLUMN = TorchVersion(torch.__version__) < "2.11"
# cuBLAS keeps to its fast kernels where rows begin at multiples of 16 bytes, and Triton loads as many at a time.
_CUDA_MULTIPLE = 16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are made: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_tensor_cores(like: Tensor) -> bool:
    """Return whether products of such tensors have 16-bit operands on a GPU."""
    return like.is_cuda and like.element_size() == 2


def new_matrix(like: Tensor, tokens: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Make a matrix `[tokens, columns]` for logits, with gaps between the rows where that is quicker.

    On CPU rows begin at cache lines, one line further apart than they need: a power of two apart, as for many
    vocabularies, they would fall into the same places of the cache, and at 32768 columns the three fp32 matmuls would
    take 10 % longer. 16-bit gaps are zero: on processors with AMX oneDNN's bf16 matmul reads past the end of a row and
    multiplies these numbers by zero, which is NaN if they are NaN or infinite. On CUDA gaps end at a multiple of 16
    elements, and nothing writes to them.
    """
    more, dtype = 0, dtype or like.dtype
    # No gaps while torch compiles, which takes no such `out`, nor for one column if torch.mm reads such an `out`.
    if not torch.compiler.is_compiling() and (columns != 1 or not _READS_ONE_COLUMN):
        line = LINE_BYTES // dtype.itemsize
        more = -columns % _CUDA_MULTIPLE if like.is_cuda else -columns % line + line
    matrix = like.new_empty(tokens, columns + more, dtype=dtype)
    if more and not like.is_cuda and dtype.itemsize == 2:
        matrix[:, columns:].zero_()
    return matrix[:, :columns]


def widens(x_TD: Tensor, rounds: bool = False) -> bool:
    """Return whether logits of such hidden states are wider than these, in fp32: of 16-bit operands on CUDA, unless
    logits are to be rounded."""
    return on_tensor_cores(x_TD) and not rounds


def logit_dtype(x_TD: Tensor, rounds: bool) -> torch.dtype:
    """Return the dtype of logits of such hidden states."""
    return torch.float32 if widens(x_TD, rounds) else x_TD.dtype


def part_of(x: Tensor, rows: slice, columns: int | None = None) -> Tensor:
    """Return `x[rows, :columns]`, or `x` itself if that is all of it: indexing costs small calls much of their time."""
    x = x if rows.stop - rows.start == x.shape[0] else x[rows]
    return x if columns is None or columns >= x.shape[1] else x[:, :columns]


def parts_of(rows: slice, *given: Tensor | None) -> list[Tensor | None]:
    """Apply `part_of` to each tensor that is not None."""
    return [None if x is None else part_of(x, rows) for x in given]


def pieces(x_ND: Tensor) -> list[slice]:
    """Cut rows of `x_ND` for elementwise work between matmuls: on CUDA for few launches, on CPU to fit its cache."""
    count, width = x_ND.shape
    step = max(1, (1 << (25 if x_ND.is_cuda else 20)) // max(width, 1))
    if 0 < count <= step:
        return [slice(0, count)]
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


_SHORT = 256


def sums_of_rows(x_TV: Tensor) -> Tensor:
    """Sum each row, the last additions in fp64, since they lose most; all of them in fp64 would cost 4 times as much.
    Rows of at most 256 numbers are summed in their own dtype; in fp32 that costs an error of about 2e-7.
    """
    if x_TV.shape[1] <= _SHORT:
        return x_TV.sum(1)
    end = x_TV.shape[1] // 16 * 16
    whole_TV = x_TV if end == x_TV.shape[1] else x_TV[:, :end]
    sums_T = whole_TV.view(x_TV.shape[0], 16, end // 16).sum(-1).sum(1, dtype=torch.float64)
    return sums_T if whole_TV is x_TV else sums_T + x_TV[:, end:].sum(1)
