"""The example for Megatron-Bridge, with modules made up for the few names of it that the example uses."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import megatron_bridge_lora
import pytest
import torch

from tests.examples import EXAMPLES
from tests.gpt import LoRALinear, causal_mask, model_parallel, stock_spec, tiny_batches, tiny_gpt
from tests.programs import python
from tests.ranks import ranks
from tests.stub_modules import stub_modules

CAP = 2.0


class Gemma2OutputLayer:
    """Base class that Megatron-Bridge puts before the class of Gemma 2's output layer."""

    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return CAP * torch.tanh(logits / CAP), bias


class Provider:
    """A recipe's `config.model`."""

    def __init__(self, capped):
        self.transformer_layer_spec, self.hooks, self.capped = stock_spec, [], capped
        self.register_pre_wrap_hook = self.hooks.append

    def provide(self):
        (model,) = tiny_gpt(lambda config, stage: self.transformer_layer_spec(config, vp_stage=stage), tied=False)
        model.output_layer.weight.data *= 30  # so that the cap bends
        if self.capped:
            kind = type(model.output_layer)
            model.output_layer.__class__ = type(kind.__name__, (Gemma2OutputLayer, kind), {})
            model.config.final_logit_softcapping = CAP
        for hook in self.hooks:
            (model,) = hook([model])
        for block in model.decoder.layers:
            block.mlp.linear_fc1 = LoRALinear(block.mlp.linear_fc1)
        return model


def bridge(capped, trained):
    """Modules of Megatron-Bridge whose `finetune` takes one loss, into `trained`."""
    recipes, finetune, step = (ModuleType(name) for name in ("recipes", "finetune", "gpt_step"))

    def config(peft_scheme):
        assert peft_scheme == "lora"
        return SimpleNamespace(
            model=Provider(capped), checkpoint=SimpleNamespace(), train=SimpleNamespace(train_iters=1)
        )

    def run(config, forward_step_func):
        assert (config.checkpoint.pretrained_checkpoint, config.train.train_iters) == ("DIR", 3)
        model = config.model.provide()
        loss = forward_step_func(model)
        loss.mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        trained.append((loss.detach(), grads, model))

    def forward_step(model):
        tokens = tiny_batches()[0]
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        return model(inputs, positions, causal_mask(inputs.shape[1]), labels=labels)

    recipes.tiny_config, finetune.finetune, step.forward_step = config, run, forward_step
    training = "megatron.bridge.training"
    return {"megatron.bridge.recipes": recipes, f"{training}.finetune": finetune, f"{training}.gpt_step": step}


@pytest.mark.slow
@ranks(1)
def test_heads_of_the_example_give_megatrons_losses():
    """Loss and gradients, those of the adapters too; what the output layer caps is capped once."""
    from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report
    from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

    for capped in (False, True):
        with model_parallel():
            trained, fused = [], []
            for head in ("own", "patch", "spec"):
                reset_fusion_report()
                words = f"--pretrained-checkpoint DIR --recipe tiny_config --train-iters 3 --head {head}"
                argv = mock.patch.object(sys, "argv", ["megatron_bridge_lora.py", *words.split()])
                try:
                    with stub_modules(bridge(capped, trained)), argv:
                        megatron_bridge_lora.main()
                finally:
                    unpatch()
                fused.append(fusion_report().losses_fused)
            assert fused == [0, 1, 1]
            (loss, grads, _), *others = trained
            assert any("adapter" in name for name in grads)
            for found, found_grads, _ in others:
                torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
                assert found_grads.keys() == grads.keys()
                for name, grad in grads.items():
                    torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_example_says_what_is_missing_without_the_bridge():
    done = python(str(EXAMPLES / "megatron_bridge_lora.py"), "--pretrained-checkpoint", "DIR")
    assert done.returncode == 2
    assert "Megatron-Bridge cannot be imported: it needs GPUs, and pip install megatron-bridge" in done.stderr
