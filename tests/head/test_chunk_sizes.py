"""Tokens of a chunk on CUDA, of which a CPU can test the numbers only."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ext.head.call import chunk_sizes, gpu_properties
from tests.head.as_on_cuda import cuda_branches

MIB = 1 << 20


@pytest.mark.parametrize("columns, width", [(128256, 4096), (19008, 8192), (151936, 1024), (1000, 64), (32000, 4096)])
def test_tokens_of_which_dw_is_summed(columns, width):
    """Their fp32 logits take half of a 16-bit weight or 64 MiB, whichever is more, and hardly less: each chunk reads
    and writes all of dW's sums."""
    tokens = chunk_sizes.summed_tokens(torch.empty(columns, width, dtype=torch.bfloat16, device="meta"))
    allowed = max(columns * width, 64 * MIB)
    assert tokens % 128 == 0
    assert 4 * columns * (tokens - 128) < allowed
    assert 4 * columns * (tokens + 128) > 0.9 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_that_a_product_makes_take_little_memory_on_cuda(dtype):
    """A chunk has at most as many logits as take 64 MiB in fp32, also in fp64."""
    with cuda_branches():
        found = chunk_sizes.product_chunks(slice(0, 8192), None, 32000, torch.empty(0, 512, dtype=dtype), 0)
        assert chunk_sizes.product_chunks(slice(5, 5), None, 32000, torch.empty(0, 512, dtype=dtype), 0) == []
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
    assert found[-1].stop == 8192
    assert max(4 * 32000 * (one.stop - one.start) for one in found) <= 64 * MIB


@pytest.mark.parametrize("columns", [0, 1, 1000, 128256])
def test_tokens_of_logits_that_exist(columns):
    """A chunk has about eight times as many tokens on CUDA as on a CPU, where its work has to stay near the cache."""
    tokens = slice(0, 1 << (30 if columns < 1000 else 20))
    on_cpu, on_gpu = (chunk_sizes.chunks(tokens, None, columns, gpu)[0].stop for gpu in (False, True))
    assert on_cpu <= max(64, (1 << 24) // max(columns, 1))
    assert on_gpu >= 7 * on_cpu or on_gpu == 1 << 27
    assert chunk_sizes.chunks(slice(3, 30), 20, columns, True) == [slice(3, 23), slice(23, 30)]


@pytest.mark.parametrize(
    "tokens, columns, width, reads",
    [(8192, 128256, 4096, 8), (16384, 19008, 8192, 7), (8192, 131072, 2048, 13)],
)
def test_logits_without_gradient_read_the_weight_seldom(tokens, columns, width, reads):
    """A chunk's fp32 logits take no more memory than the weight, which each chunk reads."""
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
    with cuda_branches():
        w = torch.empty(columns, width, dtype=torch.bfloat16, device="meta")
        room, cached = chunk_sizes.kept_columns(mock.Mock(), len(x), w, x, keep=False)
        found = chunk_sizes.product_chunks(slice(0, tokens), None, columns, torch.empty(0, width, dtype=w.dtype), room)
    assert cached == 0
    assert max(4 * columns * (one.stop - one.start) for one in found) <= w.nbytes
    assert len(found) <= reads


@pytest.mark.parametrize(
    "name, rated",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA B200", "B200"),
        *((name, None) for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB")),
        *((name, None) for name in ("NVIDIA H20", "NVIDIA GB200", "NVIDIA B300", "NVIDIA A100-SXM4-80GB")),
    ],
)
def test_a_gpu_with_a_like_name_gets_no_rates_of_another(name, rated):
    found = SimpleNamespace(name=name, multi_processor_count=78)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=found):
        device = gpu_properties._named.__wrapped__(0)
    assert device.multiprocessors == 78
    assert (device.name, device.rated) == (rated or name, rated is not None)
