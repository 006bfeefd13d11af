"""A head whose weight is fp32 over hidden states of 16 bits: logits, and gradients, are computed in fp32."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure
from megatron_ext import VocabShard, linear_cross_entropy, reference
from megatron_ext.head import KL, CrossEntropy, Entropy, LmHead, LoRA, Teacher, TopK
from tests.head.problems import error
from tests.ranks import ranks

T, D, V = 24, 16, 40


def drawn(dtype):
    g = torch.Generator().manual_seed(8)
    hidden, teacher = (torch.randn(T, D, generator=g).to(dtype) for _ in range(2))
    weight, bias = torch.randn(V, D, generator=g) / 4, torch.randn(V, generator=g)
    return hidden, weight, bias, teacher, torch.randint(0, V, (T,), generator=g)


def read_outs(head, teacher):
    """Read-outs of the softmax, of chosen columns, and of a teacher: the engine has a path for each."""
    labels = drawn(torch.float32)[-1]
    return [
        lambda x: sum(head.read(x, CrossEntropy(labels, label_smoothing=0.1), Entropy())),
        lambda x: head.read(x, TopK(3))[0].sum(-1),
        lambda x: head.read(x, KL(teacher)),
    ]


def truth(hidden, weight, bias, teacher, labels):
    z, theirs = (reference.logits(x, weight, bias) for x in (hidden, teacher))
    loss = reference.cross_entropy(z, labels, label_smoothing=0.1) + reference.entropy(z)
    return [loss, z.log_softmax(-1).topk(3).values.sum(-1), reference.kl_divergence(theirs.detach(), z)]


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_as_exact_as_fp32(layout, dtype):
    group, (hidden, weight, bias, teacher, labels) = dist.group.WORLD, drawn(dtype)
    rank, count = dist.get_rank(), dist.get_world_size()
    shard = VocabShard.equal(V // count, group)
    mine = slice(shard.start, shard.stop)

    def cut(x):
        return x.chunk(count)[rank] if layout == "sequence" else x

    upstream = torch.randn(T, generator=torch.Generator().manual_seed(9))
    wide = [x.double() for x in (hidden, weight, bias)]
    for at in range(3):
        exact = [x.clone().requires_grad_() for x in wide]
        true = truth(*exact, teacher.double(), labels)[at]
        true.backward(upstream.double())
        ours = [x.clone().requires_grad_() for x in (cut(hidden), weight[mine], bias[mine])]
        head = LmHead(ours[1], group, layout, bias=ours[2], chunk_tokens=7)
        theirs = LmHead(weight[mine], group, layout, bias=bias[mine])
        found = read_outs(head, Teacher(theirs, cut(teacher)))[at](ours[0])
        found.backward(upstream)
        assert found.dtype == torch.float32
        assert error(found, true) < 1e-6
        assert [x.grad.dtype for x in ours] == [dtype, torch.float32, torch.float32]
        dx, dw, db = cut(exact[0].grad), exact[1].grad[mine], exact[2].grad[mine]
        assert torch.allclose(ours[0].grad.double(), dx.to(dtype).double(), rtol=2**-7, atol=1e-6), "rounded once"
        assert error(ours[0].grad, dx) < torch.finfo(dtype).eps / 2
        assert error(ours[1].grad, dw) < 1e-6
        assert error(ours[2].grad, db) < 1e-6


@pytest.mark.parametrize("cache", [0, 1])
def test_hidden_states_are_held_in_their_own_dtype(cache):
    """Beyond the exponentials that are kept: they are wide while a pass runs, and not in between."""
    tokens, width, columns = 512, 256, 64
    hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
    weight, labels = torch.randn(columns, width), torch.zeros(tokens, dtype=torch.int64)
    with measure() as found:
        loss = linear_cross_entropy(hidden * 1, weight, labels, cache=cache)
    kept = 4 * tokens * (columns + 16) * cache
    assert found.alive_bytes <= 2 * tokens * width + kept + 128 * tokens
    loss.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_with_lora_and_under_autocast():
    """The low rank is computed in fp32 too; autocast rounds the weight, as it does everywhere."""
    hidden, weight, _, _, labels = drawn(torch.bfloat16)
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, D), (V, 2)))
    ours = [x.clone().requires_grad_() for x in (hidden, a, b)]
    loss = linear_cross_entropy(ours[0], weight, labels, lora=LoRA(*ours[1:], 0.5))
    loss.sum().backward()
    wide = [x.double().requires_grad_() for x in (hidden, a, b)]
    true = torch.nn.functional.cross_entropy(
        wide[0] @ (weight.double() + 0.5 * wide[2] @ wide[1]).t(), labels, reduction="none"
    )
    true.sum().backward()
    assert error(loss, true) < 1e-6
    assert max(error(x.grad, y.grad) for x, y in zip(ours[1:], wide[1:], strict=True)) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        rounded = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(rounded, linear_cross_entropy(hidden, weight.bfloat16(), labels))


def test_other_pairs_and_rounded_logits_are_refused():
    hidden, weight, bias, *_, labels = drawn(torch.bfloat16)
    for x, w in ((hidden.float(), weight.bfloat16()), (hidden, weight.double()), (hidden, weight.half())):
        with pytest.raises(ValueError, match="they must be equal, or weight and bias float32 beside hidden"):
            linear_cross_entropy(x, w, labels)
    with pytest.raises(
        ValueError, match="bias is torch.bfloat16, hidden torch.bfloat16: they must be equal, or weight"
    ):
        linear_cross_entropy(hidden, weight, labels, bias=bias.bfloat16())
    with pytest.raises(ValueError, match="hidden is multiplied in torch.float32"):
        linear_cross_entropy(hidden, weight, labels, logit_dtype=torch.bfloat16)
