"""Batch-invariant kernels of inference engines, each from its own file alone, under Triton's interpreter."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from tests.stub_modules import stub_modules

VLLM_FILES = ["determinism/batch_invariant.py", "layers/batch_invariant.py"]  # since 0.33, and before


@functools.cache
def multiply_sixteen_bits() -> None:
    """Have the interpreter multiply bf16 as numbers, not their bits as integers, and add the products of 16 bits in
    fp64: in fp32 the order, and so the bits, would be that of the CPU's own kernels for a tile's shape."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(x):
        x = torch.tensor(x.data).view(torch.bfloat16) if x.dtype.scalar == tl.bfloat16 else torch.tensor(x.data)
        return x.double().numpy()

    def create_dot(self, a, b, d, *more):
        if a.dtype.scalar not in (tl.bfloat16, tl.float16):
            return dot(self, a, b, d, *more)
        return TensorHandle((numbers(a) @ numbers(b) + d.data).astype(d.data.dtype), d.dtype.scalar)

    dot, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, create_dot


def vllms(tree: str) -> ModuleType:
    """vLLM's, from a source tree; of the rest of vLLM it asks for the platform and for Triton."""
    import triton
    import triton.language as tl

    folder = Path(tree) / "vllm" / "model_executor"
    found = [folder / name for name in VLLM_FILES if (folder / name).is_file()]
    if not found:
        raise SystemExit(
            f"VLLM is {tree}: none of {', '.join(VLLM_FILES)} is in {folder}; pass a tree of vLLM's source"
        )
    asked = ["", ".envs", ".platforms", ".platforms.interface", ".triton_utils", ".model_executor"]
    asked += [".model_executor.determinism", ".model_executor.determinism.batch_invariant_configs", ".utils"]
    asked += [f".utils.{name}" for name in ("mem_utils", "nccl", "platform_utils", "torch_utils")]
    stubs = {f"vllm{name}": mock.MagicMock() for name in asked}
    stubs["vllm.triton_utils"] = SimpleNamespace(tl=tl, triton=triton)
    stubs["vllm.platforms"].current_platform.is_cuda_alike.return_value = False
    stubs["vllm.utils.platform_utils"].num_compute_units.return_value = 1
    # No table of tiles that were tuned on one device; those change the order where their BLOCK_SIZE_K is another.
    configs = stubs["vllm.model_executor.determinism.batch_invariant_configs"]
    configs._get_matmul_config = lambda m, n, k, dtype, default: default
    with stub_modules(stubs):
        return _module("vllm_batch_invariant", found[0])


def megatrons(tree: str | None = None) -> ModuleType:
    """Megatron-Core's: the installed one's, or from a source tree."""
    name = "megatron/core/transformer/custom_layers/batch_invariant_kernels.py"
    if tree is None:
        return importlib.import_module(name.removesuffix(".py").replace("/", "."))
    return _module("megatron_batch_invariant", Path(tree) / name)


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
