"""A head whose weight is quantised and frozen: it is dequantised in each pass, and never held in between."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import VocabShard, linear_cross_entropy, linear_log_probs, reference
from megatron_ext.head import KL, CrossEntropy, Entropy, LmHead, LoRA, Teacher, TopK
from tests.head.problems import error
from tests.ranks import ranks

T, D, V = 24, 16, 40


class Packed(Tensor):
    """Tensor subclass like torchao's, which dequantises itself and which no product takes."""

    made: list

    @staticmethod
    def __new__(cls, numbers, dtype):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype)

    def __init__(self, numbers, dtype):
        scale = numbers.abs().amax(1, keepdim=True) / 127
        self.bytes, self.scale, self.made = (numbers / scale).round().to(torch.int8), scale, []

    def dequantize(self):
        found = (self.bytes * self.scale).to(self.dtype)
        self.made.append(weakref.ref(found))
        return found

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of packed numbers")


def drawn(dtype=torch.float32):
    g = torch.Generator().manual_seed(2)
    weight, hidden = torch.randn(V, D, generator=g), torch.randn(T, D, generator=g).to(dtype)
    return Packed(weight, dtype), hidden, torch.randint(0, V, (T,), generator=g)


READ_OUTS = {
    "loss and entropy": lambda labels, teacher: [CrossEntropy(labels, label_smoothing=0.1), Entropy()],
    "top-k": lambda labels, teacher: [TopK(3)],
    "divergence": lambda labels, teacher: [KL(teacher)],
}


def found(weight, hidden, labels, name, **facts):
    x = hidden.clone().requires_grad_()
    results = LmHead(weight, **facts).read(x, *READ_OUTS[name](labels, Teacher(LmHead(weight), hidden * 2)))
    first = results[0] if isinstance(results, tuple) else results
    return first, torch.autograd.grad(first.sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", READ_OUTS)
def test_the_same_bits_as_of_its_numbers(name, dtype):
    quantised, hidden, labels = drawn(dtype)
    plain = quantised.dequantize()
    for more in ({}, {"cache": 0, "chunk_tokens": 7}, {"lora": LoRA(torch.ones(2, D), torch.ones(V, 2), 0.1)}):
        for ours, true in zip(
            found(quantised, hidden, labels, name, **more), found(plain, hidden, labels, name, **more), strict=True
        ):
            assert torch.equal(ours, true), more


def test_it_is_dequantised_once_a_pass_and_let_go():
    quantised, hidden, labels = drawn(torch.bfloat16)
    x = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(x, quantised, labels)
    assert [each() for each in quantised.made] == [None]
    loss.sum().backward()
    assert [each() for each in quantised.made] == [None, None]


def test_fixed_bits():
    quantised, hidden, labels = drawn()
    whole = linear_cross_entropy(hidden, quantised, labels, bits="batch")
    assert torch.equal(whole[5:9], linear_cross_entropy(hidden[5:9], quantised, labels[5:9], bits="batch"))


def test_torchaos_weights():
    quantization = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(D, V, bias=False).bfloat16()
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    layer.weight.requires_grad_(False)
    hidden, labels = drawn(torch.bfloat16)[1:]
    losses = LmHead.of(layer).read(hidden, CrossEntropy(labels))
    z = hidden.double() @ layer.weight.dequantize().double().t()
    assert error(losses, torch.nn.functional.cross_entropy(z, labels, reduction="none")) < 1e-2


def test_what_is_refused():
    quantised, hidden, labels = drawn(torch.bfloat16)
    trained = quantised.requires_grad_()
    with pytest.raises(ValueError, match="weight is a quantised Packed of shape .*: it must be .* and frozen"):
        linear_cross_entropy(hidden, trained, labels)
    four_bits = torch.zeros(V * D // 2, 1, dtype=torch.uint8)
    four_bits.quant_state = "as bitsandbytes keeps it"
    with pytest.raises(ValueError, match="weight is torch.uint8: .*; dequantise it, by bitsandbytes.functional"):
        linear_cross_entropy(hidden, four_bits, labels)


@ranks(2)
def test_a_shard_without_rows():
    weight, hidden, labels = drawn()
    numbers = weight.dequantize()
    here = numbers if dist.get_rank() == 0 else numbers[:0]
    own = Packed.__new__(Packed, here, torch.float32)
    own.bytes, own.scale, own.made = weight.bytes[: len(here)], weight.scale[: len(here)], []
    shard = VocabShard(0, V, V) if dist.get_rank() == 0 else VocabShard(V, V, V)
    x = hidden.requires_grad_()
    found = linear_log_probs(x, own, labels, dist.group.WORLD, vocab=shard)
    want = reference.log_probs(reference.logits(x, numbers), labels)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, want)))
