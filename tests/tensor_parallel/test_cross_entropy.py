import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from megatron_ext.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, _VocabParallelCrossEntropy
from tests.ranks import ranks

VOCAB = 24


def megatrons_loss(z, target, e=0.0):
    """The target keeps 1 - e, the other tokens share e; -100 gives 0, -inf columns do not exist."""
    kept = target != -100
    nll = -z.log_softmax(-1)
    own = nll.gather(-1, target.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    finite = z > -torch.inf
    others = nll.where(finite, 0.0).sum(-1) - own
    return ((1 - e) * own + e / (finite.sum(-1, dtype=z.dtype) - 1) * others).where(kept, 0.0)


def draw(dtype=torch.float64, lead=(5, 3), scale=4.0):
    z = (scale * torch.randn(*lead, VOCAB, dtype=torch.float64)).to(dtype)
    target = torch.randint(VOCAB, lead)
    target[0, 0] = -100
    return z, target, torch.randn(lead, dtype=torch.float64)


def own_columns(z):
    return z.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def check(z, target, g, e=0.0):
    """Loss and gradient of the shards are off by at most twice plain PyTorch's error and a rounding."""
    truth_z, plain_z = z.to(torch.float64, copy=True).requires_grad_(), z.clone().requires_grad_()
    truth = megatrons_loss(truth_z, target, e)
    truth.backward(g)
    plain = megatrons_loss(plain_z.float() if z.dtype == torch.bfloat16 else plain_z, target, e)
    plain.backward(g.to(plain.dtype))

    own_z = own_columns(z).detach().requires_grad_()
    kept = own_z.detach().clone()
    with count_collectives() as counts:
        loss = vocab_parallel_cross_entropy(own_z, target, e, tp_group=dist.group.WORLD)
    assert sum(counts.values()) == (1 if dist.get_world_size() > 1 else 0)
    with count_collectives() as counts:
        loss.backward(g.to(loss.dtype), retain_graph=True)
    assert not counts
    once = own_z.grad.clone()
    loss.backward(g.to(loss.dtype))
    assert torch.equal(own_z.grad, 2 * once), "backward is repeatable"
    assert torch.equal(own_z, kept), "the logits were written"
    assert once.dtype == z.dtype
    assert loss.dtype == (torch.float64 if z.dtype == torch.float64 else torch.float32)

    def error(a, b):
        return (a.double() - b).abs().max().item()

    def rounding(a, dtype):  # plain PyTorch in fp64 is the truth itself, and has no error
        return 4 * a.abs().max().item() * torch.finfo(dtype).eps

    assert error(loss, truth) <= 2 * error(plain, truth) + rounding(truth, loss.dtype)
    assert error(once, own_columns(truth_z.grad)) <= 2 * error(plain_z.grad, truth_z.grad) + rounding(
        truth_z.grad, z.dtype
    )
    all_losses = [loss.new_empty(loss.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(all_losses, loss.detach().contiguous())
    assert all(torch.equal(other, loss) for other in all_losses), "a smoothing's mean over a rank's own shard"
    return loss.detach()


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.97])
def test_loss_and_gradient(dtype, smoothing):
    check(*draw(dtype), smoothing)


class Made(TorchDispatchMode):
    """Weak references to the tensors of at least `numel` elements that operations give."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.references = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        large = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel() >= self.numel]
        self.references += map(weakref.ref, large)
        return out

    def kept_beside(self, z):
        there = [reference() for reference in self.references]
        memory = z.untyped_storage().data_ptr()
        return [t.shape for t in there if t is not None and t.untyped_storage().data_ptr() != memory]


@ranks(1, 2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_of_the_logits_size_is_kept_for_backward(smoothing):
    z = torch.randn(5, 3, 512, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(512 * dist.get_world_size(), (5, 3), generator=torch.Generator().manual_seed(0))
    with Made(z.numel()) as made:
        loss = vocab_parallel_cross_entropy(z, target, smoothing, dist.group.WORLD)
    assert loss.requires_grad
    assert made.references, "the exponentials, at least"
    assert not made.kept_beside(z)


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    "case", ["gap", "masked column", "masked shard", "strided logits", "strided targets", "nothing counts"]
)
def test_odd_logits_and_targets(case):
    """Logarithms of underflowing probabilities are far from -inf; columns at -inf take no part in smoothing."""
    z, target, g = draw(torch.float32)
    if case == "gap":
        z[..., 3] += 200
    elif "masked" in case:
        z[..., 7 : (8 if case == "masked column" else 14)] = -torch.inf
        target[(target >= 7) & (target < 14)] = 2
    elif case == "strided logits":  # as Megatron's own calls have them
        z = z.transpose(0, 1).contiguous().transpose(0, 1)
    elif case == "strided targets":
        target = target.t().contiguous().t()
    else:
        target.fill_(-100)
    loss = check(z, target, g, 0.1)
    assert loss.isfinite().all()
    assert case != "nothing counts" or not loss.any()


@ranks(1, 2)
def test_no_second_derivative():
    z, target, _ = draw(torch.float32)
    own_z = own_columns(z).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own_z, target, 0.0, dist.group.WORLD)
    for upstream in (torch.ones_like(loss), torch.ones_like(loss, requires_grad=True)):
        (gradient,) = torch.autograd.grad(loss, own_z, upstream, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.square().sum().backward()


@ranks(4)
def test_a_group_of_ones_own():
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(rank // 2)
    z, target, _ = draw()
    loss = vocab_parallel_cross_entropy(z.chunk(2, -1)[rank % 2], target, 0.1, tp_group=group)
    torch.testing.assert_close(loss, megatrons_loss(z, target, 0.1), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="tp_group is None"):
        vocab_parallel_cross_entropy(z, target)


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathered_logits_are_refused(dtype):
    """Taken for a shard, the whole vocabulary would count once per rank: a loss too high by the log of the ranks."""
    z, target, _ = draw(dtype)
    gathered = gather_from_tensor_model_parallel_region(own_columns(z), dist.group.WORLD)
    with pytest.raises(ValueError, match=f"every rank of tp_group passed the same {VOCAB} columns: each must pass its"):
        vocab_parallel_cross_entropy(gathered.transpose(0, 1).float(), target.t(), tp_group=dist.group.WORLD)


@ranks(2, 4)
def test_equal_shards_of_made_up_logits_are_not():
    """Logits of zeros, as a head that starts at zero makes them, and rows without a difference between tokens."""
    size, target = dist.get_world_size(), torch.arange(0, 8)
    zeros = vocab_parallel_cross_entropy(torch.zeros(8, 8), target, tp_group=dist.group.WORLD)
    torch.testing.assert_close(zeros, torch.full((8,), 8.0 * size).log())
    row = torch.arange(8.0)
    rows = vocab_parallel_cross_entropy(row.repeat(8, 1), target, tp_group=dist.group.WORLD)
    torch.testing.assert_close(rows, row.repeat(size).logsumexp(0) - row)


@ranks(1, 2)
def test_what_is_refused():
    z, target, _ = draw(torch.float32)
    own_z, group = own_columns(z), dist.group.WORLD
    for e in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"label_smoothing is {e}: it must be a number in"):
            vocab_parallel_cross_entropy(own_z, target, e, group)
    for label in (VOCAB, -1):
        with pytest.raises(ValueError, match=rf"labels holds \[{label}\], outside \[0, {VOCAB}\)"):
            vocab_parallel_cross_entropy(own_z, torch.full_like(target, label), tp_group=group)
    with pytest.raises(ValueError, match="labels has leading dims"):
        vocab_parallel_cross_entropy(own_z, target[:-1], tp_group=group)


@ranks(1, 2, 4)
def test_the_steps_by_themselves():
    """Megatron's fused loss strings them together, with two all-reduces between."""
    z, target, g = draw(torch.float32)
    size, rank = dist.get_world_size(), dist.get_rank()
    own_z = own_columns(z)
    kept = own_z.clone()
    step = VocabParallelCrossEntropy
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        found = step.calculate_logits_max(own_z.to(dtype))
        assert [x.dtype for x in found] == [wide, wide]
    logits, largest = step.calculate_logits_max(own_z)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    first = rank * VOCAB // size
    mask, column, predicted, sums, exp = step.calculate_predicted_logits(
        logits, target, largest, first, first + VOCAB // size
    )
    dist.all_reduce(predicted)
    dist.all_reduce(sums)
    softmax, loss = step.calculate_cross_entropy_loss(exp, predicted, sums)
    whole = z.clone().requires_grad_()
    expected = F.cross_entropy(whole[target != -100], target[target != -100], reduction="none")
    torch.testing.assert_close(loss[target != -100], expected)
    for _ in range(2):  # nothing is overwritten
        softmax_2d, rows, update, grad_input = step.prepare_gradient_calculation_operands(softmax, mask)
        gradient = step.calculate_gradients(softmax_2d, rows, column, update, grad_input, g.float())
    expected.backward(g.float()[target != -100])
    torch.testing.assert_close(gradient[target != -100], own_columns(whole.grad)[target != -100])
    assert torch.equal(own_z, kept)


def test_alone():
    z, target, _ = draw()
    expected = megatrons_loss(z, target, 0.2)
    torch.testing.assert_close(vocab_parallel_cross_entropy(z, target, 0.2), expected)
    torch.testing.assert_close(_VocabParallelCrossEntropy.apply(z, target, 0.2), expected)
