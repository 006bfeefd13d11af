"""Parts of the backends by themselves: what a model is given, whole logits, and a model that moves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.groups import VocabShard
from megatron_ext.policy.backend.base import Backend, whole_vocabulary
from megatron_ext.policy.backend.megatron import Inputs
from megatron_ext.policy.config import read_config
from megatron_ext.policy.data.batch import Rows
from megatron_ext.policy.data.batch_plan import RankCoordinates
from megatron_ext.policy.megatron_model.layout import transformer_config
from megatron_ext.policy.refit.shared_memory import SharedBlock
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.policy.problems import tiny_config, tiny_model
from tests.ranks import ranks


def test_padded_rows_and_positions_are_numbered_from_0():
    tokens_BS = torch.arange(6).view(2, 3) + 1
    tokens, positions, mask = Inputs(tokens_BS, SequenceParts(None), (1, 2), {}).arguments
    assert tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [0] * 4, [0] * 4]
    assert positions.tolist() == [[0, 1, 2, 3]] * 4
    assert mask is None


def test_packed_rows_lie_end_to_end_each_in_a_multiple():
    data = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "input_lengths": torch.tensor([3, 1])}
    rows = Rows.of(data, pack=True, multiple=2)
    assert rows.tokens.tolist() == [[1, 2, 3, 0, 4, 0]]
    assert rows.cu_seqlens.tolist() == [0, 4, 6]
    assert rows.at_positions(rows.tokens).tolist() == data["input_ids"].tolist()
    assert rows.at_tokens(rows.tokens).tolist() == [[0, 1, 2], [0, 0, 0]]
    data |= {"token_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "sample_mask": torch.tensor([1, 1])}
    assert rows.labels_that_count(data).tolist() == [[1, 2, -100, -100, 4, -100]]


@pytest.mark.parametrize(
    "stages, virtual, messages",
    [(1, 1, (False, False, True)), (2, 1, (True, False, True)), (2, 2, (False, True, False))],
)
def test_megatron_sends_shapes_between_stages_that_are_whole(stages, virtual, messages):
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    settings = read_config(tiny_config() | {"megatron_cfg": sizes}, "megatron_cfg")
    found = transformer_config(settings, tiny_model(num_hidden_layers=4))
    assert (found.variable_seq_lengths, found.overlap_p2p_comm, found.batch_p2p_comm) == messages
    assert found.virtual_pipeline_model_parallel_size == (virtual if virtual > 1 else None)


@ranks(2)
def test_whole_logits_of_an_uneven_vocabulary_and_gradients():
    z = torch.arange(10.0).view(2, 5)
    vocab = VocabShard.split(5, dist.group.WORLD)
    own = z[:, vocab.start : vocab.stop].clone().requires_grad_()
    whole = whole_vocabulary(own, dist.group.WORLD, vocab)
    assert torch.equal(whole, z)
    assert whole.is_contiguous()
    weight = torch.tensor([[1.0, 2, 3, 4, 5]])
    (whole * weight).sum().backward()
    assert torch.equal(own.grad, weight[:, vocab.start : vocab.stop].expand(2, -1))


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_model_moves_unless_its_parameters_are_offloaded(offloaded):
    model = torch.nn.Linear(2, 2)
    backend = SimpleNamespace(model=model, settings=SimpleNamespace(cpu_offload=offloaded))
    Backend.move_model(backend, torch.device("meta"))
    assert model.weight.is_meta != offloaded


def test_shared_memory_without_linux_is_refused(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(OSError, match="weights in shared memory need Linux"):
        SharedBlock(4)


def test_ranks_without_copies_and_stages_are_data_parallel():
    found = RankCoordinates(dp_size=3)
    assert [found.replica(rank) for rank in range(3)] == list(found.first_ranks()) == [0, 1, 2]
