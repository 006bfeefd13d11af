"""Sharded checkpoints: written at one tensor-parallel size, read at others, by our layers and by Megatron's."""

import sys

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.tensor_parallel import layers as stock
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megatron_ext.tensor_parallel import layers as ours
from megatron_ext.tensor_parallel._layers.sharded_checkpoints import LayerPlacement
from tests.gpt import child_processes, model_parallel, tiny_config
from tests.ranks import ranks
from tests.tensor_parallel.sharded import build, numbers

D, N = 16, 24
FULL = {"column.weight": (N, D), "column.bias": (N,), "row.weight": (N, D), "row.bias": (N,), "table.weight": (N, D)}
AXES = {"column.weight": 0, "column.bias": 0, "row.weight": 1, "table.weight": 0}


def one_of_each(kind):
    options = {"package": {"ours": ours, "stock": stock}[kind], "config": tiny_config()}
    kinds = {"column": ("column", D, N), "row": ("row", D, N), "table": ("embedding", N, D)}
    return torch.nn.ModuleDict({name: build(*given, **options) for name, given in kinds.items()})


def expected(name):
    full = numbers(*FULL[name], seed=sum(map(ord, name)))
    if name not in AXES:
        return full
    size = parallel_state.get_tensor_model_parallel_world_size()
    return full.chunk(size, AXES[name])[parallel_state.get_tensor_model_parallel_rank()]


def sharded(model, kind, prefix, **options):
    # Megatron's layers cannot do without it.
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    given = {"metadata": metadata} if kind == "stock" else {}
    shards = {}
    for name, layer in model.items():
        shards.update(layer.sharded_state_dict(prefix=f"{prefix}.{name}.", **given, **options))
    return shards


@pytest.mark.slow
@ranks(4)
def test_written_at_one_size_read_at_another(tmp_path):
    """Ours and Megatron's layers write at TP 2, either read at TP 4 and 1. One file is shared, as writing is slow."""
    with model_parallel(tp=2):
        state = {}
        for writer in ("ours", "stock"):
            model = one_of_each(writer)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(expected(name))
            state.update(sharded(model, writer, writer))
        with child_processes():
            dist_checkpointing.save(state, str(tmp_path))

        # A table of 26 rows, padded otherwise than the 24 that were written: those are read.
        table = build("embedding", N + 2, D)
        read = dist_checkpointing.load(table.sharded_state_dict("ours.table."), str(tmp_path))["ours.table.weight"]
        full = numbers(N, D, seed=sum(map(ord, "table.weight")))
        start = table.vocab_start_index
        there = min(table.vocab_end_index, N) - start
        assert torch.equal(read[:there], full[start : start + there])
    for size in (4, 1):
        with model_parallel(tp=size):
            for writer, reader in (("ours", "ours"), ("ours", "stock"), ("stock", "ours")):
                model = one_of_each(reader)
                read = dist_checkpointing.load(sharded(model, reader, writer), str(tmp_path))
                model.load_state_dict({key.removeprefix(f"{writer}."): value for key, value in read.items()})
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter, expected(name)), (size, writer, reader, name)


@ranks(2, 4)
@pytest.mark.parametrize("offsets", [(), ((0, 1, 3),), ((0, 1, 3), (1, 0, 2))], ids=str)
def test_the_same_objects_as_megatrons_layers(offsets):
    with model_parallel(tp=2):
        ours, stock = (sharded(one_of_each(kind), kind, "any", sharded_offsets=offsets) for kind in ("ours", "stock"))
        assert ours.keys() == stock.keys()
        for key, a in ours.items():
            b = stock[key]
            assert type(a) is type(b)
            names = {
                ShardedTensor: "key dtype local_shape global_shape global_offset axis_fragmentations replica_id "
                "prepend_axis_num allow_shape_mismatch",
                ShardedObject: "key data global_shape global_offset replica_id",
            }[type(a)]
            for name in names.split():
                assert getattr(a, name) == getattr(b, name), (key, name)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        layer = one_of_each("ours")["row"]
        for metadata in (None, {}, {"dp_cp_group": group}):
            assert layer.sharded_state_dict(metadata=metadata)["bias"].replica_id == (
                0,
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_data_parallel_rank(),
            )


@ranks(2)
def test_each_copy_of_an_object_has_its_own_number():
    world, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    for number in (0, 1):
        place = LayerPlacement(((1, 0, 2), (0, 1, 3)), {"dp_cp_group": alone}, world, (number, 2))
        found = place.object("state", "layer._extra_state")
        assert found.replica_id == (0, 2 * rank + number, 0)
        assert (found.global_shape, found.global_offset) == ((3, 2), (1, 0))


@ranks(2, 4)
def test_parameters_that_fsdp2_cut_over_the_data_parallel_ranks():
    with model_parallel(tp=torch.distributed.get_world_size() // 2):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tp_group = parallel_state.get_tensor_model_parallel_group()
        mesh = DeviceMesh.from_group(group, "cpu")
        tensor = distribute_tensor(torch.zeros(N, D), mesh, [Shard(0)])
        for axis in (0, 1):
            ours = LayerPlacement((), None, tp_group).tensor(tensor, "w", axis)
            stock = make_tp_sharded_tensor_for_checkpoint(tensor, "w", axis, tp_group=tp_group, dp_cp_group=group)
            for name in ["local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"]:
                assert getattr(ours, name) == getattr(stock, name), (axis, name)


def test_without_megatron(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.core.dist_checkpointing.mapping", raising=False)
    layer = build("column", D, N)
    with pytest.raises(ValueError, match="megatron.core.dist_checkpointing is not imported"):
        layer.sharded_state_dict()
