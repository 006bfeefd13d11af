"""The fused head under FSDP2: weights that are sharded between calls, gathered by hooks, tied as a DTensor."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import fully_sharded, grouped, make_optimizer, model_parallel, tiny_batches, tiny_gpt, train_step
from tests.marks import slow
from tests.megatron.language_models import tiny_hybrid
from tests.megatron.patching import SEQ, assert_same, counting_logits, grads_of, one_gpt, patched, run
from tests.ranks import ranks

SLOW = (pytest.mark.slow, pytest.mark.each_version)


def shard(model, reshard: bool) -> None:
    """Shard as Megatron's TorchFullyShardedDataParallel does: layers, embedding and output layer, then the whole."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    output = [] if model.output_layer.weight is None else [model.output_layer]
    for module in (model.embedding, *model.decoder.layers, *output, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def own_step(model):
    """Losses of this rank's own tokens, and weights of their gradients."""
    rank = dist.get_rank()
    tokens = tiny_batches(batch=4, seq=SEQ)[0][2 * rank : 2 * rank + 2]
    loss = run(model, tokens[:, 1:], tokens[:, :-1])
    return loss, torch.linspace(0.1, 1, loss.numel()).reshape(loss.shape) * (rank + 1)


def averaged(grads: dict) -> dict:
    for grad in grads.values():
        if grad is not None:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return grads


@grouped(2, tp=1)
@pytest.mark.parametrize("tied", [False, *slow(True)], ids=["untied", "tied"])
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=SLOW)], ids=["resharded", "kept"])
@pytest.mark.parametrize("build", [one_gpt, pytest.param(tiny_hybrid, marks=SLOW)])
def test_fsdp2(build, tied, reshard):
    model = build(tied=tied)
    stock, weights = own_step(model)
    expected = averaged(grads_of(model, stock, weights))
    names = [name for name, _ in model.named_parameters()]
    shard(model, reshard)
    assert isinstance(model.embedding.word_embeddings.weight, DTensor)
    # The weight that the head then gathers has no main_grad to add to.
    model.output_layer.gradient_accumulation_fusion = tied and reshard
    with patched(chunk_size=3), counting_logits(model.output_layer) as made:
        for _ in range(2):  # gradients are reduced again over a second micro-batch
            loss, weights = own_step(model)
            torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
            loss.backward(weights)
    assert not made
    assert fusion_report().losses_fused == 2
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert list(found) == names
    assert_same({n: None if g is None else g.full_tensor() / 2 for n, g in found.items()}, expected)


@grouped(2, tp=1)
@pytest.mark.parametrize("reshard", [True, *slow(False)], ids=["resharded", "kept"])
def test_whoever_asks_for_logits_under_fsdp2_gets_them(reshard):
    model, seen = one_gpt(tied=False), []
    stock, _ = own_step(model)
    shard(model, reshard)
    model.output_layer.register_forward_hook(lambda module, args, outputs: seen.append(outputs[0].mean()))
    with patched(chunk_size=3), pytest.warns(UserWarning, match=r"test_linear_ce_fsdp.py:\d+ asks for the logits"):
        loss, weights = own_step(model)
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
    loss.backward(weights)
    assert len(seen) == 1
    assert fusion_report().logits_made == 1


MEGATRONS = {
    "torch": ("torch", {"tied": False, "transformer_impl": "local"}, {}),
    "torch-kept": ("torch", {"tied": False, "transformer_impl": "local"}, {"reshard_after_forward": False}),
    "megatron": ("megatron", {}, {}),
    "megatron-untied": ("megatron", {"tied": False}, {}),
    "megatron-mtp": ("megatron", {"mtp_num_layers": 1}, {}),
}


@ranks(2)
@pytest.mark.parametrize("case", [case if case == "megatron" else pytest.param(case, marks=SLOW) for case in MEGATRONS])
def test_training_in_megatrons_wrappers(case):
    how, overrides, sharding = MEGATRONS[case]

    def train(patching, fuses=False):
        with model_parallel(), patching:
            chunks = tiny_gpt(**overrides)
            layer = chunks[0].output_layer
            layer.gradient_accumulation_fusion = fuses
            chunks = fully_sharded(chunks, how, **sharding)
            optimizer = make_optimizer(chunks, lr=1e-2, use_distributed_optimizer=how == "megatron")
            with counting_logits(layer) as made:
                steps = [train_step(chunks, optimizer, tokens_BS) for tokens_BS in tiny_batches(steps=3)]
            return torch.tensor(steps), len(made)

    stock, made = train(nullcontext())
    assert made
    fused, made = train(patched(chunk_size=3), fuses=how == "megatron")
    assert made == 0
    torch.testing.assert_close(fused[:, 0], stock[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(fused[:, 1], stock[:, 1], rtol=1e-5, atol=0)  # norms of gradients
