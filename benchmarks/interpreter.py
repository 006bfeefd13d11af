"""Triton's interpreter, with the rounding of a GPU: by itself it cuts fp32 off where bf16 is written."""

import os

import torch


def round_to_bfloat16() -> None:
    """Have the interpreter round to the nearest, where `TRITON_INTERPRET=1` chose it; else nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fp_trunc(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return self.cast_impl(src, dst_type)
        data = torch.tensor(src.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(data, dst_type.scalar)

    InterpreterBuilder.create_fp_trunc = create_fp_trunc
