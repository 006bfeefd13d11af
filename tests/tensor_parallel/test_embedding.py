"""VocabParallelEmbedding against torch.nn.functional.embedding."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel.layers import VocabParallelEmbedding, padded_vocab_size
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, numbers, piece, world

V, D = 24, 16


def embedding(size=V, config=None, **options):
    def init(weight):
        weight.copy_(numbers(*weight.shape, seed=7))

    return VocabParallelEmbedding(size, D, init_method=init, config=config or Config(), tp_group=world(), **options)


def token_ids(*shape):
    ids = torch.randint(V, shape, generator=torch.Generator().manual_seed(1))
    ids.view(-1)[:3] = torch.tensor([0, V - 1, 0])  # both ends, and one twice
    return ids


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_output_and_gradient(sequence, deterministic, dtype):
    config = Config(params_dtype=dtype, deterministic_mode=deterministic)
    layer = embedding(config=config, reduce_scatter_embeddings=sequence)
    ids, table = token_ids(3, 8), numbers(V, D, seed=7, dtype=dtype)
    dy = numbers(3, 8, D, seed=2, dtype=dtype)
    with count_collectives() as forward:
        y = layer(ids)
    with count_collectives() as backward:
        y.backward(piece(dy.transpose(0, 1), 0) if sequence else dy)
    alone = dist.get_world_size() == 1
    assert (sum(forward.values()), sum(backward.values())) == ((0, 0) if alone else (1, int(sequence)))
    whole = F.embedding(ids, table)
    torch.testing.assert_close(y, piece(whole.transpose(0, 1), 0) if sequence else whole, rtol=0, atol=0)
    grads = []
    for kind in (dtype, torch.float64):
        leaf = table.to(kind).requires_grad_()
        grads.append(torch.autograd.grad(F.embedding(ids, leaf), leaf, dy.to(kind))[0])
    assert_as_good(layer.weight.grad, *(piece(grad, 0) for grad in grads))


@ranks(1, 2)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_shape_and_integer(shape, deterministic):
    layer, table = embedding(config=Config(deterministic_mode=deterministic)), numbers(V, D, seed=7)
    ids = torch.randint(V, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert torch.equal(layer(ids), F.embedding(ids, table))


@ranks(1, 2)
@pytest.mark.parametrize("wrong", [-1, V, 10**6])
def test_ids_outside_the_vocabulary_are_refused_at_every_size(wrong):
    """No zeros for some ranks and IndexErrors for others."""
    ids = token_ids(2, 4)
    ids[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"\[{wrong}\], outside \[0, {V}\)"):
        embedding()(ids)


@ranks(2, 4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_of_one_rank_alone_are_refused_on_every_rank(dtype, sequence):
    """Errors travel in the exchange that the call makes anyway, whichever rank it is and whichever token."""
    layer = embedding(config=Config(params_dtype=dtype), reduce_scatter_embeddings=sequence)
    good = token_ids(2, 4)
    for rank in range(dist.get_world_size()):
        for place, wrong in ((0, -1), (7, V)):
            ids, mine = good.clone(), rank == dist.get_rank()
            ids.view(-1)[place] = wrong if mine else 0
            said = rf"\[{wrong}\], outside" if mine else rf"outside \[0, {V}\) on another rank of tp_group"
            with count_collectives() as counts, pytest.raises(ValueError, match=said):
                layer(ids)
            assert counts.total() == 1
        layer(good).float().sum().backward()  # every rank is still here


@ranks(1, 2)
def test_what_are_no_ids():
    for wrong, said in ((torch.zeros(3), "torch.float32"), ([1, 2], "list"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"input_ is {said}: it must be a tensor that holds token ids"):
            embedding()(wrong)
    with pytest.raises(ValueError, match=r"input_ is \(4,\): with reduce_scatter_embeddings it must be \[batch"):
        embedding(reduce_scatter_embeddings=True)(torch.arange(4))


@ranks(4)
def test_uneven_vocabulary_names_the_padded_size():
    with pytest.raises(ValueError, match="num_embeddings is 25: .*pad it to 28"):
        embedding(25)
    assert embedding(padded_vocab_size(25, 4)).weight.shape == (7, D)


@ranks(1, 2)
def test_what_others_ask_of_it():
    for perform in (True, False):
        layer_config = Config(perform_initialization=perform)
        layer = embedding(config=layer_config)
        weight = layer.weight
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 1)
    share = V // dist.get_world_size()
    assert layer.num_embeddings_per_partition == share
    assert (layer.vocab_start_index, layer.vocab_end_index) == (share * dist.get_rank(), share * (dist.get_rank() + 1))
    assert repr(layer).startswith(f"VocabParallelEmbedding({V}, {D}, TP={dist.get_world_size()}, communication=")
    layer_config.no_sync_func = threading.Lock()  # a copy does not follow what Megatron sets there later
    clone = copy.deepcopy(layer)
    assert clone.tp_group is layer.tp_group
    assert vars(clone.weight) == vars(layer.weight)
    assert clone.weight.data_ptr() != layer.weight.data_ptr()
    assert list(layer.state_dict()) == ["weight"]
