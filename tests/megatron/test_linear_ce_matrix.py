"""The fused head in every layout that GPTModel knows: the loss and every gradient are those of Megatron's own head.

Runs with each Megatron-Core that `make test-versions` installs.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.megatron.layer_specs import gpt_block_spec
from tests.gpt import loss_and_grads, model_parallel, seed_ranks, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron.patching import assert_same, packing, patched
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
    """Do as `tests.gpt.forward_step`, with the micro-batch packed into one row of documents."""
    tokens_BS = next(microbatches)
    count, seq = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    first = seq // 2  # documents of two lengths: the first row is cut in two
    documents = packing(0, first, *range(seq, count * seq + 1, seq))
    tokens, labels = tokens_BS[:, :-1].reshape(1, -1), tokens_BS[:, 1:].reshape(1, -1)
    positions = torch.arange(count * seq)[None]
    output = model(tokens, positions, None, labels=labels, packed_seq_params=documents)

    def loss(per_token: Tensor):
        assert per_token.shape == labels.shape
        mean = per_token.mean()
        return mean, mean.detach().clone()

    return output, loss


OURS = {"spec": gpt_block_spec}
SEQUENCE = {"sequence_parallel": True}
UNTIED = {"tied": False}
DEEP = {"num_layers": 4}
MTP = {"mtp_num_layers": 2}
EACH_VERSION = (pytest.mark.slow, pytest.mark.each_version)


@ranks(1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tp1(tied):
    compare({}, tied=tied)


@ranks(2)
@pytest.mark.parametrize(
    "sizes,overrides",
    [
        ({"tp": 2}, SEQUENCE),
        ({"tp": 2}, SEQUENCE | UNTIED),
        *slow(({"tp": 2}, {}), ({"tp": 2}, UNTIED)),
        ({"pp": 2, "vp": 2}, DEEP),
        ({"pp": 2, "vp": 2}, DEEP | UNTIED),
        ({"tp": 2}, MTP | SEQUENCE),
        *slow(({"tp": 2}, MTP)),
        ({"cp": 2}, OURS),
        ({"tp": 2}, OURS | SEQUENCE | {"step": packed_step}),
        pytest.param({"cp": 2}, OURS | MTP, marks=EACH_VERSION),
        pytest.param({"pp": 2}, UNTIED | {"weights": "init", "mtp_num_layers": 1}, marks=EACH_VERSION),
    ],
    ids="-".join,
)
def test_two_ranks(sizes, overrides):
    compare(sizes, **overrides)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize(
    "sizes,overrides",
    [({"tp": 2, "pp": 2}, {}), ({"tp": 2, "pp": 2}, UNTIED), ({"tp": 2, "cp": 2}, OURS | SEQUENCE)],
    ids="-".join,
)
def test_four_ranks(sizes, overrides):
    compare(sizes, **overrides)
