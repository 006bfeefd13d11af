"""verl's functions as ours give them, against plain PyTorch in fp64; its own source where `VERL_SRC` names one.

VERL_SRC=/path/to/verl python -m pytest tests/integrations/test_verl.py
"""

import contextlib
import importlib
import inspect
import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.integrations import substitution, verl
from megatron_ext.replace import replacement_of
from tests.gpt import causal_mask, model_parallel
from tests.integrations.stand_ins import applied, standing_in_for
from tests.megatron.patching import SEQ, assert_same, counting_logits, grads_of, one_gpt, patched
from tests.megatron.patching import batch as megatron_batch
from tests.ranks import ranks

SOURCE = os.environ.get("VERL_SRC")
STOOD_IN = ["tensordict", "omegaconf", "codetiming", "orjson", "peft", "hydra", "datasets", "torchdata", "pandas"]
# What verl 0.7 to 0.9 take; the last one is new in 0.9.
KNOWN = {
    "linear_cross_entropy": "hidden, weight, labels, temperature, reduction, dist_process_group",
    "FusedLinearForPPO": "hidden_states, vocab_weights, input_ids, temperature",
    "logprobs_from_logits": "logits, labels, inplace_backward",
    "entropy_from_logits": "logits",
    "entropy_from_logits_with_chunking": "logits, chunk_size",
    "vocab_parallel_log_probs_from_logits": "logits, labels",
    "vocab_parallel_entropy": "vocab_parallel_logits",
    "vocab_parallel_entropy_with_chunking": "vocab_parallel_logits, chunk_size",
}
VOCABULARY = 24


def listed(function) -> str:
    return ", ".join(p.name for p in substitution.parameters(function))


def test_ours_take_what_theirs_take():
    assert {seam.name: listed(seam.ours) for seam in verl._replaced_names()} == KNOWN


def truth(z, labels):
    return reference.log_probs(z, labels), reference.entropy(z)


def drawn(tokens: int = 8):
    g = torch.Generator().manual_seed(11)
    hidden = torch.randn(tokens, 1, 6, dtype=torch.float64, generator=g)
    weight = torch.randn(VOCABULARY, 6, dtype=torch.float64, generator=g)
    return hidden, weight, torch.randint(VOCABULARY, (1, tokens), generator=g)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [None, "gathered", "viewed", "split in backward"])
def test_linear_cross_entropy(sequence_parallel):
    """Hidden states in Megatron's path may come out of a gather, whose backward adds up the ranks' gradients or not."""
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, labels = drawn()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    wanted = truth((leaves[0].flatten(0, 1) @ leaves[1].t()) / 0.7, labels.flatten())
    upstream = [torch.linspace(-1, 1, 8).double(), torch.linspace(2, 1, 8).double()]
    dx, dw = torch.autograd.grad(wanted, leaves, upstream)
    with model_parallel(tp=world):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_tensor_model_parallel_group()
        w = weight.chunk(world)[rank].clone().requires_grad_()
        part = slice(rank * 8 // world, (rank + 1) * 8 // world) if sequence_parallel else slice(None)
        x = hidden[part].clone().requires_grad_()
        given = x
        if sequence_parallel:
            adds_up = sequence_parallel != "split in backward"
            given = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=adds_up)
        if sequence_parallel == "viewed":
            given = given.transpose(0, 1).contiguous()[..., :]
        with count_collectives() as forward:
            found = verl.linear_cross_entropy(given, w, labels, 0.7, "none", group)
        same([y.detach() for y in found], [y.detach() for y in wanted])
        got = torch.autograd.grad(found, (x, w), upstream)
        same(got, (dx[part], dw.chunk(world)[rank]))
        assert forward.total() == int(world > 1)
        for reduction in ("sum", "mean"):
            total, _ = verl.linear_cross_entropy(given, w, labels, 0.7, reduction, group)
            same(total, getattr(wanted[0], reduction)())
    with pytest.raises(ValueError, match="reduction is 'max'"):
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "max")


@ranks(1, 2, 4)
def test_from_logits_over_megatrons_group():
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, labels = drawn()
    z = (hidden.flatten(0, 1) @ weight.t()).requires_grad_()
    wanted = truth(z, labels[0])
    upstream = torch.linspace(-1, 1, 8).double()
    with model_parallel(tp=world):
        mine = z.detach().chunk(world, -1)[rank].clone().requires_grad_()
        kept = mine.detach().clone()
        found = verl.vocab_parallel_log_probs_from_logits(mine, labels[0]), verl.vocab_parallel_entropy(mine)
        for value, expected in zip(found, wanted, strict=True):
            same(value.detach(), expected.detach())
            (dz,) = torch.autograd.grad(expected, z, upstream, retain_graph=True)
            same(torch.autograd.grad(value, mine, upstream)[0], dz.chunk(world, -1)[rank])
        assert torch.equal(mine.detach(), kept)
        in_chunks = mine.detach().view(2, 4, -1).requires_grad_()
        with count_collectives() as forward:
            entropy = verl.vocab_parallel_entropy_with_chunking(in_chunks, 3)
        assert forward.total() == int(world > 1)
        same(entropy.detach(), wanted[1].detach().view(2, 4))
        (dz,) = torch.autograd.grad(wanted[1], z, upstream)
        same(torch.autograd.grad(entropy, in_chunks, upstream.view(2, 4))[0].flatten(0, 1), dz.chunk(world, -1)[rank])
        same(verl.vocab_parallel_entropy_with_chunking(in_chunks, 1).detach(), entropy.detach())
        with pytest.raises(ValueError, match="chunk_size is 0"):
            verl.vocab_parallel_entropy_with_chunking(in_chunks, 0)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_the_fsdp_path(shape):
    hidden, weight, labels = drawn()
    hidden, labels = hidden.view(*shape, 6), labels.view(shape)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    mine = [x.clone().requires_grad_() for x in (hidden, weight)]
    wanted = truth(leaves[0] @ leaves[1].t() / 0.7, labels)
    found = verl.FusedLinearForPPO(chunk_size=3)(*mine, labels.int(), temperature=0.7)
    upstream = [torch.randn(shape).double() for _ in range(2)]
    same(found, wanted)
    same(torch.autograd.grad(found, mine, upstream), torch.autograd.grad(wanted, leaves, upstream))
    z = (hidden @ weight.t()).requires_grad_()
    of_logits = verl.logprobs_from_logits(z, labels, True)
    same(of_logits, truth(z, labels)[0])
    before = z.detach().clone()
    of_logits.sum().backward()
    assert torch.equal(z.detach(), before)
    for entropy in (verl.entropy_from_logits, partial(verl.entropy_from_logits_with_chunking, chunk_size=3)):
        wanted = truth(z, labels)[1]
        found = torch.utils.checkpoint.checkpoint(entropy, z, use_reentrant=False)  # as verl calls it
        same(found.detach(), wanted.detach())
        same(torch.autograd.grad(found, z, upstream[1]), torch.autograd.grad(wanted, z, upstream[1]))


@contextlib.contextmanager
def source():
    """verl's modules, with its own functions."""
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):  # up to transformers 4 it had this name
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    sys.path.insert(0, SOURCE)
    importlib.import_module("megatron.core.jit")  # which keeps torch.compile as it is at its import
    compiled = torch.compile
    torch.compile = lambda function=None, **_: function if function is not None else lambda f: f
    try:
        with standing_in_for(STOOD_IN):
            modules = {seam.name: importlib.import_module(seam.module) for seam in verl._replaced_names()}
            yield {name: module for name, module in modules.items() if hasattr(module, name)}
    finally:
        torch.compile = compiled
        sys.path.remove(SOURCE)


@pytest.mark.skipif(SOURCE is None, reason="VERL_SRC names no source of verl")
@ranks(1, 2)
def test_their_own_source():
    """Replaced and put back; those of their functions that run on CPU give the same values and gradients."""
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, labels = (x.float() if x.is_floating_point() else x for x in drawn())
    logits = (hidden.flatten(0, 1) @ weight.t()).chunk(world, -1)[rank]
    upstream = torch.linspace(-1, 1, 8)

    def numbers(theirs) -> dict:
        z = logits.clone().requires_grad_()
        leaves = [x.clone().requires_grad_() for x in (hidden[:, 0], weight)]
        whole = (hidden.flatten(0, 1) @ weight.t()).requires_grad_()
        fused = theirs["FusedLinearForPPO"].FusedLinearForPPO()(*leaves, labels[0], temperature=0.7)
        megatron, fsdp = theirs["vocab_parallel_entropy"], theirs["entropy_from_logits"]
        made = {
            "fused log-probs": (fused[0], leaves),
            "fused entropy": (fused[1], leaves),
            "fsdp log-probs": (theirs["logprobs_from_logits"].logprobs_from_logits(whole, labels[0]), [whole]),
            "entropy": (megatron.vocab_parallel_entropy(z.clone()), [z]),
            "log-probs": (megatron.vocab_parallel_log_probs_from_logits(z.clone(), labels[0]), [z]),
            "fsdp entropy": (fsdp.entropy_from_logits(whole), [whole]),
            "fsdp entropy in chunks": (fsdp.entropy_from_logits_with_chunking(whole, 3), [whole]),
        }
        found = {
            name: [value.detach(), *torch.autograd.grad(value, of, upstream, retain_graph=True)]
            for name, (value, of) in made.items()
        }
        if "vocab_parallel_entropy_with_chunking" in theirs:  # their backward fails at several chunks
            found["entropy in chunks"] = [megatron.vocab_parallel_entropy_with_chunking(logits.clone()[None], 3)]
        return found

    with source() as theirs, model_parallel(tp=world):
        originals = {name: getattr(module, name) for name, module in theirs.items()}
        assert {name: listed(original) for name, original in originals.items()} == {n: KNOWN[n] for n in originals}
        wanted = numbers(theirs)
        with applied(verl):
            for name, module in theirs.items():
                assert getattr(module, name) is not originals[name]
            found = numbers(theirs)
        for name, module in theirs.items():
            assert getattr(module, name) is originals[name]
        for name, values in wanted.items():
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


IMPORTERS = {
    "verl.models.mcore.model_forward_fused": "linear_cross_entropy",
    "verl.workers.actor.dp_actor": "logprobs_from_logits",  # up to 0.8
    "verl.workers.actor.megatron_actor": "vocab_parallel_entropy",
    "verl.workers.engine.megatron.transformer_impl": "vocab_parallel_entropy",  # since 0.8
    "verl.workers.engine.fsdp.transformer_impl": "logprobs_from_logits",
}


@pytest.mark.skipif(SOURCE is None, reason="VERL_SRC names no source of verl")
def test_their_importers_and_a_models_forward():
    """Both forwards of its FSDP path, on CPU: the fused one of theirs needs a GPU, ours does not."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    tokens = torch.randint(VOCABULARY, (2, 6))
    with source():
        from verl.models.transformers import dense_common

        def outputs(forward):
            found = forward(model, tokens, return_dict=True, temperature=0.7)
            return found.log_probs, found.entropy

        wanted = outputs(dense_common.forward_with_torch_backend)
        there = [name for name in IMPORTERS if substitution._is_there(name)]
        assert len(there) >= 2
        modules = {name: importlib.import_module(name) for name in there}
        originals = {name: getattr(module, IMPORTERS[name]) for name, module in modules.items()}
        with applied(verl):
            for name, module in modules.items():
                assert replacement_of(getattr(module, IMPORTERS[name])) is not None
            torch.testing.assert_close(outputs(dense_common.forward_with_torch_backend), wanted)
            fused = [x.view(2, 6) for x in outputs(dense_common.forward_with_triton_backend)]
            torch.testing.assert_close(fused, [*wanted])
        for name, module in modules.items():
            assert getattr(module, IMPORTERS[name]) is originals[name]


@pytest.mark.skipif(SOURCE is None, reason="VERL_SRC names no source of verl")
@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_multi_token_prediction_in_their_fused_path(sequence_parallel):
    """Their output processor in a patched model: no logits, those of the further predictions neither."""
    world = dist.get_world_size()
    with model_parallel(tp=world), source():
        from megatron.core.models.gpt import GPTModel

        if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
            pytest.skip("this Megatron-Core has no output processors: verl leaves the further predictions out")
        with applied(verl):
            fused = importlib.import_module("verl.models.mcore.model_forward_fused")
            model = one_gpt(mtp_num_layers=2, sequence_parallel=sequence_parallel and world > 1)
            tokens, labels, positions = megatron_batch(1)  # verl packs: its batch is one row
            mask, upstream = torch.ones(tokens.shape), torch.rand(tokens.shape)
            mask[0, :3] = 0
            given = {"labels": labels, "loss_mask": mask}
            losses = model(tokens, positions, causal_mask(SEQ), **given)
            stock = grads_of(model, losses, -upstream)
            given["output_processor"] = fused.fused_output_processor
            given["output_processor_context"] = fused.FusedOutputProcessorContext(temperature=1.0)
            with patched(), counting_logits(model.output_layer) as made:
                found = model(tokens, positions, causal_mask(SEQ), **given)
                log_probs = found.log_probs.view(1, SEQ)
                assert_same(grads_of(model, log_probs, upstream), stock)
            assert made == []
            torch.testing.assert_close(log_probs, -losses, rtol=1e-6, atol=2e-6)
