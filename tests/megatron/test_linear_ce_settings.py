"""Options that change the loss, what is logged of them, the dtype of logits, and what the head refuses to compute."""

import functools
import logging
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_ext.experimental.pipeline_vocabulary.vocabulary_sharing import output_layer_fault
from megatron_ext.head import LmHead
from megatron_ext.megatron.fused_loss import megatron_log
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.training_loss import TrainingLoss
from megatron_ext.megatron.fusion_report import ModelFusion, fusion_report, reset_fusion_report
from megatron_ext.megatron.language_model_patch import forward_with_fused_head, patch_language_models
from megatron_ext.megatron.layer_specs import gpt_layer_spec
from megatron_ext.megatron.spec_head import with_fused_head
from megatron_ext.memory import __main__ as memory
from megatron_ext.memory.sizes import Sizes
from tests.gpt import VOCAB, causal_mask, data_parallel, grouped, stock_spec, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron.language_models import tiny_hybrid
from tests.megatron.patching import (
    SEQ,
    assert_same,
    batch,
    counting_logits,
    grads_of,
    later_gpt,
    on_gpt,
    one_gpt,
    patch,
    patched,
    run,
    unpatch,
)
from tests.stub_modules import stub_modules

CHANGED = {"z_loss": 0.03, "label_smoothing": 0.2, "softcap": 0.4, "temperature": 0.7}


def reference(logits, labels, *, z_loss=0.0, label_smoothing=0.0, softcap=None, temperature=1.0):
    """Return losses `[B, S]` without z-loss, the z-loss, and the entropies, of whole logits `[B, S, V]`."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    z = z / temperature
    loss = F.cross_entropy(z.transpose(1, 2), labels, reduction="none", label_smoothing=label_smoothing)
    return loss, z_loss * z.logsumexp(-1).square(), torch.distributions.Categorical(logits=z).entropy()


@grouped(2)
@pytest.mark.parametrize("build", [later_gpt, *slow(one_gpt, tiny_hybrid)])
@pytest.mark.parametrize("made", [False, True], ids=["fused", "made"])
def test_options_of_the_loss(build, made):
    """Also of logits that a hook has asked for: the options are not lost with the promise."""

    def reads(module, args, outputs):
        assert outputs[0].shape[:2] == (SEQ, 2)
        if made:
            outputs[0].sum()

    with warnings.catch_warnings(action="ignore"):
        model, labels = build(sequence_parallel=True), batch()[1]
        for options in (CHANGED, {"z_loss": 0.1}, {"softcap": 0.3}):
            logits = run(model, runtime_gather_output=True)
            loss, z_loss, entropy = reference(logits, labels, **options)
            weights = torch.rand_like(loss)
            # The reference gathers full logits on every rank, each of which gives their whole gradient.
            expected = grads_of(model, loss + z_loss, weights)
            reset_fusion_report()
            with (
                model.output_layer.register_forward_hook(reads),
                patched(chunk_size=3, model=model, entropy=True, **options),
            ):
                found = run(model, labels)
                grads = grads_of(model, found, weights)
            torch.testing.assert_close(found, loss, rtol=2e-6, atol=1e-6)
            assert_same(grads, expected)
            (counters,) = fusion_report().models
            assert (counters.losses_fused, counters.logits_made.total()) == ((0, 1) if made else (1, 0))
            assert counters.entropy == pytest.approx(entropy.mean().item(), rel=1e-5)
            wanted = pytest.approx(z_loss.mean().item(), rel=1e-5) if "z_loss" in options else None
            assert counters.z_loss == wanted


@on_gpt()
def test_reported_z_loss_is_a_mean_over_labels_that_count(model):
    labels = batch()[1].clone()
    labels[0, :3] = -100
    counted = labels != -100
    _, z_loss, entropy = reference(run(model), labels.where(counted, 0), z_loss=0.1)
    with patched(z_loss=0.1, entropy=True, model=model):
        run(model, labels)
    (counters,) = fusion_report().models
    assert counters.entropy == pytest.approx(entropy[counted].mean().item(), rel=1e-5)
    assert counters.z_loss == pytest.approx(z_loss[counted].mean().item(), rel=1e-5)


def of_spec(kind, **head):
    """A model whose layer spec names the head where there are options of it."""

    def change(spec):
        return with_fused_head(spec, **head) if head else spec

    if kind == "hybrid":
        return tiny_hybrid(change_spec=change)
    if kind == "ours":
        return one_gpt(spec=change(gpt_layer_spec))
    return one_gpt(spec=lambda config, stage: change(stock_spec(config, stage)), sequence_parallel=True)


@grouped(2)
@pytest.mark.parametrize("kind", ["ours", *slow("Megatron's block", "hybrid")])
def test_options_in_the_layer_spec(kind):
    plain, labels = of_spec(kind), batch()[1]
    logits = run(plain, runtime_gather_output=True)
    loss, z_loss, _ = reference(logits, labels, **CHANGED)
    weights = torch.rand_like(loss)
    expected = grads_of(plain, loss + z_loss, weights)
    stock = run(plain, labels)
    try:
        model = of_spec(kind, chunk_tokens=6, **CHANGED)
        with counting_logits(model.output_layer) as made:
            found = run(model, labels)
            grads = grads_of(model, found, weights)
        torch.testing.assert_close(found, loss, rtol=2e-6, atol=1e-6)
        assert_same(grads, expected)
        assert not made
        (counters,) = fusion_report().models
        assert counters.losses_fused == 1
        assert counters.z_loss == pytest.approx(z_loss.mean().item(), rel=1e-5)

        # Other models stay as they are, and other patches do not change what the spec says.
        assert torch.equal(run(plain, labels), stock)
        patch()
        assert torch.equal(run(model, labels), found)
        patch(model=model)
        torch.testing.assert_close(run(model, labels), stock, rtol=2e-6, atol=1e-6)
        unpatch(model=model)
        assert torch.equal(run(model, labels), found)
        unpatch()
        assert torch.equal(run(model, labels), stock)
    finally:
        unpatch()


def test_a_remembered_z_loss_keeps_no_graph():
    counters = ModelFusion("GPTModel")
    z_loss = torch.tensor([[1.0, 3.0]], requires_grad=True)
    megatron_log.remember(counters, TrainingLoss(z_loss, z_loss=z_loss), torch.tensor([[True], [True]]))
    assert not megatron_log._last.pop("z loss").requires_grad
    assert (counters.z_loss.item(), counters.z_loss.requires_grad) == (2.0, False)


def test_the_log_is_of_the_model_that_trains():
    """Also where a reference model of the same shape runs behind it."""
    counted = torch.tensor([[True], [True]])
    for model, trains in (("policy", True), ("reference", False)):
        loss = torch.tensor([[1.0, 3.0]], requires_grad=trains)
        megatron_log.remember(ModelFusion(model), TrainingLoss(loss, entropy=loss + trains), counted)
    assert megatron_log._last.pop("entropy").tolist() == [[2.0], [4.0]]


def test_chunks_of_made_logits_are_of_sequences():
    made = HeadSettings(nemo_rl_chunk_size=3).of_made(torch.zeros(5, 2, 7), None)  # [S, B, V]
    assert made.chunk_tokens == 3 * 2


def training_script(rank, *, writes):
    """Stands in for `megatron.training.global_vars`, whose writers the last rank alone has; they keep what they get."""
    written = []
    board = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    wandb = SimpleNamespace(log=lambda counts, step: written.append((counts, step)))
    here = writes and rank == 1
    return written, SimpleNamespace(
        get_tensorboard_writer=lambda: board if here else None,
        get_wandb_writer=lambda: wandb if here else None,
        get_args=lambda: SimpleNamespace(curr_iteration=5, tensorboard_log_interval=3),
    )


@grouped(2)
def test_z_loss_entropy_and_counts_in_megatrons_log():
    """Means are by the script's own weights of the tokens, in the form in which the script logs its loss."""
    mask = torch.ones(2, SEQ)
    mask[1, 2:] = 0

    def forms(loss, tokens):
        return {"pair": torch.stack([loss.detach(), tokens.detach()]), "mean": loss.detach() / tokens}

    def step(microbatches, model):
        tokens = next(microbatches)
        output = model(
            tokens[:, :-1], torch.arange(SEQ).expand(2, SEQ), causal_mask(SEQ), labels=tokens[:, 1:].contiguous()
        )

        def loss(per_token):
            total, tokens = (per_token * mask).sum(), mask.sum()
            return total, tokens.int(), {"lm loss": forms(total, tokens)[form]}

        return output, loss

    for form, way in (("pair", "patch"), ("mean", "spec")):
        written, script = training_script(torch.distributed.get_rank(), writes=way == "patch")
        reset_fusion_report()
        try:
            spec = None
            if way == "spec":
                spec = with_fused_head(get_gpt_layer_local_spec(), z_loss=0.1, entropy=True, chunk_tokens=6)
            else:
                patch(z_loss=0.1, entropy=True, chunk_size=3)
            chunks = data_parallel(tiny_gpt(spec), distributed_optimizer=False)
            tokens = tiny_batches(batch=4, seq=SEQ)[0]
            with stub_modules({"megatron.training.global_vars": script}):
                for forward_only in (True, False):
                    with torch.set_grad_enabled(not forward_only):
                        logs = get_forward_backward_func()(
                            forward_step_func=step,
                            data_iterator=[iter(tokens.split(2))],
                            model=chunks,
                            num_microbatches=2,
                            seq_length=SEQ,
                            micro_batch_size=2,
                            forward_only=forward_only,
                        )
                    assert ("entropy" in logs[0]) != forward_only
        finally:
            unpatch()
        for part, log in zip(tokens.split(2), logs, strict=True):
            logits = run(chunks[0], tokens=part[:, :-1], runtime_gather_output=True)
            per_token = reference(logits, part[:, 1:], z_loss=0.1)
            for name, expected in zip(("lm loss", "z loss", "entropy"), per_token, strict=True):
                total = (expected * mask).sum()
                torch.testing.assert_close(log[name], forms(total, mask.sum())[form], rtol=2e-6, atol=1e-6)
        assert not megatron_log._last, "a later step would log it again"
        counts = {"fused losses": 2, "losses by Megatron": 0, "logits made": 0}
        writes = way == "patch" and torch.distributed.get_rank() == 1
        assert written == ([(name, count, 6) for name, count in counts.items()] + [(counts, 6)]) * writes


@grouped(2)
@pytest.mark.parametrize("of_fp32", ["logits", "weight"])
def test_logits_of_another_dtype(of_fp32):
    """bf16 hidden states, and logits in fp32, or a weight whose logits Megatron's own product does not make."""
    model = one_gpt(params_dtype=torch.bfloat16, bf16=True, tied=False).bfloat16()
    layer, labels, kept = model.output_layer, batch()[1], []
    if of_fp32 == "weight":
        layer.weight = torch.nn.Parameter(layer.weight.detach().float())
    else:
        layer.output_dtype = torch.float32
    keeping = layer.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    with keeping, patched(chunk_size=3, model=model):
        loss = run(model, labels)
        with counting_logits(layer) as made:
            grads = grads_of(model, loss)
    assert not made
    logits = gather_from_tensor_model_parallel_region(kept[0].float() @ layer.weight.detach().float().t())
    logits.requires_grad_()
    expected, *_ = reference(logits.transpose(0, 1), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    (dz,) = torch.autograd.grad(expected.sum(), logits)
    own = dz.chunk(2, dim=-1)[torch.distributed.get_rank()].flatten(0, 1)
    wanted = own.t() @ kept[0].float().flatten(0, 1)
    torch.testing.assert_close(grads["output_layer.weight"].float(), wanted, rtol=4e-3, atol=1e-5)


@on_gpt()
def test_refusals(model, labels):
    for name, wrong in (("z_loss", "much"), ("label_smoothing", 1.0), ("softcap", -1), ("temperature", 0)):
        for take in (patch, HeadSettings, functools.partial(with_fused_head, model.transformer_layer_spec)):
            with pytest.raises(ValueError, match=f"{name} is {wrong!r}: it must be"):
                take(**{name: wrong})
    with pytest.raises(ValueError, match="entropy is 1: it must be True or False"):
        patch(entropy=1)
    with pytest.raises(ValueError, match="logit_dtype is 'bf16': it must be None or torch.float32"):
        HeadSettings(logit_dtype="bf16")
    with pytest.raises(TypeError, match="chunk_size: the fused head has no .*; chunk_tokens counts tokens: pass"):
        with_fused_head(model.transformer_layer_spec, chunk_size=8)
    with pytest.raises(TypeError, match="z_los: the fused head has no such setting. It has chunk_tokens, .*z_loss"):
        patch(z_los=0.1)
    with pytest.raises(ValueError, match="spec is <function reference .* it must be a layer spec object"):
        with_fused_head(reference)

    patch_language_models(HeadSettings(z_loss=0.1, softcap=2.0))
    try:
        model.output_layer.softcap = 3.0
        with pytest.raises(ValueError, match="softcap is 2.0 and the output layer has a softcap of 3.0 already"):
            run(model, labels)
        del model.output_layer.softcap
        hooked = model.output_layer.register_full_backward_hook(lambda module, before, after: None)
        said = r"asked for z_loss=0.1, softcap=2.0, and cannot go into GPTModel: .*hook"
        with hooked, pytest.raises(ValueError, match=said):
            run(model, labels)
        run(model, labels)
    finally:
        unpatch()

    with patched(label_smoothing=0.1):
        with pytest.raises(ValueError, match="label_smoothing=0.1 .* patch with label_smoothing=0.0 and"):
            run(model, batch()[0], return_logprobs_for_linear_ce_fusion=True)
        patch(z_loss=0.1)
        with pytest.raises(ValueError, match="z_loss=0.1: .* gradients would not be those of log-probabilities"):
            run(model, batch()[0], return_logprobs_for_linear_ce_fusion=True)


@on_gpt()
def test_the_report_says_what_runs(model, labels):
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "te"
    assert "no model has taken a loss" in str(fusion_report())
    with patched():
        with mock.patch.object(logging.getLogger("megatron_ext.megatron.fusion_report"), "info") as told:
            run(model, labels)
        assert "asks for Megatron's fused loss (te)" in told.call_args.args[0]
        earlier = fusion_report()
        said = str(earlier)
        assert "GPTModel: 1 loss fused, logits made 0 times" in said
        assert "\n  tensor-parallel layers: 10 of megatron\n" in said  # 4 of each block, embedding, output
        sizes = said.partition("megatron-ext memory ")[2]
        tokens, width = labels.numel(), model.config.hidden_size
        eighths = min(8 * 2 * width // tokens, 8)  # 4 bytes of each, no more than the weight's and its gradient's 8
        kept = 100 * (VOCAB * eighths // 8) / VOCAB
        assert f"\n  cache: up to {kept:.0f} % of the exponentials are kept for backward\n" in said
        assert sizes == f"--tokens {tokens} --hidden {width} --vocab {VOCAB} --tp 1 --dtype fp32 --cache bounded"
        counted, ignored = memory._sizes(memory._parser().parse_args(sizes.split()))
        assert (counted, ignored) == (Sizes(tokens, width, VOCAB, dtype=torch.float32), [])
        assert "asks for Transformer Engine's fused loss, the fused head runs instead" in said
        run(model, labels)
        assert (earlier.losses_fused, fusion_report().losses_fused) == (1, 2)
        model.config.cross_entropy_fusion_impl = "native"
        model.config.cross_entropy_loss_fusion = False
        hooked = model.output_layer.register_full_backward_hook(lambda module, before, after: None)
        with hooked, pytest.warns(UserWarning, match="keeps Megatron's own loss"):
            run(model, labels)
        report = fusion_report()
        assert (report.stock_losses, report.logits_made) == (1, 1)
        assert "logits made 1 time (1 for Megatron's own loss), 1 loss by Megatron" in str(report)
        assert "left to Megatron: its output layer has backward hooks" in str(report)


@on_gpt()
def test_the_report_follows_patches_and_their_end(model, labels):
    other = one_gpt()
    try:
        patch()
        run(model, labels)
        for cache in (0, 1):
            patch(cache=cache)
            assert "cache" not in str(fusion_report())
            run(model, labels)
            said = str(fusion_report())
            assert f"cache: up to {100 * cache} % of the exponentials are kept" in said
            assert said.endswith(f"--cache {cache}")
        patch(model=other)
        run(other, labels)
        run(model, labels)
        assert "unpatched" not in str(fusion_report())
        unpatch()
        first, second = str(fusion_report()).split("\nfused head: ")
        assert first.startswith("fused head: GPTModel: 4 losses fused, logits made 0 times, unpatched since then\n")
        assert first.endswith("--cache 1")  # of its last head
        assert "unpatched" not in second
        patch()
        assert "unpatched" not in str(fusion_report())
    finally:
        unpatch(model=other)
        unpatch()
    assert str(fusion_report()).count("unpatched") == 2
    with mock.patch.object(model.output_layer, "promises", True, create=True):  # a vocabulary shared over stages
        unpatch()
        assert str(fusion_report()).count("unpatched") == 1


@on_gpt()
def test_a_model_that_had_no_patch_is_not_called_unpatched(model):
    other = one_gpt()
    ids, labels, positions = batch()
    forward_with_fused_head(model, ids, positions, causal_mask(SEQ), labels=labels)
    said = str(fusion_report())
    patch(model=other)
    assert str(fusion_report()) == said
    unpatch(model=other)
    assert str(fusion_report()) == said


FP32, BF16 = torch.float32, torch.bfloat16


@grouped(1)
@pytest.mark.parametrize(
    "layers, patchs, rounds",
    [(None, None, False), (FP32, None, False), (BF16, None, True), (None, BF16, True), (BF16, FP32, False)],
)
def test_the_patchs_dtype_goes_before_the_output_layers(layers, patchs, rounds):
    calls, resolved = [], LmHead.resolved
    model, labels = one_gpt().bfloat16(), batch()[1]
    model.config.params_dtype = BF16
    model.output_layer.output_dtype = layers
    with (
        patched(logit_dtype=patchs),
        mock.patch.object(LmHead, "resolved", lambda head: calls.append(resolved(head)) or calls[-1]),
    ):
        run(model, labels)
        fault = output_layer_fault(model)
    assert {each.rounds for each in calls} == {rounds}
    assert ("logits are rounded to torch.bfloat16" in str(fault)) is rounds
