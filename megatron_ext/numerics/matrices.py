"""Memory and dtypes of matrices: how far apart rows lie, in which dtype sums are made, and in which logits come."""

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

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
    """A new `[tokens, columns]` for logits, whose rows are longer than what they hold where that is quicker.

    On CPU rows begin at cache lines, one line further apart than they need: a power of two apart, as vocabularies make
    them, they fall into the same places of the cache, and at 32768 columns the three fp32 matmuls then take 10 %
    longer. 16-bit extra elements are zero: on processors with AMX oneDNN's bf16 matmul reads past the end of a row and
    multiplies what it finds there by zero, which is NaN where that is NaN or infinite. On CUDA up to a multiple of 16
    elements, which nothing writes.
    """
    more, dtype = 0, dtype or like.dtype
    # Not where torch compiles, which takes no `out` with gaps; nor one column where torch.mm read such an `out`.
    if not torch.compiler.is_compiling() and (columns != 1 or not _READS_ONE_COLUMN):
        line = LINE_BYTES // dtype.itemsize
        more = -columns % _CUDA_MULTIPLE if like.is_cuda else -columns % line + line
    matrix = like.new_empty(tokens, columns + more, dtype=dtype)
    if more and not like.is_cuda and dtype.itemsize == 2:
        matrix[:, columns:].zero_()
    return matrix[:, :columns]


def widens(x_TD: Tensor, rounds: bool = False) -> bool:
    """Return whether logits of such hidden states come wider than these, in fp32: 16-bit operands on CUDA, unless
    logits are to be rounded."""
    return on_tensor_cores(x_TD) and not rounds


def logit_dtype(x_TD: Tensor, rounds: bool) -> torch.dtype:
    """Return the dtype of logits of such hidden states."""
    return torch.float32 if widens(x_TD, rounds) else x_TD.dtype


def part_of(x: Tensor, rows: slice, columns: int | None = None) -> Tensor:
    """`x[rows, :columns]`, and `x` itself where that is all of it: small calls spend their time on the call."""
    x = x if rows.stop - rows.start == x.shape[0] else x[rows]
    return x if columns is None or columns >= x.shape[1] else x[:, :columns]


def parts_of(rows: slice, *given: Tensor | None) -> list[Tensor | None]:
    """`part_of` of each that there is."""
    return [None if x is None else part_of(x, rows) for x in given]


def pieces(x_ND: Tensor) -> list[slice]:
    """Rows of `x_ND` for elementwise work between matmuls: few launches on CUDA, on CPU what its cache holds."""
    count, width = x_ND.shape
    step = max(1, (1 << (25 if x_ND.is_cuda else 20)) // max(width, 1))
    if 0 < count <= step:
        return [slice(0, count)]
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]
