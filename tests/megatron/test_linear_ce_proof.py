"""The first call of a patched model compares the fused head with the model's own output layer and loss."""

import contextlib
import functools
import re
import threading
import warnings
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import distributed as dist

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron.fused_loss import fusion_proof
from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import VOCAB, grouped
from tests.marks import slow
from tests.megatron.patching import assert_same, batch, grads_of, on_gpt, one_gpt, patched, run


def twice(function):
    """A decorator as patch managers write them, which has every name of what it wraps."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        found = function(*args, **kwargs)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    return wrapper


# Where a decorator may stand: its owner, and the name of what it decorates.
PLACES = {
    "loss": lambda model: (type(model), "compute_language_model_loss"),
    "loss of the base": lambda model: (LanguageModule, "compute_language_model_loss"),
    "forward": lambda model: (type(model.output_layer), "forward"),
    "forward impl": lambda model: (model.output_layer, "_forward_impl"),
    "call impl": lambda model: (model.output_layer, "_call_impl"),
    "cross entropy": lambda model: (tensor_parallel, "vocab_parallel_cross_entropy"),
}


def doubled(model, place, decorator=twice):
    owner, name = PLACES[place](model)
    return mock.patch.object(owner, name, decorator(getattr(owner, name)))


def unchanging_decorator(model):
    kind = type(model)

    @functools.wraps(kind.compute_language_model_loss)
    def same(self, *args, own=kind.compute_language_model_loss):
        return own(self, *args)

    return mock.patch.object(kind, "compute_language_model_loss", same)


def step(model):
    loss = run(model, batch()[1])
    return loss, grads_of(model, loss)


def said_of(caught):
    return [str(w.message) for w in caught if "the fused head" in str(w.message)]


@on_gpt(tp=2, sequence_parallel=True)
@pytest.mark.parametrize("place", ["loss", "forward", *slow("forward impl", "cross entropy")])
@pytest.mark.parametrize("when", ["before", *slow("after")])
def test_a_loss_that_a_decorator_doubles_stays_double(model, place, when):
    plain = run(model, batch()[1])
    with doubled(model, place):
        stock, gradients = step(model)
    assert not torch.allclose(plain, stock)
    with patched(), warnings.catch_warnings(record=True, action="always") as caught:
        if when == "after":
            torch.testing.assert_close(run(model, batch()[1]), plain, rtol=1e-6, atol=1e-6)
            assert fusion_report().losses_fused == 1
        with doubled(model, place):
            for _ in range(2):
                loss, found = step(model)
                assert torch.equal(loss, stock)
                assert_same(found, gradients)
        assert fusion_report().losses_fused == (when == "after")
        assert fusion_report().logits_made == fusion_report().stock_losses == 2
        assert torch.equal(run(model, batch()[1]), plain)  # the decision stands
    with patched():
        torch.testing.assert_close(run(model, batch()[1]), plain, rtol=1e-6, atol=1e-6)
    assert fusion_report().losses_fused == 1 + (when == "after")
    (said,) = said_of(caught)
    assert "GPTModel keeps Megatron's own loss, the fused head stays out: the model's own loss is another" in said
    if place in ("loss", "cross entropy"):
        assert "differs by a factor 2" in said


@on_gpt()
def test_a_decorator_that_changes_nothing_is_fused_and_named(model):
    stock = run(model, batch()[1])
    with unchanging_decorator(model), patched(), warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            torch.testing.assert_close(run(model, batch()[1]), stock, rtol=1e-6, atol=1e-6)
    assert re.search(r"2 losses fused, .*, proved on 16 tokens, largest difference \de-0\d", str(fusion_report()))
    (said,) = said_of(caught)
    assert f"it has a compute_language_model_loss of its own ({__file__}:" in said


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)])
@pytest.mark.parametrize("tied", [True, *slow(False)])
def test_the_proof_leaves_nothing_behind(sequence_parallel, tied):
    model = one_gpt(sequence_parallel=sequence_parallel, tied=tied)
    seen = []
    weight = model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight if weight is None else weight
    weight.main_grad = torch.full(weight.shape, 3.0)
    handles = [
        model.output_layer.register_forward_hook(lambda *_: seen.append("after")),
        model.output_layer.register_forward_pre_hook(lambda *_: seen.append("before")),
        weight.register_hook(lambda gradient: seen.append("gradient")),
    ]
    state, attributes = torch.get_rng_state(), dict(vars(weight))
    with unchanging_decorator(model), patched():
        with count_collectives() as first:
            loss = run(model, batch()[1])
        with count_collectives() as later:
            run(model, batch()[1])
    assert seen == ["before", "after"] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (weight.main_grad == 3).all()
    assert vars(weight).keys() == attributes.keys()
    assert torch.equal(torch.get_rng_state(), state)
    assert first.total() > later.total()
    loss.sum().backward()
    assert seen[-1] == "gradient"
    for handle in handles:
        handle.remove()


@on_gpt()
def test_modes_of_the_proof(model, labels):
    with mock.patch.object(fusion_proof, "compare") as compare:
        with patched(proof="off"):
            run(model, labels)
            with doubled(model, "loss"):
                found = run(model, labels)
        assert compare.call_count == 0
    torch.testing.assert_close(found, 2 * run(model, labels), rtol=1e-6, atol=1e-6)
    counted = mock.patch.object(fusion_proof, "compare", wraps=fusion_proof.compare)
    for mode, times in (("always", 2), ("first", 0)):  # all of the model is Megatron's own
        with counted as compare, patched(proof=mode):
            run(model, labels)
            run(model, labels)
        assert compare.call_count == times
    with pytest.raises(ValueError, match='proof is "never"'.replace('"', "'")):
        patched(proof="never").__enter__()


@on_gpt()
def test_parameters_beside_the_heads_are_not_proved(model, labels):
    """A low-rank adapter adds nothing at its first step, and does later."""
    layer = model.output_layer
    layer.adapter = torch.nn.Linear(layer.input_size, layer.output_size_per_partition, bias=False)
    torch.nn.init.zeros_(layer.adapter.weight)
    own = layer.forward
    layer.forward = lambda x, *args, **kwargs: (own(x, *args, **kwargs)[0] + layer.adapter(x), None)
    with patched():
        with pytest.warns(UserWarning, match="depend on parameters that are not the output layer's weight"):
            run(model, labels)
        layer.adapter.weight.data.fill_(0.1)
        loss = run(model, labels)
    assert torch.equal(loss, run(model, labels))


@on_gpt(tp=2)
def test_what_is_not_proved_on_one_rank_is_fused_on_none(model, labels):
    layer = model.output_layer
    own, factor = layer.forward, 1.0 + dist.get_rank()
    layer.forward = lambda *args, **kwargs: (factor * own(*args, **kwargs)[0], None)
    stock = run(model, labels)
    with patched(), warnings.catch_warnings(action="ignore"):
        assert torch.equal(run(model, labels), stock)
    assert "another one" in fusion_report().models[0].left_to_megatron
    with patched(z_loss=0.1), pytest.raises(ValueError, match=r"asked for z_loss=0.1, and cannot go into GPTModel"):
        run(model, labels)


@on_gpt(tp=2, sequence_parallel=True)
def test_a_change_on_one_rank_reaches_the_others(model, labels):
    """Changes before the first call leave all ranks the model's own loss; later every rank raises, and none waits."""
    first, stock = dist.get_rank() == 0, run(model, labels)
    change = unchanging_decorator(model) if first else contextlib.nullcontext()
    with patched(), change, warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            assert torch.equal(run(model, labels), stock)
    (said,) = said_of(caught)
    assert "on some tensor-parallel ranks alone" in said
    with patched():
        run(model, labels)
        said = r"changed since.*\(it has a compute_language_model_loss of its own" if first else "not the same on every"
        with change, pytest.raises(ValueError, match=said):
            run(model, labels)
        torch.testing.assert_close(run(model, labels), stock, rtol=1e-6, atol=1e-6)


@on_gpt(tp=2)
def test_a_fault_in_a_changed_model_is_told_as_itself(model, labels):
    with patched():
        run(model, labels)
        with unchanging_decorator(model), pytest.raises(ValueError, match=r"labels holds") as raised:
            run(model, labels + 1000)
        assert "changed" not in str(raised.value)


@on_gpt(tp=2)
def test_a_change_in_a_captured_graph_reaches_the_others(model, labels):
    change = unchanging_decorator(model) if dist.get_rank() == 0 else contextlib.nullcontext()
    with patched():
        run(model, labels)
        capturing = {"is_available": lambda: True, "is_current_stream_capturing": lambda: True}
        with change, mock.patch.multiple(torch.cuda, **capturing), pytest.raises(ValueError, match="on every"):
            run(model, labels)


@on_gpt(tp=2)
def test_a_known_model_costs_one_exchange(model, labels):
    exchange = "megatron_ext.megatron.fused_loss.fusion_decision.all_gather_object"
    with patched(), mock.patch(exchange, side_effect=all_gather_object) as exchanged:
        for _ in range(3):
            run(model, labels)
    assert exchanged.call_count == 1


@on_gpt()
def test_a_loss_that_cannot_take_a_sample_is_not_compared(model, labels):
    kind, own = type(model), type(model).compute_language_model_loss
    weights = torch.rand(labels.shape)

    def weighted(self, labels, logits):
        return own(self, labels, logits) * weights

    with mock.patch.object(kind, "compute_language_model_loss", weighted):
        stock = run(model, labels)
        with patched(), pytest.warns(UserWarning, match="not compared with the model's own loss: on a sample it"):
            assert torch.equal(run(model, labels), stock)


@on_gpt()
@pytest.mark.parametrize("left_out", [0, 3])
def test_a_loss_that_leaves_out_padding_is_not_fused(model, left_out):
    """Padding is absent from the first batch."""
    labels = batch()[1].clamp(8, VOCAB - 8)
    kind = type(model)

    def loss(self, labels, logits):
        return kind.compute_language_model_loss(self, labels, logits) * (labels != left_out)

    model.__class__ = type("Padded", (kind,), {"compute_language_model_loss": loss})
    padded = labels.masked_fill(torch.arange(labels.shape[1]) > 4, left_out)
    stock = [run(model, x) for x in (labels, padded)]
    with patched(), pytest.warns(UserWarning, match="other tokens count: 1 of 16 have a loss on one side alone"):
        assert all(map(torch.equal, [run(model, x) for x in (labels, padded)], stock))


@on_gpt()
def test_a_proof_has_no_label_above_those_of_the_batch(model):
    """A loss may index a table without the rows that pad the vocabulary, on CUDA without a way to go on."""
    labels = batch()[1].clamp(max=VOCAB // 2)
    kind, table = type(model), torch.ones(int(labels.max()) + 1)

    def loss(self, labels, logits):
        return kind.compute_language_model_loss(self, labels, logits) * table[labels]

    model.__class__ = type("Weighed", (kind,), {"compute_language_model_loss": loss})
    stock = run(model, labels)
    with patched():
        torch.testing.assert_close(run(model, labels), stock)
        assert fusion_report().losses_fused == 1


@on_gpt()
def test_the_first_scores_may_come_without_gradients(model, labels):
    stock = run(model, labels)
    with unchanging_decorator(model), patched():
        for context in (torch.no_grad(), torch.inference_mode()):
            model.eval()
            with context:
                torch.testing.assert_close(run(model, labels), stock.detach(), rtol=1e-6, atol=1e-6)
            model.train()
    assert "proved on 16 tokens" in str(fusion_report())


@on_gpt()
def test_threads_share_a_model(model, labels):
    expected, logits = run(model, labels).detach(), run(model).detach()
    before, layer = dict(vars(model)), dict(vars(model.output_layer))
    faults, lock, forward = [], threading.Lock(), model.decoder.forward

    def one_at_a_time(*args, **kwargs):  # layers of Megatron-Core 0.20 hold what belongs to a call
        with lock:
            return forward(*args, **kwargs)

    model.decoder.forward = one_at_a_time

    def work(with_labels):
        try:
            for _ in range(15):
                if with_labels:
                    torch.testing.assert_close(run(model, labels), expected, rtol=1e-6, atol=1e-6)
                else:
                    assert torch.equal(run(model), logits)
        except Exception as fault:
            faults.append(fault)

    # Megatron's tracker of random streams knows one thread.
    tracker = type(get_cuda_rng_tracker())
    with patched(), mock.patch.object(tracker, "fork", return_value=contextlib.nullcontext()):
        own = [dict(vars(model)), dict(vars(model.output_layer))]
        threads = [threading.Thread(target=work, args=(i < 2,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults
        assert own == [vars(model), vars(model.output_layer)] == [before, layer]


# -- verify= of the patch: the first losses both ways, side by side ----------------------------------------------------


@grouped(1, 2)
@pytest.mark.parametrize("in_parts", [False, True])
def test_first_losses_are_taken_both_ways(in_parts):
    tp = torch.distributed.get_world_size()
    if in_parts and tp == 1:
        return
    model = one_gpt(sequence_parallel=in_parts)
    stock, gradients = step(model)
    with patched(verify=2):
        for _ in range(3):
            loss, found = step(model)
            torch.testing.assert_close(loss, stock)
            assert_same(found, gradients)
    (report,) = fusion_report().models
    assert report.losses_fused == 3
    assert report.logits_made.total() == 0
    assert len(report.verified.stock) == len(report.verified.ours) == 2
    loss, norm = report.verified.largest
    assert loss < 1e-6
    assert norm < 1e-5
    assert report.verified.ours[0].loss == pytest.approx(stock.mean().item(), rel=1e-5)
    assert "2 losses verified, largest relative difference: loss" in str(report)


@on_gpt()
def test_another_loss_is_told_with_both_runs(model):
    own = fusion_proof.linear_training_loss

    def doubled(*arguments):
        found = own(*arguments)
        return found._replace(loss=2 * found.loss)

    with patched(verify=1), mock.patch.object(fusion_proof, "linear_training_loss", doubled):
        with pytest.warns(UserWarning, match=r"the loss of a step differs by 1\.0e\+00, and at most 1\.0e-04"):
            step(model)


@grouped(1)
def test_a_model_that_does_not_train_is_not_verified():
    model = one_gpt().eval()
    with patched(verify=1):
        run(model, batch()[1])
    assert fusion_report().models[0].verified is None
