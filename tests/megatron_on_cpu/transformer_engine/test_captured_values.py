"""Values that kernels read on the device are read anew by each replay of a CUDA graph; lengths may not change."""

import pytest
import torch

from megatron_on_cpu import cuda_graphs
from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.enums import DType
from tests.megatron_on_cpu.transformer_engine import numbers

tex, new = compiled_module((2, 11)), compiled_module((2, 20))


class Float8Quantizer:
    """Quantiser of Transformer Engine, as far as quantising in place asks for it."""

    def __init__(self):
        self.dtype, self.internal, self.rowwise_usage, self.columnwise_usage = DType.kFloat8E4M3, False, True, True
        self.amax, self.scale = torch.zeros(1), torch.tensor([2.0])


class Quantized:
    def __init__(self):
        self._data = torch.zeros(2, 3, dtype=torch.uint8)
        self._transpose = torch.zeros(3, 2, dtype=torch.uint8)
        self._scale_inv, self._fp8_dtype, self._transpose_invalid = torch.zeros(1), DType.kFloat8E4M3, False


def captured(call):
    graph = cuda_graphs.CUDAGraph()
    with cuda_graphs.graph(graph):
        call()
    return graph.replay


def test_noop_flag_of_quantising():
    x, quantizer, output, noop = numbers(2, 3, seed=0), Float8Quantizer(), Quantized(), torch.zeros(1)
    replay = captured(lambda: tex.quantize(x, quantizer, output, noop))
    replay()
    kept, amax = output._data.clone(), quantizer.amax.clone()
    assert amax.item() == x.abs().max()
    x.mul_(-3)
    noop.fill_(1)
    replay()
    assert torch.equal(output._data, kept)
    assert torch.equal(quantizer.amax, amax)
    noop.zero_()
    replay()
    assert not torch.equal(output._data, kept)
    assert torch.equal(output._transpose, output._data.t())
    assert quantizer.amax.item() == x.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rate_step_and_flag_of_capturable_adam(dtype):
    """The plain kernel, given the same numbers, gives the same; a step that the flag skips changes no parameter."""
    grads = [numbers(5, seed=10 + i).to(dtype) for i in range(4)]
    lists = [[torch.empty(5, dtype=dtype)], [numbers(5, seed=0)], [torch.zeros(5)], [torch.zeros(5)]]
    plain = [[x.clone() for x in row] for row in lists]
    rate, step, flag = torch.tensor([0.0]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    hyper, inv_scale = (0.8, 0.9, 1e-6), torch.tensor([0.3])
    replay = captured(
        lambda: tex.multi_tensor_adam_capturable(1, flag, lists, rate, *hyper, step, 1, 1, 0.1, inv_scale)
    )
    for i, grad in enumerate(grads):
        lists[0][0].copy_(grad)
        rate.fill_(0.1 / (i + 1))
        step.fill_(i + 1)
        flag.fill_(i == 2)
        replay()
        if i != 2:
            plain[0] = [grad.float() * inv_scale]
            tex.multi_tensor_adam(1, flag, plain, 0.1 / (i + 1), *hyper, i + 1, 1, 1, 0.1)
            plain[0] = [plain[0][0].to(dtype)]
        else:
            plain[0] = [grad]
        for row, expected in zip(lists, plain, strict=True):
            torch.testing.assert_close(row[0], expected[0], rtol=1e-6, atol=1e-7)


def test_noop_flag_of_sgd():
    lists, flag = [[torch.ones(3)], [torch.ones(3)], [torch.zeros(3)]], torch.zeros(1, dtype=torch.int32)
    replay = captured(lambda: tex.multi_tensor_sgd(1, flag, lists, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0))
    flag.fill_(1)
    replay()
    assert torch.equal(lists[1][0], torch.ones(3))
    flag.zero_()
    replay()
    torch.testing.assert_close(lists[1][0], torch.full((3,), 0.9))
    assert torch.equal(lists[2][0], torch.ones(3))


def test_flag_for_what_is_not_finite():
    x, flag = torch.ones(2), torch.zeros(1, dtype=torch.int32)
    replay = captured(lambda: tex.multi_tensor_scale(1, flag, [[x], [torch.empty(2)]], 1.0))
    x[0] = float("inf")
    replay()
    assert flag.item() == 1


def test_scale_that_is_a_tensor():
    x, target, scale = numbers(4, seed=0), torch.empty(4), torch.tensor([2.0])
    flag = torch.zeros(1, dtype=torch.int32)
    replay = captured(lambda: new.multi_tensor_scale_tensor(1, flag, [[x], [target]], scale))
    scale.fill_(3.0)
    replay()
    assert torch.equal(target, 3 * x)
    assert flag.item() == 0


def test_token_count_of_the_auxiliary_loss():
    probs, counts, total = numbers(6, 4, seed=0).abs(), torch.tensor([3.0, 5.0, 1.0, 3.0]), torch.tensor(6)
    loss = torch.empty(())

    def call():
        loss.copy_(new.fused_moe_aux_loss_fwd_graph_safe(probs, counts, total, 4, 6, 4, 2, 0.1)[0])

    replay = captured(call)
    total.fill_(3)
    replay()
    assert torch.equal(loss, tex.fused_moe_aux_loss_fwd(probs, counts, 3, 4, 6, 4, 2, 0.1)[0])


def test_lengths_of_packed_sequences_must_stay():
    lengths, x, found = torch.tensor([0, 4, 8], dtype=torch.int32), numbers(8, 2, 3, seed=0), torch.empty(4, 2, 3)
    replay = captured(lambda: found.copy_(tex.thd_read_half_tensor(x, lengths, 1)))
    replay()
    assert torch.equal(found, x[[2, 3, 6, 7]])
    lengths[1] = 2
    with pytest.raises(RuntimeError, match=r"cu_seqlens was \[0, 4, 8\] when the CUDA graph was captured"):
        replay()
