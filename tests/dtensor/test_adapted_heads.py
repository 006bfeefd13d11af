"""PEFT's adapters on the lm head: losses, read-outs and gradients of the adapted model, without logits."""

import warnings

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_ext import reference
from megatron_ext.dtensor import causal_lm_log_probs, causal_lm_loss, parallelize, use_fused_loss
from megatron_ext.head import Entropy, LmHead, LogProbs
from tests.dtensor.models import VOCAB, batch, check_gradients, error, loss_and_gradients, make
from tests.dtensor.test_causal_lm import largest_logits
from tests.dtensor.test_fused_loss import check_data_parallel, check_fused, check_left_alone, mine
from tests.marks import slow
from tests.ranks import ranks


def adapted(kind="llama", *, tied=False, **options):
    """A model with LoRA whose B is drawn: PEFT's own B is 0 at first, and then A has no gradient."""
    torch.manual_seed(4)
    targets = {"target_modules": ["lm_head", "q_proj"]} if "modules_to_save" not in options else {}
    model = get_peft_model(make(kind, tied=tied), LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | targets | options))
    return drawn(model)


def drawn(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def two_adapters(**options):
    model = adapted(**options)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])
    return drawn(model)


MODELS = {
    "one": adapted,
    "tied": lambda: adapted(tied=True),
    "softcap": lambda: adapted("gemma2"),
    "scaled": lambda: adapted("granite", use_rslora=True, lora_alpha=5),
    "two": two_adapters,
    "a copy that trains": lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def off(model):
    model.base_model.disable_adapter_layers()
    model.requires_grad_()  # else nothing trains


def merged(model):
    model.merge_adapter()
    model.requires_grad_()


@pytest.mark.parametrize("change", [None, *slow(off, merged)], ids=["on", "off", "merged"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_model(name, change):
    model = MODELS[name]()
    if change is not None:
        change(model)
    _, true = check_fused(model, **batch())
    assert any("lm_head" in one for one in true) or (name == "tied" and change is not None)


def test_a_merged_adapter_that_does_not_train():
    model = adapted()
    model.merge_adapter()
    model.requires_grad_(False)
    expected = model(**batch()).loss
    found = use_fused_loss(model)(**batch())
    assert found.logits is None
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss, expected, rtol=3e-6, atol=0)


def test_dropout_is_that_of_a_module_that_trains():
    """The same masks from the same seed: PEFT draws those of the head last. None where it evaluates."""
    model = adapted(lora_dropout=0.5)
    torch.manual_seed(9)
    expected = model(**batch()).loss
    use_fused_loss(model, in_eval=True)
    torch.manual_seed(9)
    found = model(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected, rtol=3e-6, atol=0)
    evaluated = model.eval()(**batch()).loss
    assert not torch.isclose(evaluated, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(evaluated, model(**batch()).loss, rtol=0, atol=0)


def test_no_logits_and_no_gradient_of_the_weight():
    model = use_fused_loss(adapted(), cache=0, chunk_tokens=8)
    with largest_logits() as found:
        model(**batch(4, 32)).loss.backward()
    assert 0 < found.size <= 32 * VOCAB
    head = model.get_base_model().lm_head
    assert head.base_layer.weight.grad is None
    assert head.lora_A["default"].weight.grad.norm() > 0


def test_losses_and_log_probs_of_a_loop():
    model = adapted().get_base_model()
    tokens = batch()["input_ids"]
    logits = model(input_ids=tokens).logits.double()[:, :-1]
    true = reference.log_probs(logits, tokens[:, 1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses = causal_lm_loss(model, tokens)
        log_probs, entropy = causal_lm_log_probs(model, tokens, return_entropy=True)
    assert error(losses[:, :-1], -true) < 1e-6
    assert error(log_probs[:, :-1], true) < 1e-6
    assert error(entropy[:, :-1], reference.entropy(logits)) < 1e-6


def test_any_read_out_of_the_layer():
    layer = adapted().get_base_model().lm_head
    hidden, labels = torch.randn(5, layer.in_features), torch.arange(5)
    found, entropy = LmHead.of(layer).read(hidden, LogProbs(labels), Entropy())
    logits = layer(hidden).double()
    assert error(found, reference.log_probs(logits, labels)) < 1e-6
    assert error(entropy, reference.entropy(logits)) < 1e-6


@pytest.mark.parametrize("wrap", ["ddp", *slow("fsdp2")])
@ranks(2)
def test_data_parallel(wrap):
    check_data_parallel(adapted(), wrap)


@pytest.mark.parametrize(
    "make_model, said",
    [
        (lambda: adapted(use_dora=True), "is DoraLinearVariant: it is more than a low-rank product"),
        (lambda: adapted(lora_bias=True), "has a bias of its own"),
        (
            lambda: get_peft_model(make("llama"), LoHaConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")),
            "of layers that wrap another only PEFT's LoRA is known here",
        ),
    ],
    ids=["dora", "bias", "loha"],
)
def test_other_adapters_are_refused_or_keep_their_logits(make_model, said):
    model = make_model()
    with pytest.raises(ValueError, match=said):
        LmHead.of(model.get_base_model().lm_head)
    check_left_alone(model, said, **batch(), num_items_in_batch=31)  # as a trainer calls it


@pytest.mark.parametrize("path", ["base_layer", "lora_A.default"])
def test_hooks_inside_of_an_adapted_head_are_run(path):
    model = adapted()
    head = model.get_base_model().lm_head
    head.get_submodule(path).register_forward_hook(lambda module, given, out: 2 * out)
    check_left_alone(model, "LlamaForCausalLM keeps its own loss .its gradient of ", **batch())


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"]}], ids=str)
@ranks(2)
def test_tensor_parallel_adapters_are_refused_before_any_change(options):
    model = adapted(**options).get_base_model()
    modules, before = dict(model.named_modules()), model(**batch()).loss
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    name = options["target_modules"][0]
    for plan in (None, {f"*{name}" if name == "lm_head" else f"model.layers.*.self_attn.{name}": "colwise"}):
        with pytest.raises(ValueError, match=rf"{name} is a peft\.tuners\.lora\.layer\.Linear, .*merge_and_unload"):
            parallelize(model, mesh, torch.float32, plan=plan)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert {name: id(x) for name, x in model.named_modules()} == {name: id(x) for name, x in modules.items()}
    assert torch.equal(model(**batch()).loss, before)


@ranks(2)
def test_data_parallelism_of_an_adapted_head_by_parallelize():
    given, model = batch(4), adapted()
    count = (given["labels"][:, 1:] != -100).sum()
    _, true = loss_and_gradients(model.get_base_model(), **given)
    inside = parallelize(model.get_base_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.float32)
    given = mine(given)
    losses = causal_lm_loss(inside, given["input_ids"], labels=given["labels"])
    (losses.sum() / count * 2).backward()
    check_gradients(inside, true)
