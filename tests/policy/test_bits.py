"""`bits` and NeMo-RL's `batch_invariant_mode` in a worker's configuration."""

import os
from unittest import mock

import pytest
import torch

from megatron_ext.policy import DTensorPolicyWorker, LossInputType, MegatronPolicyWorker
from megatron_ext.policy.config import read_config
from megatron_ext.policy.losses import ClippedPGLoss
from tests.batch_invariant_mode import fixed_calls
from tests.policy.problems import ended, plain_log_probs, plain_model, shard, tiny_batch, tiny_config, tiny_model
from tests.ranks import ranks

pytestmark = pytest.mark.slow

MODEL = tiny_model(vocab_size=98)
WIDE = tiny_model(vocab_size=98, hidden_size=96, intermediate_size=160)  # products whose bits show
MODE = {"batch_invariant_mode": True}


def test_keys():
    for key in ("dtensor_cfg", "megatron_cfg"):
        for given, bits in (
            ({}, None),
            ({"bits": "tensor_parallel"}, "tensor_parallel"),
            ({key: MODE}, "batch"),
            ({key: {"batch_invariant_mode": False}}, None),
            ({key: MODE, "bits": "fast"}, "fast"),
        ):
            assert read_config(tiny_config(MODEL) | given, key).bits == bits
        with pytest.raises(ValueError, match="bits is 'exact': it must be one of 'fast', 'batch', 'tensor_parallel'"):
            read_config(tiny_config(MODEL, bits="exact"), key)


@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_every_pass_has_these_bits(backend):
    """Scores and steps: "batch" however it is asked for, "fast" where nothing is."""
    key = "megatron_cfg" if backend is MegatronPolicyWorker else "dtensor_cfg"
    data = tiny_batch(8)
    with torch.no_grad():
        expected = plain_log_probs(plain_model(MODEL), data)
    for given, fixed in (({}, False), ({"bits": "batch"}, True), ({key: MODE}, True)):
        with ended(backend(tiny_config(MODEL) | given, init_reference_model=False)) as worker:
            mine = shard(data, worker)
            with fixed_calls() as calls, mock.patch.dict(os.environ, MEGATRON_EXT_PROOF="off"):  # no sample is read
                found = worker.get_logprobs(mine)["logprobs"]
                assert len(calls) == (2 if fixed else 0)  # micro-batches of 4 rows
                worker.train(mine, ClippedPGLoss())
                assert len(calls) == (2 + 4 if fixed else 0)  # of 2
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_the_layers_keep_the_mode_too(backend):
    """A row's log-probabilities are the same bits in micro-batches of 8 rows, 2 and 1. Without it most processors have
    others."""
    key = "megatron_cfg" if backend is MegatronPolicyWorker else "dtensor_cfg"
    data = tiny_batch(8, positions=3)
    for given in ({}, {key: MODE}):
        with ended(backend(tiny_config(WIDE, bits="batch") | given, init_reference_model=False)) as worker:
            mine = shard(data, worker)
            found = [worker.get_logprobs(mine, micro_batch_size=rows)["logprobs"] for rows in (8, 2, 1)]
        assert not given or all(torch.equal(x, found[0]) for x in found[1:])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


class OfLogits:
    """A loss that reads logits."""

    input_type = LossInputType.LOGIT

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        raise AssertionError("no logits are made")


@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_bits_are_refused_where_a_loss_reads_logits(backend):
    said = 'bits is "batch", by that key or by batch_invariant_mode, and the loss'
    with ended(backend(tiny_config(MODEL, bits="batch"), init_reference_model=False)) as worker:
        with pytest.raises(ValueError, match=said):
            worker.train(shard(tiny_batch(8), worker), OfLogits())
