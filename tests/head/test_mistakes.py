"""Mistakes that everyone makes once, each told in a sentence that names it, and right calls that were refused."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import init

from megatron_ext import (
    VocabShard,
    head,
    linear_cross_entropy,
    linear_log_probs,
    reference,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.tensor_parallel import ColumnParallelLinear
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from tests.head.functions import OF_HIDDEN, OF_MADE_LOGITS, of_labels
from tests.ranks import ranks

T, D, V = 6, 4, 10


def problem():
    g = torch.Generator().manual_seed(0)
    return torch.randn(T, D, generator=g), torch.randn(V, D, generator=g), torch.randint(V, (T,), generator=g)


@ranks(2)
def test_a_group_that_was_forgotten():
    """A shard in the place of the whole: its labels are too large for it, and the message says why that may be."""
    hidden, weight, labels = problem()
    labels[-1] = V - 1
    own = weight.chunk(2)[dist.get_rank()]
    calls = [partial(call, hidden, own, labels) for call, _ in of_labels(OF_HIDDEN, OF_MADE_LOGITS).values()]
    calls.append(lambda **of: head.linear_topk_log_probs(hidden, own, V, **of)[0])
    calls.append(lambda **of: head.vocab_topk(hidden @ own.t(), V, **of)[0])
    for call in calls:
        with pytest.raises(ValueError, match="tp_group is None, and 2 ranks run: if .* shard of the vocabulary, pass"):
            call()
        assert not call(tp_group=dist.group.WORLD).isnan().any()
    with pytest.raises(ValueError) as said:
        linear_cross_entropy(hidden, own, labels + V, dist.group.WORLD)
    assert "tp_group is None" not in str(said.value)
    alone = linear_cross_entropy(hidden, weight, labels)  # data-parallel ranks, each with the whole weight
    torch.testing.assert_close(alone, reference.cross_entropy(reference.logits(hidden, weight), labels))


@ranks(2)
def test_a_forgotten_layout_of_hidden_states_is_named():
    """Hidden states of sequence parallelism; the message spoke of dims that are swapped."""
    hidden, weight, labels = problem()
    slice_, own = hidden.chunk(2)[dist.get_rank()], weight.chunk(2)[dist.get_rank()]
    with pytest.raises(ValueError, match=r'is a slice of dim 0, one of 2.*: pass hidden_layout="sequence"'):
        linear_cross_entropy(slice_, own, labels, dist.group.WORLD)
    with pytest.raises(ValueError, match=r'pass tp_group= and hidden_layout="sequence"'):
        linear_cross_entropy(slice_, weight, labels)
    with pytest.raises(ValueError, match=r"dims are swapped: transpose one"):
        linear_cross_entropy(hidden.view(2, 3, D), weight, labels.view(3, 2))
    with pytest.raises(ValueError, match=r"pass the hidden states and labels of the same tokens"):
        linear_cross_entropy(hidden[:4], weight, labels)


@ranks(2)
def test_uneven_shards_without_vocab_are_told_of_it():
    hidden, weight, labels = problem()
    own = weight.split([6, 4])[dist.get_rank()]
    labels[:] = V - 1
    with pytest.raises(ValueError) as said:
        linear_cross_entropy(hidden, own, labels, dist.group.WORLD)
    if dist.get_rank() == 1:  # whose guess is 8
        assert "if their widths differ, pass vocab=VocabShard(start, stop, size)" in str(said.value)


def test_a_shard_before_ranks_are_connected_says_so(monkeypatch):
    hidden, weight, labels = problem()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks run: .* call torch.distributed.init_process_group first, and pass"):
        linear_cross_entropy(hidden, weight[:5], torch.full_like(labels, 7))
    for vocab in (None, VocabShard(0, 5, 5)):
        with pytest.raises(ValueError, match=r"k is 7: .* vocabulary's size 5\. tp_group is None, and 2 ranks run: "):
            head.LmHead(weight[:5], vocab=vocab).read(hidden, head.TopK(7))


def test_an_argument_of_another_kind_is_told_its_place():
    hidden, weight, labels = problem()
    with pytest.raises(ValueError, match=r"weight is Linear: .*; pass its \.weight, and its \.bias as bias"):
        linear_cross_entropy(hidden, torch.nn.Linear(D, V), labels)
    with pytest.raises(ValueError, match=r"weight is list: .*; make one of it"):
        linear_cross_entropy(hidden, weight.tolist(), labels)
    with pytest.raises(
        ValueError, match=r"hidden_layout is a Tensor: .* pass it by that argument's name, a bias as bias="
    ):
        linear_cross_entropy(hidden, weight, labels, None, torch.zeros(V))


@ranks(2)
def test_a_forgotten_group_of_a_weight_that_says_it_is_a_shard():
    """Labels are all in each rank's columns, so that nothing else can tell it from data parallelism."""
    hidden, weight, labels = problem()
    labels %= V // 2
    config = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=True)
    layer = ColumnParallelLinear(D, V, config=config, init_method=init.zeros_, bias=False, tp_group=dist.group.WORLD)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(2)[dist.get_rank()])
    for call in (
        lambda: linear_cross_entropy(hidden, layer.weight, labels),
        lambda: head.LmHead(layer.weight).read(hidden, head.LogProbs(labels)),
        lambda: head.LmHead.of(layer.weight).read(hidden, head.LogProbs(labels)),
    ):
        with pytest.raises(ValueError, match="tp_group is None, 2 ranks run, and weight is marked as one rank's shard"):
            call()
    want = reference.log_probs(reference.logits(hidden, weight), labels)
    own_group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    torch.testing.assert_close(linear_log_probs(hidden, layer.weight, labels, dist.group.WORLD), want)
    torch.testing.assert_close(head.LmHead.of(layer).read(hidden, head.LogProbs(labels)), want)
    whole = torch.nn.Parameter(weight)
    whole.tensor_model_parallel, whole.partition_dim = True, 0
    for of in ({"tp_group": own_group}, {"vocab": VocabShard(0, V, V)}):
        torch.testing.assert_close(linear_log_probs(hidden, whole, labels, **of), want)


@ranks(2)
def test_dtensors():
    hidden, weight, labels = problem()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    z = distribute_tensor(hidden @ weight.t(), mesh, [Shard(1)])
    for name, call in {
        "weight": lambda: linear_cross_entropy(hidden, sharded, labels, mesh.get_group()),
        "hidden": lambda: linear_log_probs(distribute_tensor(hidden, mesh, [Shard(0)]), weight, labels),
        "logits": lambda: token_log_probs(z, labels, mesh.get_group()),
        "labels": lambda: token_log_probs(hidden @ weight.t(), distribute_tensor(labels, mesh, [Shard(0)])),
        "indices": lambda: head.gather_logits(
            hidden @ weight.t(), distribute_tensor(labels.unsqueeze(1), mesh, [Shard(0)])
        ),
        "teacher_weight": lambda: head.linear_kl_divergence(hidden, sharded.to_local(), hidden, sharded, "forward"),
        "teacher_logits": lambda: head.kl_divergence(z.to_local(), z),
    }.items():
        with pytest.raises(ValueError, match=rf"{name} is a DTensor: .* pass its local tensor, {name}.to_local\(\)"):
            call()
    with pytest.raises(ValueError, match="weight is a DTensor"):
        parallel_linear(hidden, sharded, None, LinearPlan(mesh.get_group()))
    found = linear_cross_entropy(hidden, sharded.to_local(), labels, mesh.get_group())
    torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, labels))


def test_torch_func():
    hidden, weight, labels = problem()
    z = hidden @ weight.t()
    calls = [
        (lambda x: linear_cross_entropy(x, weight, labels).sum(), hidden),
        (lambda x: head.linear_topk_log_probs(x, weight, 2)[0].sum(), hidden),
        (lambda x: token_log_probs(x, labels).sum(), z),
        (lambda x: head.vocab_parallel_softmax(x).sum(), z),
        (
            lambda x: parallel_linear(x, weight, None, LinearPlan()).sum(),
            hidden,
        ),
    ]
    for call, x in calls:
        for transform in (torch.func.grad(call), torch.func.vmap(lambda x, call=call: call(x.unsqueeze(0)))):
            with pytest.raises(ValueError, match=r"torch\.func.*use torch\.autograd\.grad"):
                transform(x)


@ranks(2, 4)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("padded", [False, True])
def test_a_softcap_that_saturates(padded, temperature):
    """Every logit of all shards is the cap, or 0 at tokens that pad: shards look alike, and are shards all the same."""
    columns, group = 4 * dist.get_world_size(), dist.group.WORLD
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, D, generator=g).abs(), torch.randn(columns, D, generator=g).abs() + 1
    labels, own = torch.randint(4, (T,), generator=g), weight.chunk(dist.get_world_size())[dist.get_rank()]
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 0.0 if padded else 1.0]).unsqueeze(1)
    bends = {"softcap": 2.0, "temperature": temperature}
    for size in (3e1, 1e3):
        x = (hidden * signs * size).requires_grad_()
        z = reference.logits(x, weight, **bends)
        want = reference.log_probs(z, labels)
        for found in (
            -linear_cross_entropy(x, own, labels, group, **bends),
            token_log_probs(x @ own.t(), labels, group, **bends),
            head.LmHead(own, group, **bends).read(x, head.Sampled(labels, top_k=columns)),
            head.LmHead(own, group, **bends).read(x, head.Sampled(labels, top_p=0.999999)),
            head.LmHead(own, group, **bends).read(x, head.Gather(labels.unsqueeze(1))).squeeze(1),
        ):
            torch.testing.assert_close(found, want)
        found = head.LmHead(own, group, **bends).read(x, head.Gather(labels.unsqueeze(1), normalised=False)).squeeze(1)
        torch.testing.assert_close(found / temperature, z.gather(1, labels.unsqueeze(1)).squeeze(1))
    nothing = linear_cross_entropy(x, own, torch.full_like(labels, -100), group, skip_ignored=True, **bends)
    assert torch.equal(nothing, torch.zeros(T))
    x = hidden * signs / 10
    for call in (
        lambda: linear_cross_entropy(x, weight, labels, group, **bends),
        lambda: head.LmHead(weight, group, **bends).read(x, head.TopK(2, normalised=False)),
    ):
        with pytest.raises(ValueError, match=f"every rank of tp_group passed the same {columns} columns"):
            call()


def test_gradient_into_the_memory_of_a_leaf():
    """`grad` of a leaf is not the leaf itself: an optimizer needs both."""
    hidden, weight, labels = problem()
    for view in (lambda z: z, lambda z: z[:4], lambda z: z.view(2, 3, V)):
        leaf = (hidden @ weight.t()).requires_grad_()
        before, z = leaf.detach().clone(), view(leaf)
        own = view(labels.unsqueeze(1).expand(T, V))[..., 0]
        vocab_parallel_cross_entropy(z, own, gradient_into_logits=True).sum().backward()
        want = torch.autograd.grad(reference.cross_entropy(z, own).sum(), leaf)[0]
        torch.testing.assert_close(leaf.grad, want)
        assert torch.equal(leaf.detach(), before)
        assert leaf.grad.data_ptr() != leaf.data_ptr()


@ranks(2, 4)
def test_what_one_rank_has_of_several():
    """A vocab that is a part, and no group: named before any label is looked at. A whole weight, and a group."""
    hidden, weight, labels = problem()
    vocab = VocabShard.split(V, dist.group.WORLD)
    own = weight[vocab.start : vocab.stop]
    z, own_z = hidden @ weight.t(), hidden @ own.t()
    for call in (
        partial(linear_cross_entropy, hidden, own, labels),
        partial(vocab_parallel_cross_entropy, own_z, labels),
    ):
        with pytest.raises(ValueError, match="on one rank: it must be the whole; pass the tp_group whose ranks hold"):
            call(vocab=vocab)
    with pytest.raises(ValueError, match="columns.* pass the VocabShard"):
        vocab_parallel_cross_entropy(z, labels, dist.group.WORLD, vocab)
    alike = vocab_parallel_cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]), dist.group.WORLD)
    torch.testing.assert_close(alike, torch.full((3,), 4.0 * dist.get_world_size()).log())
    calls = [
        partial(linear_cross_entropy, hidden, weight, labels),
        partial(vocab_parallel_cross_entropy, z, labels),
    ]
    for top_k, top_p, chunk_tokens in itertools.product((None, 3), (1.0, 0.9), (None, 1)):
        options = {"top_k": top_k, "top_p": top_p, "chunk_tokens": chunk_tokens}
        calls.append(partial(head.sampled_log_probs, z, labels, **options))
    for call in calls:
        with pytest.raises(ValueError, match=f"every rank of tp_group passed the same {V} columns"):
            call(tp_group=dist.group.WORLD)
