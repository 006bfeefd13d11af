"""A model's own loss against the fused one on a few tokens: equal is proved, and a difference is told in words."""

import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.head import LmHead, LogProbs, linear_cross_entropy
from megatron_ext.proof import (
    Proof,
    ProofBasis,
    Proofs,
    agreed,
    code_values,
    compare,
    config_values,
    fusion_is_on,
    module_parts,
    proof_mode,
    why_fusion_is_off,
)
from tests.ranks import ranks

T, D, V = 48, 20, 61


def sample(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V - 5, (T,), generator=generator)
    labels[::7] = -100
    return hidden, weight, labels


def losses(hidden, head, labels, **options):
    return F.cross_entropy(hidden @ head.T, labels, reduction="none", **options)


def outcome(own, dtype=torch.float32, **given):
    hidden, weight, labels = sample(dtype)
    fused = given.get("fused", lambda h: linear_cross_entropy(h, weight, labels))
    return compare(lambda h: own(h, weight, labels), fused, hidden, {"weight": weight})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_losses_are_proved(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    proof = outcome(lambda h, w, y: F.cross_entropy((h @ w.T).to(wide), y, reduction="none"), dtype)
    assert proof.fused, str(proof)
    assert proof.tokens == T
    assert str(proof).startswith("proved on 48 tokens, largest difference ")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16])
def test_losses_that_come_in_16_bits_hide_no_wrong_factor(dtype, rounded):
    """The head computes no coarser for it: 0.4 % are another loss in fp32, whatever its dtype."""
    assert not outcome(lambda h, w, y: (1.004 * losses(h, w, y)).to(rounded), dtype).fused


class _NeighboursGradient(torch.autograd.Function):
    """The same losses, each with the gradient of the token before it."""

    @staticmethod
    def forward(ctx, losses):
        return losses.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(1)


def test_gradients_of_other_tokens_are_refused():
    hidden, weight, labels = sample()
    fused = lambda h: _NeighboursGradient.apply(linear_cross_entropy(h, weight, labels))  # noqa: E731
    assert not compare(lambda h: losses(h, weight, labels), fused, hidden, {"weight": weight}).fused


def test_a_scalar_loss_is_proved_with_its_gradients():
    hidden, weight, labels = sample()

    def fused(h):
        return linear_cross_entropy(h, weight, labels).sum() / (labels != -100).sum()

    assert compare(lambda h: F.cross_entropy(h @ weight.T, labels), fused, hidden, {"weight": weight}).fused


def detached(h, w, y):
    return losses(h.detach(), w, y)


def columns_cut(h, w, y):
    return F.cross_entropy((h @ w.T)[:, :-3], y, reduction="none")


def z_loss(h, w, y):
    return losses(h, w, y) + 1e-4 * (h @ w.T).logsumexp(-1).square() * (y != -100)


def class_weights(h, w, y):
    return losses(h, w, y, weight=torch.linspace(0.9, 1.1, V))


DIFFERENT = {
    "differs by a factor 2": lambda h, w, y: 2 * losses(h, w, y),
    "another term: differs by a constant 0.25": lambda h, w, y: losses(h, w, y) + 0.25,
    r"the model's own has fewer columns: 3 have": columns_cut,
    r"other tokens count: 7 of 48": lambda h, w, y: losses(h, w, y.clamp(min=0)),
    "it gives no gradient to hidden states": detached,
    r"its .* differs by 0.0": z_loss,
    r" differs by 0": class_weights,
    r"it has the shape \[\], the fused one \[48\]": lambda h, w, y: losses(h, w, y).mean(),
    "its loss of a sample is not finite": lambda h, w, y: losses(h, w, y) / 0.0,
}


@pytest.mark.parametrize("words", DIFFERENT)
def test_a_difference_is_refused_in_words(words):
    proof = outcome(DIFFERENT[words])
    assert not proof.fused
    assert proof.verdict == "refused"
    assert re.search(words, str(proof)), str(proof)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [*DIFFERENT][:5])
def test_16_bits_hide_no_wrong_factor_term_or_column(words, dtype):
    proof = outcome(lambda h, w, y: DIFFERENT[words](h.float(), w.float(), y), dtype)
    assert not proof.fused
    assert re.search(words.partition(" 0.25")[0], str(proof)) or "factor 1.9" in str(proof), str(proof)


def test_a_model_that_raises_on_a_sample_is_not_comparable():
    def own(h, w, y):
        raise RuntimeError("needs 128 tokens\nand more")

    proof = outcome(own)
    assert str(proof) == (
        "not compared with the model's own loss: on a sample it raised RuntimeError: needs 128 tokens"
    )
    with pytest.raises(ValueError, match="ours"):
        outcome(losses, fused=lambda h: (_ for _ in ()).throw(ValueError("ours")))


def test_nothing_is_left_in_gradients_or_random_states():
    hidden, weight, labels = sample()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, D), True
    aside = weight.main_grad
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)

    def own(h):
        torch.rand(3)
        return losses(h, weight, labels)

    head = LmHead(weight, gradient_accumulation_fusion=True)

    def fused(h):
        return -head.read(h, LogProbs(labels))

    assert compare(own, fused, hidden, {"weight": weight}).fused
    assert torch.equal(torch.rand(2), expected)
    assert weight.grad is None
    assert weight.main_grad is aside
    assert weight.grad_added_to_main_grad is True
    assert not aside.any()
    assert not compare(own, lambda h: 2 * fused(h), hidden, {"weight": weight}).fused


def test_the_basis_compares_functions_by_identity():
    def make():
        def forward(self):
            return 1

        return forward

    class Model:
        pass

    model = Model()
    before = ProofBasis(make, model, 1.0, ("a", [2]), {"x": 3})
    assert before.same_as(ProofBasis(make, model, 1.0, ("a", [2]), {"x": 3}))
    for other in (
        ProofBasis(make, Model(), 1.0, ("a", [2]), {"x": 3}),
        ProofBasis(make, model, 1, ("a", [2]), {"x": 3}),
    ):
        assert not before.same_as(other)
    assert not ProofBasis(make()).same_as(ProofBasis(make()))  # the same name and qualified name
    assert ProofBasis(before.same_as).same_as(ProofBasis(before.same_as))  # a bound method is a new object each time
    layer = torch.nn.Linear(2, 2)
    rests = ProofBasis(module_parts(layer))
    assert rests.same_as(ProofBasis(module_parts(layer)))
    handle = layer.register_forward_hook(lambda *_: None)
    assert not rests.same_as(ProofBasis(module_parts(layer)))
    handle.remove()
    layer.forward = lambda x: x
    assert not rests.same_as(ProofBasis(module_parts(layer)))


class InnerConfig:
    def __init__(self, scale):
        self.scale, self.other = scale, object()


class OuterConfig:
    def __init__(self, scale):
        self.text_config, self.vocab_size = InnerConfig(scale), 7


def test_the_basis_holds_values_of_a_config():
    before = ProofBasis(config_values(OuterConfig(1.0)))
    assert before.same_as(ProofBasis(config_values(OuterConfig(1.0))))
    assert not before.same_as(ProofBasis(config_values(OuterConfig(2.0))))


class Loss:
    def of(self):
        return 1.0


def test_values_are_read_by_the_shortest_way_to_them():
    """The class of `super()` leads to `weigh` first, by a way on which the values that `weigh` reads are too deep."""
    one, other = {"weight": 1.0}, {"weight": 1.0}

    def weigh(loss):
        return one["weight"] * other["weight"]

    class Weighted(Loss):
        def of(self):
            return super().of() * weigh(self)

    loss = Weighted()
    before = ProofBasis(code_values(loss.of))
    assert before.same_as(ProofBasis(code_values(loss.of)))
    for held in (one, other):
        held["weight"] = 2.0
        assert not before.same_as(ProofBasis(code_values(loss.of)))
        held["weight"] = 1.0


class Owner:
    pass


def test_a_proof_is_made_once_and_again_after_a_change():
    proofs, owner, calls, rests = Proofs(), Owner(), [], [1]

    def prove():
        calls.append(1)
        return Proof("proved", tokens=64, largest_difference=1e-6)

    for expected in (1, 1):
        assert proofs.of(owner, ProofBasis(rests), prove).fused
        assert len(calls) == expected
    rests.append(2)
    proofs.of(owner, ProofBasis(rests), prove)
    assert len(calls) == 2
    proofs.of(owner, ProofBasis(rests), prove, mode="always")
    assert len(calls) == 3
    assert str(proofs.of(owner, ProofBasis(rests), prove, mode="off")).startswith("not compared")
    assert len(calls) == 3
    assert str(proofs.made(owner)) == "proved on 64 tokens, largest difference 1e-06"
    assert proofs.made(Owner()) is None


def test_a_captured_graph_is_not_comparable(monkeypatch):
    proofs, owner = Proofs(), Owner()

    def prove():
        return Proof("proved", tokens=64)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    found = proofs.of(owner, ProofBasis(1), prove)
    assert not found.fused
    assert "a CUDA graph is being captured" in str(found)
    assert proofs.of(owner, ProofBasis(1), prove, mode="off").fused
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    assert proofs.of(owner, ProofBasis(1), prove).fused
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert proofs.of(owner, ProofBasis(1), prove).fused  # it was proved before


def test_modes_come_from_options_and_the_environment(monkeypatch):
    assert proof_mode() == "first"
    assert fusion_is_on()
    monkeypatch.setenv("MEGATRON_EXT_PROOF", "always")
    assert (proof_mode(), proof_mode("off")) == ("always", "off")
    monkeypatch.setenv("MEGATRON_EXT_PROOF", "never")
    with pytest.raises(ValueError, match="MEGATRON_EXT_PROOF is 'never': it must be"):
        proof_mode()
    with pytest.raises(ValueError, match="proof is 'no': it must be"):
        proof_mode("no")
    monkeypatch.setenv("MEGATRON_EXT_FUSION", "off")
    assert why_fusion_is_off() == "MEGATRON_EXT_FUSION=off is set in the environment"
    monkeypatch.setenv("MEGATRON_EXT_FUSION", "0")
    with pytest.raises(ValueError, match="MEGATRON_EXT_FUSION is '0': it must be"):
        why_fusion_is_off()


@ranks(2)
def test_ranks_agree_on_a_proof():
    world, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    mine = Proof("proved", tokens=64, largest_difference=(rank + 1) * 1e-6)
    assert agreed(mine, world).largest_difference == 2e-6
    mine = Proof.refused("differs by a factor 2", 64) if rank == 1 else mine
    assert str(agreed(mine, world)) == (
        "the model's own loss is another one: differs by a factor 2 (compared on 64 tokens)"
    )


def test_basis_keeps_no_model_alive():
    def made():
        model = torch.nn.Linear(2, 3)
        model.forward = lambda x, own=model: x
        first, second = (ProofBasis(model, model.forward, [model.extra_repr]) for _ in range(2))
        return first, first.same_as(second), weakref.ref(model)

    basis, same, model = made()
    gc.collect()
    assert same
    assert model() is None
    other = torch.nn.Linear(2, 3)
    assert not basis.same_as(ProofBasis(other, other.forward, [other.extra_repr]))
