"""How many tokens and columns at a time, and how many tokens' exponentials are kept. Sizes only, no arithmetic."""

import os

import torch
from torch import Tensor

from megatron_ext.head.options import HeadOptions
from megatron_ext.head.values import has_values

# Logits of one chunk: on CUDA they should not fall out of the L2 cache by far, on CPU the matmul wants 500 rows and
# more, and those whose exponentials are kept take no memory of their own.
_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 24}
_KEPT_CHUNK = {"cpu": 1 << 27, "cuda": 1 << 24}
_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 96 << 20}
_BLOCK_SHARE = {"cpu": 32, "cuda": 8}


def chunks(span: slice, border: int, chunk_tokens: int | None, columns: int, device: torch.device) -> list[slice]:
    """`span` in pieces, none of which crosses `border`; tokens before it are those whose exponentials are kept."""
    found = []
    for start, stop, table in (
        (span.start, min(span.stop, border), _KEPT_CHUNK),
        (max(span.start, border), span.stop, _CHUNK),
    ):
        step = chunk_tokens or _rounded(table.get(device.type, table["cpu"]) // max(columns, 1), 64)
        found += [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
    return found


def pieces(x_ND: Tensor) -> list[slice]:
    """Rows of `x_ND` for elementwise work between matmuls: few launches on CUDA, on CPU what its cache holds."""
    count, width = x_ND.shape
    step = max(1, (1 << (25 if x_ND.is_cuda else 20)) // max(width, 1))
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def column_blocks(tokens: int, columns: int, chunk_tokens: int | None, like: Tensor) -> list[slice]:
    """The shard's columns in blocks, for passes that take all tokens at once: as many as there are token chunks."""
    if chunk_tokens:
        step = -(-columns // max(1, -(-tokens // chunk_tokens)))
    else:
        kind = like.device.type if like.device.type in _BLOCK_BYTES else "cpu"
        row = max(tokens, 1) * like.element_size()
        step = _rounded(max(_BLOCK_BYTES[kind], row * columns // _BLOCK_SHARE[kind]) // row, 128)
    return [slice(at, min(at + step, columns)) for at in range(0, columns, max(step, 1))]


def cached_tokens(options: HeadOptions, tokens: int, columns: int, like: Tensor) -> int:
    """How many of the first tokens keep their exponentials for backward."""
    cache = options.cache
    if not isinstance(cache, str) and cache <= 1:
        return int(cache * tokens)
    row = max(columns * like.element_size(), 1)
    budget = _free_bytes(like) // 2 if isinstance(cache, str) else int(cache)
    return tokens if budget is None else min(tokens, budget // row)


def _free_bytes(like: Tensor) -> int:
    """Memory that a new tensor beside `like` may take; on fake tensors and while compiling, as much as it likes."""
    if not has_values(like):
        return 1 << 62
    if like.is_cuda:
        free, _ = torch.cuda.mem_get_info(like.device)
        return free + torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rounded(n: int, multiple: int) -> int:
    return max(multiple, n // multiple * multiple)
