"""The page on read-outs runs as typed, and the read-out that it writes is right; heads made of layers."""

import dataclasses
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import UNSHARDED, VocabShard
from megatron_ext.head import (
    KL,
    CrossEntropy,
    Entropy,
    Gather,
    IsArgmax,
    LmHead,
    Logits,
    LogProbs,
    Sampled,
    SumOfSquares,
    Teacher,
    TopK,
)
from tests.pages import DOCS, python_blocks
from tests.ranks import ranks

BLOCKS = python_blocks((DOCS / "api" / "read_outs.md").read_text())


def page():
    names: dict = {}
    torch.manual_seed(0)
    for block in BLOCKS:
        exec(block, names)
    return names


def excess_surprise(z, labels):
    return (-reference.log_probs(z, labels) - reference.entropy(z)).where(labels != -100, 0.0)


def test_the_page_runs_and_its_read_out_is_right():
    names = page()
    torch.testing.assert_close(names["excess"], names["expected"], rtol=1e-5, atol=1e-5)
    x, weight = names["hidden"], names["output_layer"].weight
    found = torch.autograd.grad(names["excess"].sum(), (x, weight))
    truth = excess_surprise(reference.logits(x.double(), weight.double(), softcap=30, temperature=0.7), names["labels"])
    torch.testing.assert_close(found, torch.autograd.grad(truth.sum(), (x, weight)), rtol=1e-4, atol=1e-4)
    z = names["student"].detach()
    divergence = reference.kl_divergence(names["teacher"], z)
    torch.testing.assert_close(names["divergence"].detach(), divergence, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(names["squares"].detach(), z.softmax(-1).square().sum(-1), rtol=1e-5, atol=1e-6)
    names.clear()  # its class of a read-out is known for good, and with it these globals, a layer among them


@ranks(2)
def test_a_read_out_of_ones_own_over_shards():
    own = page()["ExcessSurprise"]
    torch.manual_seed(1)
    hidden, weight, labels = torch.randn(7, 8), torch.randn(21, 8), torch.randint(21, (7,))
    labels[2] = -100
    shard = VocabShard(0, 5, 21) if dist.get_rank() == 0 else VocabShard(5, 21, 21)
    x, w = hidden.clone().requires_grad_(), weight[shard.start : shard.stop].clone().requires_grad_()
    found = LmHead(w, dist.group.WORLD, vocab=shard).read(x, own(labels))
    whole = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    truth = excess_surprise(reference.logits(*whole), labels)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    dx, dw = torch.autograd.grad(found.sum(), (x, w))
    true_dx, true_dw = torch.autograd.grad(truth.sum(), whole)
    torch.testing.assert_close(dx.double(), true_dx, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw.double(), true_dw[shard.start : shard.stop], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="labels"):
        LmHead(w, dist.group.WORLD, vocab=shard).read(x, own(labels.clamp(min=0) + 21))


@ranks(2)
def test_a_head_of_a_dtensor_and_of_a_linear_layer():
    torch.manual_seed(2)
    layer, hidden, labels = torch.nn.Linear(8, 21), torch.randn(6, 8), torch.randint(21, (6,))
    expected = LmHead.of(layer).read(hidden, LogProbs(labels))
    torch.testing.assert_close(expected, reference.log_probs(layer(hidden), labels), rtol=1e-5, atol=1e-5)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name in ("weight", "bias"):
        cut = distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)])
        setattr(layer, name, torch.nn.Parameter(cut))
    head = LmHead.of(layer)
    assert head.resolved().vocab == (VocabShard(0, 11, 21) if dist.get_rank() == 0 else VocabShard(11, 21, 21))
    found, _ = head.read(hidden, LogProbs(labels), Entropy())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


@ranks(1)
def test_a_head_of_megatrons_output_layer():
    from tests.gpt import model_parallel
    from tests.megatron.patching import one_gpt

    with model_parallel():
        layer = one_gpt(tied=False).output_layer
        hidden, labels = torch.randn(5, 2, layer.weight.shape[1]), torch.randint(layer.weight.shape[0], (5, 2))
        found = LmHead.of(layer).read(hidden, LogProbs(labels))
        torch.testing.assert_close(found, reference.log_probs(layer(hidden)[0], labels), rtol=1e-5, atol=1e-5)
        kind = type(layer)
        layer.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: (3 * kind.forward(self, x)[0], None)})
        with pytest.raises(ValueError, match="layer is Scaled with a forward of its own, .* hidden_layout"):
            LmHead.of(layer)
        layer.softcap = None
        assert LmHead.of(layer).weight is layer.weight


@ranks(1)
def test_a_head_of_an_adapter_on_megatrons_layer():
    from megatron.core import tensor_parallel
    from peft import LoraConfig
    from peft.tuners.lora.tp_layer import LoraParallelLinear

    from tests.gpt import model_parallel
    from tests.megatron.patching import one_gpt

    with model_parallel():
        layer = one_gpt(tied=False).output_layer
        config = LoraConfig(init_lora_weights=False)
        lora = LoraParallelLinear(layer, "a", config, tensor_parallel, 2, megatron_config=layer.config)
        hidden, labels = torch.randn(5, 2, layer.weight.shape[1]), torch.randint(layer.weight.shape[0], (5, 2))
        low = hidden @ lora.lora_A["a"].weight.T @ lora.lora_B["a"].weight.T * lora.scaling["a"]
        found = LmHead.of(lora).read(hidden, LogProbs(labels))
        torch.testing.assert_close(found, reference.log_probs(layer(hidden)[0] + low, labels), rtol=1e-5, atol=1e-5)


def test_a_head_of_a_compiled_layer():
    layer, hidden, labels = torch.nn.Linear(4, 9), torch.randn(3, 4), torch.tensor([1, 8, 0])
    head = LmHead.of(torch.compile(layer, backend="eager"))
    assert head.tp_group == LmHead.of(layer).tp_group
    assert head.weight is layer.weight
    torch.testing.assert_close(head.read(hidden, LogProbs(labels)), reference.log_probs(layer(hidden), labels))


def test_what_is_refused():
    head, hidden = LmHead(torch.randn(9, 4)), torch.randn(3, 4)
    labels = torch.zeros(3, dtype=torch.int64)
    for readouts, message in (
        ((), "readouts are none"),
        ((labels,), "each must be a read-out"),
        ((Entropy(labels),), "counts is torch.int64"),
        ((LogProbs(labels + 9),), r"outside \[0, 9\)"),
    ):
        with pytest.raises(ValueError, match=message):
            head.read(hidden, *readouts)
    with pytest.raises(ValueError, match="layer is Dropout without a weight"):
        LmHead.of(torch.nn.Dropout())
    scaled = type("Scaled", (torch.nn.Linear,), {"forward": lambda self, x: 3 * torch.nn.Linear.forward(self, x)})
    with pytest.raises(ValueError, match="layer is Scaled with a forward of its own, of which the head would leave"):
        LmHead.of(scaled(4, 9))
    with pytest.raises(ValueError, match="logit_scale is 0"):
        LmHead(torch.randn(9, 4), logit_scale=0)


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_two_tensors_of_labels_are_refused_on_every_rank(layout):
    """The refusal comes before any message, and its advice gives the log-probabilities of both."""
    torch.manual_seed(3)
    size, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, labels = torch.randn(4, 6), torch.randn(8, 6), torch.randint(8, (4,))
    others = labels.roll(1).index_fill(0, torch.tensor([2]), -100)
    own = hidden.chunk(size)[rank] if layout == "sequence" else hidden
    head = LmHead(weight.chunk(size)[rank], dist.group.WORLD, layout)
    with count_collectives() as counts:
        for both in (
            (LogProbs(labels), LogProbs(others)),
            (CrossEntropy(labels), IsArgmax(others)),
            (LogProbs(labels), LogProbs(labels, ignore_index=-1)),
        ):
            with pytest.raises(ValueError, match=r"do not have the same labels.*Gather\(labels\.clamp\(min=0\)"):
                head.read(own, *both)
    assert not counts
    ids = others.clamp(min=0).unsqueeze(-1)
    found, gathered = head.read(own, LogProbs(labels), Gather(ids))
    z, second = reference.logits(hidden, weight), gathered.squeeze(-1).where(others >= 0, 0.0)
    torch.testing.assert_close(found, reference.log_probs(z, labels), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, reference.log_probs(z, others), rtol=1e-5, atol=1e-5)


def test_a_call_is_freed_without_the_garbage_collector():
    """A teacher's logits, above all, live no longer than the graph that reads them."""
    gc.collect()
    gc.disable()
    try:
        student, teacher = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9)
        alive = weakref.ref(teacher)
        divergence, entropy = Logits(student).read(KL(Logits(teacher)), Entropy())
        (divergence + entropy).sum().backward()
        del teacher
        assert alive() is not None
        del divergence, entropy
        assert alive() is None
    finally:
        gc.enable()


def test_read_outs_of_the_caller_are_not_written():
    """A call binds copies: the caller's objects serve any other call."""
    head, hidden, labels = LmHead(torch.randn(9, 4)), torch.randn(3, 4), torch.tensor([1, 8, -100])
    teacher = Teacher(LmHead(torch.randn(9, 4)), hidden)
    readouts = [
        LogProbs(labels),
        CrossEntropy(labels, z_loss=0.1),
        Entropy(),
        TopK(2),
        Gather(labels.clamp(0)[:, None]),
    ]
    readouts += [KL(teacher), SumOfSquares(), Sampled(labels, 2), Sampled(labels, None, 0.5), IsArgmax(labels)]
    for readout in readouts:
        before = dict(vars(readout))
        first, again = (head.read(hidden, readout) for _ in range(2))
        assert vars(readout).keys() == before.keys()
        assert all(vars(readout)[name] is x for name, x in before.items())
        assert all(map(torch.equal, *(x if isinstance(x, tuple) else (x,) for x in (first, again))))


def test_heads_hold_what_was_given_and_do_not_change():
    """Also in a group, which is looked up for each call: a copy with another option is whole still."""
    layer, hidden, labels = torch.nn.Linear(4, 9), torch.randn(3, 4), torch.tensor([1, 8, -100])
    head, logits = LmHead.of(layer), Logits(torch.randn(3, 9))
    for each, given in ((head, (hidden,)), (logits, ())):
        before = dict(vars(each))
        each.read(*given, LogProbs(labels))
        assert all(vars(each)[name] is x for name, x in before.items()), "a call has changed its head"
        with pytest.raises(dataclasses.FrozenInstanceError):
            each.temperature = 2.0
    assert head.vocab is None
    assert dataclasses.replace(head, temperature=0.5).tp_group is UNSHARDED
