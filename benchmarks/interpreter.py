"""Triton's interpreter with the rounding of a GPU, and counts of the bytes that kernels read.

The interpreter itself truncates fp32 to bf16, and rounds the product of a fused multiply-add.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


def round_to_bfloat16() -> None:
    """Let the interpreter round to the nearest if `TRITON_INTERPRET=1` chose it; else do nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fp_trunc(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return self.cast_impl(src, dst_type)
        data = torch.tensor(src.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(data, dst_type.scalar)

    def create_fma(self, x, y, z):
        if x.dtype.scalar != tl.float32:
            return TensorHandle(x.data * y.data + z.data, x.dtype.scalar)
        wide = x.data.astype(float) * y.data.astype(float) + z.data.astype(float)
        return TensorHandle(wide.astype(x.data.dtype), x.dtype.scalar)

    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    InterpreterBuilder.create_fma = create_fma


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each load of interpreted kernels, without those that a mask leaves out."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[int] = []
    load = InterpreterBuilder.create_masked_load

    def counting(self, pointers, mask, *arguments, **options):
        element = pointers.get_element_ty().primitive_bitwidth // 8
        found.append(element * int(mask.data.sum()))
        return load(self, pointers, mask, *arguments, **options)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counting):
        yield found
