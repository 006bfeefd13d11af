"""Answers of the compiled module about the device and its libraries, dropout, and rows of caches."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.cuda_graphs import read_by_the_host
from megatron_on_cpu.transformer_engine.enums import NVTE_QKV_Format
from megatron_on_cpu.transformer_engine.parameters import taking


def get_cublasLt_version() -> int:
    """Return the version of CUDA 12.9, which has every FP8 product."""
    return 120900


def get_cudnn_version() -> int:
    """Return version 9.15.0, whose fused attention has all masks, and packs the log-sum-exp of packed sequences."""
    return 91500


def get_num_cublas_streams() -> int:
    """Return the number that the compiled module returns."""
    return 4


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Return (least, greatest) priority: streams here have no priorities."""
    return 0, 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return False, since only GPUs have multicast."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Return False, since user buffers are not emulated."""
    return False


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Return [the input with numbers dropped and the rest scaled, the mask in uint8, 1 for a number that is kept]."""
    keep = torch.empty(input.shape).uniform_() >= dropout_probability
    found = (input.float() * keep / (1 - dropout_probability)).to(input.dtype)
    return [found if out is None else out.copy_(found), keep.to(torch.uint8)]


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input: that of the output, dropped and scaled alike."""
    found = (grad_output.float() * mask.view_as(grad_output) / (1 - dropout_probability)).to(grad_output.dtype)
    return found if grad_input is None else grad_input.copy_(found)


@taking(
    "new_k new_v k_cache v_cache page_table cu_new_lens cu_cached_lens kv_format b max_ctx_len max_seq_len "
    "max_pages_per_seq is_non_paged"
)
def copy_to_kv_cache(given: Any) -> None:
    """Write new keys and values after the cached ones, `[batch or pages, positions, heads, width]`, in place.

    `cu_cached_lens` counts the new tokens too. `page_table` has the pages of each sequence. With `is_non_paged` it has
    each sequence's row in the caches, from which the cached tokens are first moved to the front rows.
    """
    new_lens = read_by_the_host(given.cu_new_lens.diff(), "the lengths in cu_new_lens")
    all_lens = read_by_the_host(given.cu_cached_lens.diff(), "the lengths in cu_cached_lens")
    pages = read_by_the_host(given.page_table.flatten(), "page_table")
    page = given.max_seq_len // given.max_pages_per_seq
    if given.is_non_paged:
        _move_to_the_front(given, pages, [total - new for new, total in zip(new_lens, all_lens, strict=True)])
    for i, (new, total) in enumerate(zip(new_lens, all_lens, strict=True)):
        for j in range(new):
            place = total - new + j
            row = i if given.is_non_paged else pages[i * given.max_pages_per_seq + place // page]
            for source, cache in (given.new_k, given.k_cache), (given.new_v, given.v_cache):
                cache[row, place % page] = _token(source, given, i, j)


def _move_to_the_front(given: Any, rows: list[int], lens: list[int]) -> None:
    """Move the cached tokens of sequence i from `rows[i]` to row i, up to the first i where `rows` decreases."""
    count = next((i + 1 for i in range(given.b - 1) if rows[i + 1] < rows[i]), given.b)
    for i in range(count):
        for cache in given.k_cache, given.v_cache:
            cache[i, : lens[i]] = cache[rows[i], : lens[i]].clone()


def _token(x: Tensor, given: Any, i: int, j: int) -> Tensor:
    if given.kv_format == NVTE_QKV_Format.NVTE_THD:
        return x[int(given.cu_new_lens[i]) + j]
    return x[j, i] if given.kv_format == NVTE_QKV_Format.NVTE_SBHD else x[i, j]


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """Return `[S, B, H, 3 D]` as `[3, B, S, H, D]`."""
    s, b, h, width = qkvi.shape
    return qkvi.view(s, b, h, 3, width // 3).permute(3, 1, 0, 2, 4).contiguous()


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return three `[B, S, H, D]` as `[S, B, H, 3 D]`."""
    return torch.cat([q, k, v], dim=-1).transpose(0, 1).contiguous()
