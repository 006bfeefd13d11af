"""Real Megatron-Core under the emulation: every way to shard and schedule a GPTModel trains the same model.

The reference is a loop in plain PyTorch around the unsharded model: no schedule, no data parallelism, AdamW.
"""

import functools
import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu import megatron_on_cpu
from tests.gpt import (
    EXPERTS,
    child_processes,
    data_parallel,
    fully_sharded,
    loss_and_grads,
    make_optimizer,
    model_parallel,
    seed_ranks,
    tiny_batches,
    tiny_gpt,
    train_step,
    train_steps,
)
from tests.megatron.language_models import tiny_hybrid
from tests.megatron_on_cpu.test_resume import DROPOUT
from tests.on_transformer_engine.models import plain_loss
from tests.programs import alone
from tests.ranks import ranks

pytestmark = pytest.mark.slow

STEPS = 6
LR = 3e-4
DEEP = {"num_layers": 4}
MOE = EXPERTS | {"moe_router_load_balancing_type": "none"}


def plain_train(model, batches) -> list[tuple[float, float]]:
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [p for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    steps = []
    for tokens_BS in batches:
        optimizer.zero_grad()
        loss = plain_loss(model, tokens_BS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def trainable(shard=data_parallel, **overrides):
    chunks = shard(tiny_gpt(**overrides))
    return chunks, make_optimizer(chunks, lr=LR, use_distributed_optimizer=shard is not torch_fsdp)


torch_fsdp = functools.partial(fully_sharded, how="torch")
megatron_fsdp = functools.partial(fully_sharded, how="megatron")


def assert_trains_like_plain(sizes: dict, overrides: dict, shard=data_parallel) -> None:
    """The losses, and the norms of the gradients, whose scale Adam alone would hide."""
    batches = tiny_batches(STEPS)
    with model_parallel():
        plain = {name: value for name, value in overrides.items() if name != "sequence_parallel"}
        expected = plain_train(tiny_gpt(**plain)[0], batches)
    with model_parallel(**sizes):
        chunks, optimizer = trainable(shard, **overrides)
        steps = [train_step(chunks, optimizer, tokens_BS) for tokens_BS in batches]
    losses, norms = torch.tensor(steps).unbind(1)
    expected_losses, expected_norms = torch.tensor(expected).unbind(1)
    torch.testing.assert_close(losses, expected_losses, rtol=2e-6, atol=0)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=0)


@ranks(1)
@pytest.mark.parametrize("overrides", [{}, {"tied": False}, DEEP, MOE], ids=["tied", "untied", "deep", "moe"])
def test_one_rank(overrides):
    assert_trains_like_plain({}, overrides)


TWO_RANKS = {
    "dp2": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sp": ({"tp": 2}, {"sequence_parallel": True}),
    "pp2": ({"pp": 2}, {}),
    "pp2-untied": ({"pp": 2}, {"tied": False}),
    "pp2-vp2": ({"pp": 2, "vp": 2}, DEEP),
    "ep2": ({"ep": 2}, MOE),
    # torch's FSDP2 asks for a mesh on CUDA, Megatron's for a reduction that scales, which gloo lacks.
    "torch": ({}, {"tied": False, "transformer_impl": "local"}, torch_fsdp),
    "megatron": ({}, {}, megatron_fsdp),
    "megatron-untied": ({}, {"tied": False}, megatron_fsdp),
    "megatron-mtp": ({}, {"mtp_num_layers": 1}, megatron_fsdp),
    "megatron-experts": ({}, MOE, megatron_fsdp),
}


@ranks(2)
@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks(case):
    assert_trains_like_plain(*TWO_RANKS[case])


@ranks(2)
def test_reductions_that_scale_what_is_sent():
    own = torch.arange(4.0) + 10 * dist.get_rank()
    with megatron_on_cpu():
        op = dist._make_nccl_premul_sum(0.25)
        everywhere, part = own.clone(), torch.empty(2)
        dist.all_reduce(everywhere, op=op)
        dist.reduce_scatter_tensor(part, own, op)
    expected = (2 * torch.arange(4.0) + 10) / 4
    assert torch.equal(everywhere, expected)
    assert torch.equal(part, expected.chunk(2)[dist.get_rank()])
    assert torch.equal(own, torch.arange(4.0) + 10 * dist.get_rank()), "what is scattered stays the caller's"


@ranks(2, rules="gloo")
def test_coalesced_all_gathers_under_way_together():
    """Gloo's own coalesced all-gather ruined the heap about once in 5,000 rounds of these."""
    own = [torch.arange(float(n)) + 100 * dist.get_rank() for n in (2, 6, 64, 3)]
    gathered = [torch.empty(2 * len(x)) for x in own]
    with megatron_on_cpu():
        started = []
        for pair in (0, 2):
            with dist.distributed_c10d._coalescing_manager(async_ops=True) as gathers:
                for i in (pair, pair + 1):
                    dist.all_gather_into_tensor(gathered[i], own[i])
            started.append(gathers)
        assert not any(isinstance(work, dist.Work) for gathers in started for work in gathers.works), "one by one"
        for gathers in started * 2:
            gathers.wait()
            assert all(work.is_completed() for work in gathers.works)
    for x, result in zip(own, gathered, strict=True):
        assert torch.equal(result, torch.cat([torch.arange(float(len(x))) + 100 * rank for rank in range(2)]))


FOUR_RANKS = {
    "tp2-dp2": ({"tp": 2}, {}),
    "tp2-pp2": ({"tp": 2, "pp": 2}, {}),
    "tp2-sp-pp2-vp2": ({"tp": 2, "pp": 2, "vp": 2}, {**DEEP, "sequence_parallel": True}),
}


@ranks(4)
@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks(case):
    assert_trains_like_plain(*FOUR_RANKS[case])


def own_shard(whole, parameter):
    """This rank's piece of the unsharded gradient."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(dist.get_world_size(), dim=parameter.partition_dim)[dist.get_rank()]


@ranks(2)
@pytest.mark.parametrize("overrides", [{}, {"tied": False}, {"mtp_num_layers": 1}], ids=["tied", "untied", "mtp"])
def test_every_gradient_of_tensor_parallel_two_is_that_of_one(overrides):
    check_gradients(lambda: tiny_gpt(**overrides), lambda: tiny_gpt(**overrides))


@ranks(2)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_hybrid_model_of_attention_and_mlp_layers(normalization):
    """The final norm, elsewhere Transformer Engine's, sums its gradients under sequence parallelism."""
    sequence = {"sequence_parallel": normalization == "LayerNorm"}
    check_gradients(
        lambda: [tiny_hybrid(normalization=normalization)],
        lambda: [tiny_hybrid(normalization=normalization, **sequence)],
    )


def check_gradients(whole, cut):
    """Loss and every gradient of the model that `cut` builds at tensor parallel 2 are those of `whole` at 1."""
    tokens_BS = tiny_batches()[0]
    with model_parallel():
        model = whole()[0]
        plain = plain_loss(model, tokens_BS)
        plain.backward()
    with model_parallel(tp=2):
        chunks = cut()
        loss, grads = loss_and_grads(chunks, tokens_BS, micro_batch=len(tokens_BS))
    torch.testing.assert_close(torch.tensor(loss), plain.detach(), rtol=1e-6, atol=0)
    expected = {f"0.{name}": p.grad for name, p in model.named_parameters()}
    assert grads.keys() == expected.keys()
    for (name, grad), parameter in zip(grads.items(), chunks[0].parameters(), strict=True):
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, own_shard(expected[name], parameter), rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.essential
@ranks(2)
def test_bfloat16_with_float32_main_weights():
    """Megatron's Float16Module, and the distributed optimizer's own weights, which it makes by the type of a tensor."""
    with megatron_on_cpu():
        from megatron.core.transformer.module import Float16Module

    batches = tiny_batches(STEPS)
    with model_parallel(tp=2):
        expected = train_steps(tiny_gpt(), batches, lr=LR)
        half = tiny_gpt(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
        chunks = data_parallel([Float16Module(half[0].config, half[0])])
        optimizer = make_optimizer(chunks, lr=LR, bf16=True, params_dtype=torch.bfloat16)
        losses = [train_step(chunks, optimizer, tokens_BS)[0] for tokens_BS in batches]
        main = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in half[0].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in main} == {torch.float32}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2**-8, atol=0)
    assert losses != expected


@ranks(2)
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    ],
    ids=["full", "selective"],
)
def test_recompute_draws_the_same_dropout(recompute):
    batches = tiny_batches(STEPS)
    with model_parallel(tp=2):
        kept = train_steps(tiny_gpt(**DROPOUT), batches, lr=LR)
        recomputed = train_steps(tiny_gpt(**DROPOUT, **recompute), batches, lr=LR)
        without = train_steps(tiny_gpt(), batches, lr=LR)
    assert recomputed == kept
    assert abs(without[0] - kept[0]) > 1e-4, "dropout is not on"


def state_of(chunks, optimizer, loading: bool) -> dict:
    """Weights and optimizer state as Megatron saves and loads them, in the format that fits other sizes."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    model = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(chunks)}
    reshardable = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", None)  # not before 0.15
    sharding = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}} if reshardable else {}
    return {**model, "optimizer": optimizer.sharded_state_dict(model["model0"], is_loading=loading, **sharding)}


@ranks(2)
@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=["dp2", "pp2"])
def test_run_saved_at_tp2_continues_at_other_sizes(tmp_path, sizes):
    """Weights and optimizer state: the losses go on as if nothing had happened."""
    with megatron_on_cpu():
        from megatron.core import dist_checkpointing

    batches = tiny_batches(6)
    with model_parallel(tp=2):
        chunks, optimizer = trainable(tied=False)
        for tokens_BS in batches[:3]:
            train_step(chunks, optimizer, tokens_BS)
        with child_processes():
            dist_checkpointing.save(state_of(chunks, optimizer, loading=False), str(tmp_path))
        expected = [train_step(chunks, optimizer, tokens_BS)[0] for tokens_BS in batches[3:]]
    with model_parallel(**sizes, seed=7):
        chunks, optimizer = trainable(tied=False)
        for parameter in chunks[0].parameters():
            parameter.data.fill_(0.5)  # nothing may survive but what is loaded
        loaded = dist_checkpointing.load(state_of(chunks, optimizer, loading=True), str(tmp_path))
        chunks[0].module.load_state_dict(loaded["model0"])
        optimizer.load_state_dict(loaded["optimizer"])
        losses = [train_step(chunks, optimizer, tokens_BS)[0] for tokens_BS in batches[3:]]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)


@ranks(2)
def test_groups_asked_for_on_nccl_are_gloo():
    with megatron_on_cpu():
        group = dist.new_group([0, 1], None, "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
        assert dist.get_backend(group) == "gloo"
        pieces = torch.tensor([2, 1])  # both ranks send two elements to rank 0, one to rank 1
        received = torch.empty(int(2 * pieces[dist.get_rank()]))
        sent = torch.arange(3.0) + 10 * dist.get_rank()
        own = pieces[dist.get_rank()].repeat(2)
        dist.all_to_all_single(received, sent, own, input_split_sizes=pieces, group=group)
        dist.destroy_process_group(group)
    assert received.tolist() == {0: [0, 1, 10, 11], 1: [2, 12]}[dist.get_rank()]


@ranks(2, rules="gloo")  # whose messages wait for ever the second time
def test_messages_may_be_waited_for_twice():
    with megatron_on_cpu():
        other = 1 - dist.get_rank()
        sent, received = torch.full((3,), float(dist.get_rank())), torch.empty(3)
        ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        works = dist.batch_isend_irecv(ops if other else ops[::-1])
        for _ in range(2):
            assert all(work.wait() for work in works)
        assert all(work.is_completed() for work in works)
        works = [dist.isend(received, other), dist.irecv(sent, other)]
        for work in works * 2:
            work.wait()
    assert received.tolist() == [other] * 3
    assert sent.tolist() == [dist.get_rank()] * 3


IMPORTED_FIRST = """
import os, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
import megatron.core.models.gpt, megatron.core.optimizer, megatron.core.distributed  # outside
from megatron_on_cpu import megatron_on_cpu

from tests.gpt import model_parallel, tiny_batches, tiny_gpt, train_steps

with megatron_on_cpu():
    dist.init_process_group("nccl", init_method="file://" + os.path.abspath(os.environ["STORE"]), rank=0, world_size=1)
with model_parallel():
    print(*train_steps(tiny_gpt(), tiny_batches(2), lr=3e-4))
dist.destroy_process_group()
"""


@ranks(1)
def test_megatron_may_be_imported_first(tmp_path):
    """Megatron's compiled functions, decorated outside the emulation, must not compile inside it."""
    environment = {**os.environ, "STORE": str(tmp_path / "store"), "PYTHONPATH": ":".join(sys.path)}
    done = alone("-c", IMPORTED_FIRST, env=environment)
    with model_parallel():
        expected = train_steps(tiny_gpt(), tiny_batches(2), lr=LR)
    torch.testing.assert_close([float(x) for x in done.stdout.split()], expected, rtol=1e-6, atol=0)


@ranks(1)
def test_draws_of_dropout_give_no_warnings():
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    with model_parallel():
        from megatron.core.tensor_parallel import random

        log = logging.getLogger(random.__name__)
        log.addHandler(handler)
        try:
            seed_ranks()
            with random.get_cuda_rng_tracker().fork():
                torch.nn.functional.dropout(torch.ones(4))
            log.warning("another")
        finally:
            log.removeHandler(handler)
    assert heard == ["another"]


@ranks(1)
def test_frequencies_of_yarn_are_those_of_megatron_on_the_host():
    with model_parallel():
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

        found, concentration = YarnRotaryEmbedding(8, scaling_factor=40, mscale_all_dim=1.0)(16)
        expected, expected_concentration = YarnRotaryEmbedding(
            8, scaling_factor=40, mscale_all_dim=1.0, use_cpu_initialization=True
        )(16)
    assert found.shape == (16, 1, 1, 8)
    assert torch.equal(found, expected)
    assert concentration == expected_concentration
