"""`logit_dtype` in every way in: it comes to the head, whose words are seen where hidden states are fp32; else it is
refused by name."""

import os
from unittest import mock

import pytest
import torch

from megatron_ext import run
from megatron_ext.dtensor import (
    causal_lm_log_probs,
    causal_lm_loss,
    causal_lm_read,
    causal_lm_sampled_log_probs,
    use_fused_loss,
)
from megatron_ext.head import Entropy, LmHead
from megatron_ext.losses import (
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
    TopKDistillationLoss,
)
from megatron_ext.megatron.output_processors import NextTokenLogProbs, ReadOuts
from megatron_ext.model_utils import TrainingSamplingParams, from_parallel_hidden_states_to_logprobs
from megatron_ext.policy import DTensorPolicyWorker, MegatronPolicyWorker
from megatron_ext.policy.config import read_config
from megatron_ext.policy.losses import ClippedPGLoss
from tests.dtensor.models import batch, make
from tests.dtensor.test_causal_lm import adapted
from tests.gpt import forget_megatron, model_parallel
from tests.megatron import patching
from tests.policy.problems import shard, tiny_batch, tiny_config, tiny_model
from tests.policy.test_bits import OfLogits
from tests.ranks import ranks

BF16 = torch.bfloat16
REFUSED = pytest.raises(ValueError, match=r"logit_dtype is torch\.bfloat16 and \w*hidden is multiplied in")
HIDDEN, WEIGHT, OTHER = torch.randn(4, 6, 8), torch.randn(24, 8), torch.randn(24, 8)
LABELS, PER_TOKEN = torch.arange(24).view(4, 6), torch.zeros(4, 6)


def nemo_rl(params=None):
    def call(**options):
        return from_parallel_hidden_states_to_logprobs(
            HIDDEN.transpose(0, 1), WEIGHT, None, LABELS, 0, 24, None, sampling_params=params, **options
        )

    return call


def of(loss, *given, **more):
    return lambda **options: loss(**options)(HIDDEN, WEIGHT, LABELS, *given, **more)


def lm(function, **more):
    return lambda **options: function(make("llama"), batch()["input_ids"], **more, **options)


WAYS = {
    "NeMo-RL's function": nemo_rl(),
    "NeMo-RL's function, top-k": nemo_rl(TrainingSamplingParams(5, 0.9, 0.7)),
    "GRPO": of(GRPOLoss, torch.ones(4)),
    "DPO": of(DPOLoss, reference_log_probs=PER_TOKEN),
    "SimPO": of(SimPOLoss),
    "ORPO": of(ORPOLoss),
    "KTO": of(KTOLoss, torch.arange(4) % 2 == 0, reference_log_probs=PER_TOKEN),
    "distillation": lambda **options: DistillationLoss(**options)(HIDDEN, WEIGHT, HIDDEN, OTHER),
    "top-k distillation": lambda **options: TopKDistillationLoss(**options)(
        HIDDEN, WEIGHT, torch.randn(4, 6, 3), torch.randint(24, (4, 6, 3))
    ),
    "causal_lm_loss": lm(causal_lm_loss),
    "causal_lm_log_probs": lm(causal_lm_log_probs),
    "causal_lm_sampled_log_probs": lm(causal_lm_sampled_log_probs, top_k=5, top_p=0.9),
    "causal_lm_read": lm(causal_lm_read, readouts=lambda labels: [Entropy()], columns=1),
    "use_fused_loss": lambda **options: use_fused_loss(make("llama"), **options)(**batch()).loss,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_comes_to_the_head(way):
    with REFUSED:
        WAYS[way](logit_dtype=BF16)
    for allowed in ({}, {"logit_dtype": torch.float32}):
        WAYS[way](**allowed)


@ranks(1)
def test_it_comes_to_the_head_of_megatrons_models():
    with model_parallel(1):
        model, (tokens, labels, _) = patching.one_gpt(), patching.batch()
        entropies = ReadOuts(readouts=[Entropy()], logit_dtype=BF16)
        with patching.patched():
            for processor in (NextTokenLogProbs(logit_dtype=BF16), entropies):
                with REFUSED:
                    patching.run(model, None, tokens, output_processor=processor)
        with patching.patched(logit_dtype=BF16), REFUSED:
            patching.run(model, labels, tokens)


@ranks(1)
def test_logit_dtype_is_refused_where_megatron_has_another():
    with model_parallel(1):
        model, (tokens, labels, _) = patching.one_gpt(), patching.batch()
        handle = model.output_layer.register_forward_hook(lambda module, inputs, outputs: outputs[0].sum() and None)
        with (
            patching.patched(logit_dtype=BF16),
            pytest.raises(ValueError, match="that Megatron made, in torch.float32"),
        ):
            patching.run(model, labels, tokens)
        handle.remove()
        handle = model.output_layer.register_full_backward_hook(lambda module, before, after: None)
        said = "asked for logit_dtype=torch.bfloat16, and cannot go into GPTModel"
        with patching.patched(logit_dtype=BF16), pytest.raises(ValueError, match=said):
            patching.run(model, labels, tokens)
        handle.remove()


def test_it_is_refused_where_a_models_own_logits_are_read():
    said = "logit_dtype is torch.bfloat16, and LlamaForCausalLM (makes its own logits|keeps its own loss)"
    model, given = adapted(make("llama")), batch()
    with pytest.raises(ValueError, match=said):
        causal_lm_loss(model, given["input_ids"], logit_dtype=BF16)
    with pytest.raises(ValueError, match=said):
        use_fused_loss(model, logit_dtype=BF16)(**given)


def test_the_launchers_flag(capsys):
    for given, dtype in {"bfloat16": BF16, "float16": torch.float16, "float32": torch.float32}.items():
        options = run.command_line().parse_args(["--logit-dtype", given, "script.py"])
        assert run._settings(options) == {"logit_dtype": dtype}
    with pytest.raises(SystemExit):
        run.command_line().parse_args(["--logit-dtype", "bf16", "script.py"])
    assert "'bf16' must be bfloat16, float16, float32" in capsys.readouterr().err


def test_the_workers_key():
    for key in ("dtensor_cfg", "megatron_cfg"):
        for precision, given, dtype in (
            ("bfloat16", {}, None),
            ("bfloat16", {"logit_dtype": "bfloat16"}, BF16),
            ("float32", {"logit_dtype": "float32"}, torch.float32),
        ):
            assert read_config(tiny_config(precision=precision, **given), key).logit_dtype is dtype
        with pytest.raises(ValueError, match="logit_dtype is 'bfloat16' and precision 'float32'"):
            read_config(tiny_config(logit_dtype="bfloat16"), key)


@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_every_pass_of_a_worker_rounds(backend):
    """Scores and steps: logits are rounded, and then divided by the temperature; a loss of logits is refused."""
    given = {"precision": "bfloat16", "logit_dtype": "bfloat16", "generation": {"temperature": 0.7}}
    config = tiny_config(tiny_model(vocab_size=98), **given)
    worker = backend(config, init_reference_model=False)
    found, read = [], LmHead.read

    def recorded(head, *given, **options):
        found.append((head.logit_dtype, head.temperature))
        return read(head, *given, **options)

    LmHead.read = recorded
    try:
        mine = shard(tiny_batch(8), worker)
        with mock.patch.dict(os.environ, MEGATRON_EXT_PROOF="off"):  # no sample is read
            worker.get_logprobs(mine)
            worker.train(mine, ClippedPGLoss())
        assert found == [(BF16, 0.7)] * 6  # 2 micro-batches of 4 rows, 4 of 2
        with pytest.raises(ValueError, match=r"logit_dtype is torch\.bfloat16, and the loss asks for logits"):
            worker.train(mine, OfLogits())
    finally:
        LmHead.read = read
        worker.shutdown()
        forget_megatron()
