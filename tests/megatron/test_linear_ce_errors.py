"""Refusals and messages of the GPTModel patch, and models that it leaves to Megatron."""

import re
import warnings
from types import SimpleNamespace
from unittest import mock

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron import versions
from tests.gpt import VOCAB, LoRALinear, grouped
from tests.marks import quick_if, slow
from tests.megatron.patching import SEQ, assert_fused_is_stock, batch, later_gpt, on_gpt, one_gpt, patch, patched, run
from tests.megatron.test_linear_ce_foreign_code import subclass_that_calls_super
from tests.programs import python


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_labels_of_another_shape(sequence_parallel):
    with patched():
        model, labels = one_gpt(sequence_parallel=sequence_parallel), batch()[1]
        for wrong in (labels[:, 1:], labels[:1], labels.T, labels[0]):
            with pytest.raises(ValueError, match=r"labels have shape .* takes labels \[batch, sequence\] of \(2, 8\)"):
                run(model, wrong)
        assert run(model, labels).shape == labels.shape


@grouped(1, 2)
def test_gathered_logits_together_with_labels():
    world_size = dist.get_world_size()
    with patched():
        model, labels = one_gpt(), batch()[1]
        gathering = one_gpt(model={"parallel_output": False})
        right = run(model, labels)
        if world_size == 1:  # nothing is gathered from one rank
            assert torch.equal(run(model, labels, runtime_gather_output=True), right)
            assert torch.equal(run(gathering, labels), right)
            return
        with pytest.raises(ValueError, match="runtime_gather_output is True and there are labels: .* pass .*=False"):
            run(model, labels, runtime_gather_output=True)
        with pytest.raises(ValueError, match="parallel_output is False and there are labels"):
            run(gathering, labels)
        assert torch.equal(run(gathering, labels, runtime_gather_output=False), right)


@grouped(1)
def test_wrong_settings():
    before = list(vars(GPTModel).items())
    for size in (0, -1, 2.5, True, "4"):
        with pytest.raises(ValueError, match="chunk_size is .* positive number of sequence positions, or None"):
            patch(chunk_size=size)
    for cache in (-1, "much"):
        with pytest.raises(ValueError, match="cache is"):
            patch(cache=cache)
    with pytest.raises(ValueError, match="verify is -1: it must be a number of losses"):
        patch(verify=-1)
    assert list(vars(GPTModel).items()) == before


@grouped(1)
def test_a_class_without_the_seams():
    with pytest.raises(ValueError, match=r"Linear lacks an argument `labels` of forward\(\), a method compute_lang"):
        patch(model=torch.nn.Linear(2, 2))

    model = one_gpt()

    class NoLabels(type(model)):
        def _postprocess(self, hidden_states):
            return hidden_states

    model.__class__ = NoLabels
    with pytest.raises(ValueError, match=r"NoLabels lacks an argument `labels` of _postprocess\(\)"):
        patch(model=model)


@grouped(1)
@pytest.mark.parametrize("version,tested", [("0.13.1", False), ("0.15.0", True), ("0.18.0rc1", True), ("1.0.0", False)])
def test_an_untested_megatron_warns_once(version, tested):
    versions.warn_if_untested.cache_clear()
    another = mock.patch.object(megatron.core, "__version__", version)
    with another, warnings.catch_warnings(record=True, action="always") as caught:
        with patched():
            patch(chunk_size=2)
    versions.warn_if_untested.cache_clear()
    tested_with = f"is tested with Megatron-Core {versions.TESTED[0]} to {versions.TESTED[-1]}"
    said = [w for w in caught if tested_with in str(w.message)]
    assert len(said) == (0 if tested else 1)
    assert all(f"this is {version}: before you rely on" in str(w.message) for w in said)
    assert all(w.filename == patched.__wrapped__.__code__.co_filename for w in said)  # whose line calls patch()


class Softcapped:
    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return 0.5 * torch.tanh(logits / 0.5), bias


def custom_layer(model):
    model.output_layer.__class__ = type("Custom", (Softcapped, type(model.output_layer)), {})


def function_layer(model):
    layer = model.output_layer
    del model.output_layer
    model.output_layer = lambda *args, **kwargs: layer(*args, **kwargs)


def weight_in_pieces(model):
    model.output_layer.gtp_remat_size = 2
    for weight in model.parameters():  # what Megatron-Core 0.19 asks of such a weight
        weight.all_gather_and_prefetch = lambda fwd, weight=weight: weight


def mxfp8_layer(model):
    """Name a softcap in the layer's class, as a user's own linear layers should: the name must not have it fused."""
    kind = type("TELMHeadColumnParallelLinear", (type(model.output_layer),), {"softcap": None})
    model.output_layer.__class__ = vars(transformer_engine)[kind.__name__] = kind


def instance_forward(model):
    forward = model.output_layer.forward
    model.output_layer.forward = lambda *args, **kwargs: (2 * forward(*args, **kwargs)[0], None)


# A change of the model, and what is said of it.
CHANGES = {
    "adapter": (
        lambda model: setattr(model, "output_layer", LoRALinear(model.output_layer)),
        "is a LoRALinear, which adds an adapter to another layer's logits; leave output_layer out",
    ),
    "own loss": (subclass_that_calls_super, "compute_language_model_loss of its own"),
    "function": (function_layer, "its output layer is a function and no torch.nn.Module"),
    "own layer": (custom_layer, r"Custom with a forward of its own \(.*; .* give it an attribute `softcap`"),
    "hooks": (lambda model: model.output_layer.register_full_backward_hook(lambda *_: None), "backward hooks"),
    "own forward": (instance_forward, "put there by somebody else"),
    "rounded": (
        lambda model: setattr(model.output_layer, "output_dtype", torch.bfloat16),
        r"rounds logits to torch.bfloat16 .logit_dtype.*set logit_dtype to None or float32",
    ),
    "pieces": (weight_in_pieces, "generalized tensor parallelism cuts its output layer's weight.*to 1"),
    "mxfp8": (mxfp8_layer, r"multiplies in MXFP8 .fp8_output_proj.*set fp8_output_proj=False"),
}


@on_gpt(tp=2)
@pytest.mark.parametrize("name", quick_if(("adapter", "own loss", "function").__contains__, CHANGES))
def test_unknown_linear_cross_entropy_stays_with_megatron(model, labels, name):
    change, reason = CHANGES[name]
    with mock.patch.dict(vars(transformer_engine)):
        change(model)
        try:
            stock = run(model, labels)
        except RuntimeError as error:  # Megatron-Core 0.20 rounds logits by Transformer Engine alone
            if name == "rounded" and "requires Transformer Engine" in str(error):
                return
            raise
        with patched(), warnings.catch_warnings(record=True, action="always") as caught:
            assert torch.equal(run(model, labels), stock)
            assert torch.equal(run(model, labels), stock)
        (said,) = [w for w in caught if "keeps Megatron's own loss" in str(w.message)]
        assert said.category is UserWarning
        assert re.search(reason, str(said.message))
        # It answers the option of `forward` all the same.
        ids = batch()[0]
        with patched():
            log_probs = run(model, ids, return_logprobs_for_linear_ce_fusion=True)
        torch.testing.assert_close(log_probs, -run(model, ids.roll(-1, 1))[:, :-1])


@on_gpt()
def test_the_loss_stays_a_method_of_the_model(model, labels):
    """Code that is handed the loss during a forward, as output processors are, finds the model by it."""
    seen = []
    kind = type(model)

    def _postprocess(self, *args, **kwargs):
        seen.append(self.compute_language_model_loss.__self__)
        return kind._postprocess(self, *args, **kwargs)

    model.__class__ = type("Curious", (kind,), {"_postprocess": _postprocess})
    with patched():
        run(model, labels)
    assert seen == [model]


@grouped(1)
def test_a_stand_in_for_a_model_is_left_alone():
    """Tests of a class's `forward` call it so: on an object that is no module, with a function for an output layer."""

    class Model(LanguageModule):
        def forward(self, hidden, labels=None):
            return self.compute_language_model_loss(labels, self.output_layer(hidden)[0])

    fake = SimpleNamespace(
        output_layer=lambda hidden: (2 * hidden, None),
        compute_language_model_loss=lambda labels, logits: logits - labels,
    )
    with patched():
        assert Model.forward(fake, torch.tensor(3), labels=torch.tensor(1)).item() == 5


@on_gpt(tp=2)
def test_a_layer_that_names_its_softcap_is_fused(model, labels):
    custom_layer(model)
    with count_collectives() as plain:
        stock = run(model, labels)
    model.output_layer.softcap = 0.5
    with patched():
        run(model, labels)  # ranks agree that it is fused
        with count_collectives() as fused:
            loss = run(model, labels)
    assert fused.total() == plain.total() - 2
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)


@on_gpt()
@pytest.mark.parametrize("change", ["no softcap in forward", "another term in forward"])
def test_a_softcap_that_a_layer_names_is_proved(model, labels, change):
    """An attribute of this name says nothing of the forward."""
    if change == "another term in forward":
        custom_layer(model)
        kind = type(model.output_layer)
        scaled = {"forward": lambda self, *args, **kwargs: (3 * kind.forward(self, *args, **kwargs)[0], None)}
        model.output_layer.__class__ = type("Scaled", (kind,), scaled)
    model.output_layer.softcap = 0.5
    stock = run(model, labels)
    with patched(), pytest.warns(UserWarning, match="own loss is another one: .* attribute `softcap`"):
        assert torch.equal(run(model, labels), stock)


def compare_later(model, fewer_collectives, **kwargs):
    sent = []

    def step(model):
        run(model, batch()[1], **kwargs)  # ranks agree that it is fused
        with count_collectives() as counts:
            loss = run(model, batch()[1], **kwargs)
        sent.append(counts.total())
        return loss

    assert_fused_is_stock(model, step, patched_model=model)
    assert sent[0] - sent[1] == fewer_collectives


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_scaled_logits_and_unknown_arguments(sequence_parallel):
    model = later_gpt(sequence_parallel=sequence_parallel)
    compare_later(model, 2, novelty="new")
    assert model.passed_on["novelty"] == "new"
    for change in (lambda z: 4 * z, lambda z: z / 4, lambda z: torch.div(z.mul(2), 3)):
        model.change = change
        compare_later(model, 2)


@grouped(2)
def test_whoever_needs_logits_gets_them():
    """Then the loss is Megatron's own, of just those logits: also if they were changed in place, or read only."""
    model = later_gpt()
    shapes = []

    def look(logits):
        shapes.append((logits.shape, logits.size(0), logits.dim(), logits.dtype, logits.device.type))
        return logits

    model.change = look
    compare_later(model, 2)
    assert shapes[0] == shapes[1] == ((SEQ, 2, VOCAB // 2), SEQ, 3, torch.float32, "cpu")

    best = []

    def accept(logits):
        best.append(logits.argmax(-1))
        return logits

    model.change = accept
    compare_later(model, 0)
    assert all(torch.equal(best[0], again) for again in best)
    for change in (
        lambda z: z.mul_(0.5),
        lambda z: (z.add_(torch.arange(VOCAB // 2) / 9), z)[1],
        lambda z: z * -1,
        lambda z: 2 / (z + 3),
        lambda z: z * torch.tensor(0.5),
        lambda z: z.float()[..., :] + torch.cat([z, z])[:SEQ],
    ):
        model.change = change
        compare_later(model, 0)
    compare_later(later_gpt(), 0, output_processor=lambda hidden, layer: hidden.float())  # the caller's own


@grouped(2)
def test_kept_logits_are_those_of_the_step_or_refused():
    model, kept = later_gpt(), []
    model.change = lambda logits: (kept.append(logits), logits)[1]
    run(model, batch()[1])
    with patched():
        for _ in range(2):
            run(model, batch()[1]).sum().backward()
    assert torch.equal(kept[1].argmax(-1), kept[0].argmax(-1))
    torch.optim.SGD(model.parameters()).step()
    with pytest.raises(ValueError, match="logits of an earlier call, .* the output layer has changed since"):
        kept[2].argmax(-1)


@grouped(2)
@pytest.mark.parametrize("asks", [False, True], ids=["loss", "logits"])
def test_hidden_states_changed_before_the_loss_are_refused(asks):
    with patched():
        model, seen = later_gpt(), []

        def change(logits):
            seen[-1].zero_()
            return logits[..., :] if asks else logits

        model.change = change
        with model.output_layer.register_forward_pre_hook(lambda layer, given: seen.append(given[0])), torch.no_grad():
            for _ in range(2):
                with pytest.raises(ValueError, match="hidden states of shape .* were changed in place after"):
                    run(model, batch()[1])


PIPELINE = """
import torch
from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion
from tests.gpt import model_parallel, run_schedule, tiny_batches, tiny_gpt
torch.distributed.init_process_group("gloo")
with model_parallel(pp=2):
    patch_gpt_model_forward_for_linear_ce_fusion()
    tokens = tiny_batches()[0]
    tokens[0, -1] = 10**6  # a label, and no input
    run_schedule(tiny_gpt(), tokens)
"""


@pytest.mark.slow
def test_a_label_that_the_last_stage_alone_sees_ends_the_job():
    """The first stage waits for gradients, and is ended by whoever started both."""
    done = python("-c", PIPELINE, ranks=2, ignore_warnings=True)
    assert done.returncode == 1
    assert "OutsideVocabulary: labels holds [1000000], outside" in done.stderr
