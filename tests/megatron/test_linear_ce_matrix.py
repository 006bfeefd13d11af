"""The fused head in every layout that GPTModel knows: the loss and every gradient are those of Megatron's own head.

Runs with each Megatron-Core that `make test-versions` installs.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpt import loss_and_grads, model_parallel, seed_ranks, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron.patching import assert_same, patched
from tests.ranks import ranks


def compare(sizes: dict, *, spec=None, step=None, **overrides) -> None:
    """One forward and backward through Megatron's schedules and `finalize_model_grads`, with either head."""
    with model_parallel(**sizes):
        tokens = tiny_batches()[0]
        run = {} if step is None else {"step": step}
        seed_ranks()
        stock_loss, stock = loss_and_grads(tiny_gpt(spec, **overrides), tokens, **run)
        seed_ranks()
        with patched(chunk_size=3):
            fused_loss, fused = loss_and_grads(tiny_gpt(spec, **overrides), tokens, **run)
    assert fused_loss == pytest.approx(stock_loss, rel=1e-6)
    assert fused.keys() == stock.keys()
    for name, grad in stock.items():
        assert grad.any(), f"{name} has no gradient to compare"
    assert_same(fused, stock)


def packed_step(microbatches: Iterator[Tensor], model):
    """As `tests.gpt.forward_step`, with the micro-batch packed into one row of documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens_BS = next(microbatches)
    count, seq = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    first = seq // 2  # documents of two lengths: the first row is cut in two
    starts = torch.tensor([0, first, *range(seq, count * seq + 1, seq)], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=seq, max_seqlen_kv=seq
    )
    tokens, labels = tokens_BS[:, :-1].reshape(1, -1), tokens_BS[:, 1:].reshape(1, -1)
    positions = torch.arange(count * seq)[None]
    output = model(tokens, positions, None, labels=labels, packed_seq_params=packing)

    def loss(per_token: Tensor):
        assert per_token.shape == labels.shape
        mean = per_token.mean()
        return mean, mean.detach().clone()

    return output, loss


def our_spec(config, stage):
    from megatron_ext.megatron.layer_specs import gpt_block_spec

    return gpt_block_spec(config, stage)


TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@ranks(1)
@TIED
def test_tp1(tied):
    compare({}, tied=tied)


@ranks(2)
@TIED
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_tp2(tied, sequence_parallel):
    compare({"tp": 2}, tied=tied, sequence_parallel=sequence_parallel)


@ranks(2)
@TIED
def test_virtual_pipeline(tied):
    compare({"pp": 2, "vp": 2}, tied=tied, num_layers=4)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_multi_token_prediction(sequence_parallel):
    compare({"tp": 2}, sequence_parallel=sequence_parallel, mtp_num_layers=2)


@ranks(2)
def test_context_parallel():
    compare({"cp": 2}, spec=our_spec)


@ranks(2)
def test_packed():
    compare({"tp": 2}, spec=our_spec, step=packed_step, sequence_parallel=True)


@pytest.mark.slow
@ranks(4)
@TIED
def test_tp2_pp2(tied):
    compare({"tp": 2, "pp": 2}, tied=tied)


@pytest.mark.slow
@ranks(4)
def test_tp2_cp2():
    compare({"tp": 2, "cp": 2}, spec=our_spec, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.each_version
@ranks(2)
def test_multi_token_prediction_context_parallel():
    compare({"cp": 2}, spec=our_spec, mtp_num_layers=2)


@pytest.mark.slow
@pytest.mark.each_version
@ranks(2)
def test_multi_token_prediction_on_the_last_stage():
    compare({"pp": 2}, tied=False, weights="init", mtp_num_layers=1)
