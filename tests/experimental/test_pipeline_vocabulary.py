"""Embedding and lm head shared by all pipeline stages: losses, weights and checkpoints against Megatron's own."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.experimental import pipeline_vocabulary
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import pass_order
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Shape
from megatron_ext.experimental.pipeline_vocabulary.packed_messages import Marks
from megatron_ext.experimental.pipeline_vocabulary.schedule import estimated_times, sharing_of
from megatron_ext.megatron.fusion_report import counters_of
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.megatron.versions import megatron_version
from tests.gpt import (
    SEQUENCE,
    VOCAB,
    child_processes,
    data_parallel,
    forward_step,
    make_optimizer,
    model_parallel,
    ours_everywhere,
    run_schedule,
    seed_ranks,
    sharded_state,
    stock_spec,
    stored_tensors,
    tiny_batches,
    tiny_gpt,
    train_step,
)
from tests.megatron.language_models import hybrid_has_mtp, tiny_hybrid_chunks
from tests.ranks import ranks, shared_folder

STEPS = 20


@contextmanager
def shared(on: bool = True):
    """Models built inside share their vocabulary."""
    if on:
        pipeline_vocabulary.share_vocabulary()
    try:
        yield
    finally:
        pipeline_vocabulary.restore()


def whole_state(chunks) -> dict[str, torch.Tensor]:
    """All parameters of the model by their names in a checkpoint, put together from all ranks."""
    own = [
        (shard.key, shard.global_shape, shard.global_offset, shard.data.detach().clone(), shard.prepend_axis_num)
        for chunk in chunks
        for shard in stored_tensors(chunk)
    ]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    whole = {}
    for key, shape, offset, data, axes in (shard for rank in found for shard in rank):
        full = whole.setdefault(key, torch.full(shape, torch.nan))
        full[(*offset[:axes], *(slice(at, at + n) for at, n in zip(offset[axes:], data.shape, strict=True)))] = data
    return whole


def trained(
    sizes: dict,
    ours: bool,
    tied: bool,
    steps: int = STEPS,
    weights="names",
    spec=stock_spec,
    wrap=data_parallel,
    hybrid=False,
    step=forward_step,
    layers=nullcontext,
    **more,
):
    """The losses of some steps with what is logged of multi-token prediction, and the weights after them."""
    with model_parallel(**sizes), layers(), shared(ours):
        from megatron.core import parallel_state

        arguments = {"tied": tied, **more}
        chunks = tiny_hybrid_chunks(**arguments) if hybrid else tiny_gpt(spec, weights=weights, **arguments)
        seed_ranks()
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            assert getattr(weight, "allreduce", True)  # these models have no experts
        wrapped = wrap(chunks)
        # With a larger epsilon than usual Adam does not blow up the rounding of gradients that are 0, as of key biases.
        optimizer = make_optimizer(wrapped, lr=3e-3, adam_eps=1e-4)
        losses = [train_step(wrapped, optimizer, t, step=step)[0] for t in tiny_batches(steps=steps, batch=8)]
        evaluated = run_schedule(wrapped, tiny_batches(batch=8, seed=1)[0], step=step, forward_only=True)
        if ours and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            assert counters_of(chunks[-1]).losses_fused > steps
        return torch.tensor([*losses, evaluated, *logged()], dtype=torch.float64), whole_state(chunks)


def logged() -> list[float]:
    """Return the last stage's log of multi-token prediction: losses, and in newer versions acceptance counts."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    own = [
        number for _, value in sorted(tracker.items()) if isinstance(value, torch.Tensor) for number in value.tolist()
    ]
    found = max(collectives.all_gather_object(own, dist.group.WORLD), key=len)
    assert all(number > 0 for number in found), found
    return found


def parity(sizes: dict, tied: bool, **overrides) -> None:
    if overrides.get("hybrid") and overrides.get("mtp_num_layers") and not hybrid_has_mtp():
        pytest.skip("hybrid models have no multi-token prediction before Megatron-Core 0.17")
    if {*MTP, *RECOMPUTE} <= {*overrides} and megatron_version().startswith("0.18."):
        pytest.skip("0.18's own recomputation of these layers takes no padding_mask, which their forward gives it")
    stock, stock_weights = trained(sizes, False, tied, **overrides)
    ours, our_weights = trained(sizes, True, tied, **overrides)
    assert stock.std() > 1e-3, "the losses of a model that does not learn agree with anything"
    worst = ((ours - stock).abs() / stock).max()
    assert worst < 1e-6, f"relative difference {worst:.1e}\nstock {stock}\nours  {ours}"
    assert our_weights.keys() == stock_weights.keys()
    for name, weight in stock_weights.items():
        assert not our_weights[name].isnan().any(), f"{name} is not whole"
        error = (our_weights[name] - weight).norm() / weight.norm()
        limit = 5e-6 if name.endswith("bias") else 1e-6  # biases begin at 0
        assert error < limit, f"{name}: {error:.1e}"


def overlapped(chunks, at_the_end: bool = False) -> list:
    """Gradients are reduced over replicas while backward runs, or all when it ends (`align_grad_reduce`)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=2000)
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in wrapped]
    if at_the_end:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    if len(chunks) == 1:
        config.no_sync_func = config.no_sync_func[0]
        config.grad_sync_func = config.grad_sync_func and config.grad_sync_func[0]
    return wrapped


def of_any_length(microbatches, model):
    """A forward step whose micro-batches have 8 to 16 tokens a sequence."""
    tokens = next(microbatches)
    return forward_step(iter([tokens[:, : 9 + int(tokens[0, 0]) % 9]]), model)


VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "step": of_any_length}
FUSED = {"gradient_accumulation_fusion": True, "layers": ours_everywhere}  # Megatron's want kernels of Apex
MTP = {"mtp_num_layers": 2}
DEEP = {"num_layers": 4}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EACH_VERSION = (pytest.mark.slow, pytest.mark.each_version)


@ranks(2)
@pytest.mark.parametrize(
    "tied,sizes,overrides",
    [
        pytest.param(True, {"pp": 2}, {}, id="tied"),
        pytest.param(True, {"pp": 2}, {"weights": "init", **DROPOUT}, id="tied-init-dropout", marks=pytest.mark.slow),
        pytest.param(True, {"pp": 2, "vp": 2}, DEEP, id="tied-interleaved", marks=pytest.mark.slow),
        pytest.param(True, {"pp": 2}, {"hybrid": True}, id="hybrid-tied", marks=EACH_VERSION),
        pytest.param(False, {"pp": 2}, {"hybrid": True, "mtp_num_layers": 1}, id="hybrid-mtp", marks=pytest.mark.slow),
        pytest.param(True, {"pp": 2}, {**MTP, **RECOMPUTE}, id="tied-mtp-recompute", marks=pytest.mark.slow),
        pytest.param(False, {"pp": 2, "vp": 2}, {**MTP, **DEEP}, id="mtp-interleaved", marks=EACH_VERSION),
        pytest.param(True, {"pp": 2}, {**MTP, **VARIABLE}, id="tied-mtp-variable", marks=pytest.mark.slow),
        pytest.param(True, {"pp": 2}, {**VARIABLE, "steps": 2}, id="tied-variable"),
        pytest.param(True, {"pp": 2}, FUSED, id="tied-accumulation-fused", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(tied, sizes, overrides):
    parity(sizes, tied, **overrides)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "tied,sizes,overrides",
    [
        pytest.param(False, {"pp": 4}, DEEP, id="pp4"),
        pytest.param(True, {"pp": 4}, DEEP, id="pp4-tied"),
        pytest.param(False, {"pp": 2, "tp": 2}, {**DROPOUT}, id="pp2-tp2-dropout"),
        pytest.param(True, {"pp": 2, "tp": 2}, {**MTP, "sequence_parallel": True}, id="pp2-tp2-sp-tied-mtp"),
        pytest.param(False, {"pp": 2, "cp": 2}, {"spec": gpt_block_spec}, id="pp2-cp2"),
        pytest.param(False, {"pp": 2, "cp": 2}, {"mtp_num_layers": 1, "spec": gpt_block_spec}, id="pp2-cp2-mtp"),
        pytest.param(
            True, {"pp": 2}, {"wrap": overlapped}, id="pp2-dp2-tied-overlapped", marks=pytest.mark.each_version
        ),
        pytest.param(False, {"pp": 2}, {"wrap": partial(overlapped, at_the_end=True)}, id="pp2-dp2-reduced-at-the-end"),
        pytest.param(True, {"pp": 2, "vp": 2}, {"wrap": overlapped, **DEEP}, id="interleaved-dp2-tied-overlapped"),
    ],
)
def test_four_ranks(tied, sizes, overrides):
    parity(sizes, tied, **overrides)


@ranks(2)
@pytest.mark.parametrize("mtp_layers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_sent(mtp_layers):
    """Per micro-batch beyond stock 4 messages of the head and 3 of the embedding, and the weights' pieces are equal.

    With multi-token prediction 2 more of the embedding, whatever the number of its layers.
    """
    counts, sizes = {}, {}
    for micro_batches in (2, 4):
        with model_parallel(pp=2), shared():
            chunks = tiny_gpt(stock_spec, tied=False, mtp_num_layers=mtp_layers)
            wrapped = data_parallel(chunks)
            with count_collectives() as found:
                run_schedule(wrapped, tiny_batches(batch=2 * micro_batches)[0])
            counts[micro_batches] = found.copy()
            sizes = {name: tuple(p.shape) for name, p in chunks[0].named_parameters()}
    more = {name: (counts[4][name] - counts[2][name]) / 2 for name in counts[4]}
    sent = {name: number for name, number in more.items() if number and name not in ("send", "recv_", "recv")}
    # Token ids, hidden states, the losses' gradient, the embedding's gradient; embedding and dx; statistics.
    further = 1 if mtp_layers else 0  # the embedding for the last stage, and its gradient
    assert sum(number for name, number in sent.items() if "broadcast" in name) == 4 + further, sent
    assert sum(number for name, number in sent.items() if name.startswith("reduce")) == 2 + further, sent
    assert sum(number for name, number in sent.items() if "gather" in name) == 1, sent
    assert sum(sent.values()) == 7 + 2 * further, sent
    rows = (VOCAB // 2, 32)
    assert sizes["embedding.word_embeddings.weight"] == sizes["output_layer.weight"] == rows


@pytest.mark.slow
@ranks(2)
def test_fused_accumulation_goes_to_main_grad():
    asked = mock.patch.object(main_grad, "buffer_of", wraps=main_grad.buffer_of)
    with model_parallel(pp=2), ours_everywhere(), shared(), asked as buffer_of:
        (chunk,) = tiny_gpt(stock_spec, tied=False, gradient_accumulation_fusion=True)
        run_schedule(data_parallel([chunk]), tiny_batches(batch=4)[0])
    weight = chunk.output_layer.weight
    assert sum(call.args[0] is weight for call in buffer_of.call_args_list) == 2


@pytest.mark.essential
@ranks(2)
def test_passes_run_in_the_order_of_the_simulation():
    with model_parallel(pp=2), shared():
        wrapped = data_parallel(tiny_gpt(stock_spec))
        with pipeline_vocabulary.recorded() as found:
            run_schedule(wrapped, tiny_batches(batch=8)[0])
        shape = Shape(stages=2, chunks=1, micro_batches=4, group=4, beside=False)  # the CPU has one stream
        times = estimated_times(wrapped[0].config, shape, sharing_of(wrapped), SEQUENCE)
        assert [run.what for run in found] == [run.what for run in pass_order(shape, times)[dist.get_rank()]]
        # Each stage has seven kinds of passes, and the first the tokens, the last the losses.
        assert len(found) == 4 * 8


def run(sizes: dict, ours: bool, tied: bool, mtp: int | None, folder: str, load: bool, steps: slice) -> list[float]:
    """Some steps of one training, from the checkpoint in `folder` or into it."""
    with model_parallel(**sizes), shared(ours):
        from megatron.core import dist_checkpointing

        # Megatron's distributed optimizer stores wrong moments of tables this small, as it warns: bucket padding.
        wrapped = data_parallel(tiny_gpt(stock_spec, tied=tied, mtp_num_layers=mtp), distributed_optimizer=False)
        optimizer = make_optimizer(wrapped, lr=3e-3, adam_eps=1e-4, use_distributed_optimizer=False)

        def state(is_loading: bool) -> dict:
            weights = sharded_state(wrapped[0].module)
            return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading)}

        if load:
            read = dist_checkpointing.load(state(True), folder)
            wrapped[0].module.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])
        losses = [train_step(wrapped, optimizer, t)[0] for t in tiny_batches(steps=6, batch=8)[steps]]
        if not load:
            with child_processes():
                dist_checkpointing.save(state(False), folder)
        return losses


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("tied,mtp", [(True, None), pytest.param(False, 1, marks=pytest.mark.each_version)])
def test_checkpoints_go_both_ways(tied, mtp):
    """Checkpoints of a shared vocabulary go on in stock Megatron at another layout, and the reverse."""
    expected = trained({"pp": 2}, False, tied, steps=6, mtp_num_layers=mtp)[0][:6].tolist()
    for ours, reader in ((True, {"tp": 2}), (False, {"pp": 2})):
        folder = str(shared_folder())
        before = run({"pp": 2}, ours, tied, mtp, folder, load=False, steps=slice(0, 3))
        after = run(reader, not ours, tied, mtp, folder, load=True, steps=slice(3, 6))
        assert before + after == pytest.approx(expected, rel=1e-5)


def test_tensors_of_any_size_travel_in_one_message():
    """Each begins where a view of any dtype may, and the largest mark is kept."""
    sent = torch.arange(3, dtype=torch.bfloat16), torch.arange(5), torch.tensor([[0.5]]), torch.empty(0, 4)
    sender, receiver = Marks(torch.device("cpu")), Marks(torch.device("cpu"))
    sender.mark.fill_(3)
    buffer = sender.pack(*sent)
    received = receiver.unpack(buffer, [(tuple(x.shape), x.dtype) for x in sent])
    for was, came in zip(sent, received, strict=True):
        assert came.dtype == was.dtype
        assert torch.equal(came, was)
        assert (came.data_ptr() - buffer.data_ptr()) % 16 == 0
    assert int(receiver.mark) == 3
    receiver.mark.fill_(4)
    receiver.unpack(buffer, [(tuple(x.shape), x.dtype) for x in sent])
    assert int(receiver.mark) == 4
