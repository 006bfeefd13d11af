import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import data
from tests.ranks import ranks


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "text": torch.randint(1 << 40, (3 + seed, 17), generator=g),
        "empty": torch.zeros(2, 0, 5, dtype=torch.int64),
        "scalar": torch.tensor(7),
        "deep": torch.randint(9, (1, 2, 1, 2, 1, 2, 3), generator=g),
        "strided": torch.randint(9, (4, 6), generator=g).t(),
    }


def same(got, expected):
    assert list(got) == list(expected)
    for key, x in expected.items():
        assert got[key].dtype == x.dtype, key
        assert torch.equal(got[key], x), key
        assert not got[key].requires_grad


@ranks(1, 2, 4)
def test_any_shapes():
    expected = batch()
    mine = batch() if dist.get_rank() == 0 else None
    with count_collectives() as counts:
        got = data.broadcast_data(list(expected), mine, torch.int64, tp_group=dist.group.WORLD)
    same(got, expected)
    assert sum(counts.values()) == counts["broadcast"] == (2 if dist.get_world_size() > 1 else 0)
    got["text"].zero_()
    assert mine is None or torch.equal(mine["text"], expected["text"]), "the caller's tensors are not shared"


@ranks(2)
def test_every_dtype_in_the_same_exchange():
    """Odd lengths between dtypes of different sizes: each must start where its dtype may."""
    dtypes = [
        torch.bool, torch.float64, torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.int32,
        torch.float16, torch.complex64, torch.int8,
    ]  # fmt: skip
    g = torch.Generator().manual_seed(0)
    expected = {str(dtype): torch.randint(2, (3,), generator=g).to(dtype) for dtype in dtypes}
    mine = expected if dist.get_rank() == 0 else {}
    got = data.broadcast_data(list(expected), mine, None, dist.group.WORLD)
    for key, x in expected.items():
        assert got[key].dtype == x.dtype
        assert torch.equal(got[key].view(torch.uint8), x.view(torch.uint8)), key


@ranks(2)
def test_nothing_to_send():
    with count_collectives() as counts:
        assert data.broadcast_data([], None, torch.int64, dist.group.WORLD) == {}
    assert not counts
    with count_collectives() as counts:
        got = data.broadcast_data(["x"], {"x": torch.zeros(0, 3)}, torch.float32, dist.group.WORLD)
    assert got["x"].shape == (0, 3)
    assert sum(counts.values()) == 1


@ranks(4)
def test_the_groups_first_rank_is_the_source():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expected = batch(seed=rank // 2)
    mine = expected if rank % 2 == 0 else batch(seed=99)
    same(data.broadcast_data(list(expected), mine, torch.int64, tp_group=groups[rank // 2]), expected)
    shapes, numel, total = data._build_key_size_numel_dictionaries(["text", "scalar"], mine, groups[rank // 2])
    rows = 3 + rank // 2
    assert shapes == {"text": (rows, 17), "scalar": ()}
    assert numel == {"text": 17 * rows, "scalar": 1}
    assert total == 17 * rows + 1


GOOD = {"a": torch.zeros(2, dtype=torch.int64), "b": torch.ones(3, dtype=torch.int64)}
FAULTS = {
    "missing": ({"a": GOOD["a"]}, "data lacks 'b', which keys asks for"),
    "no data": (None, "data lacks 'a', which keys asks for"),
    "dtype": (GOOD | {"b": torch.zeros(2)}, r"data\['b'\] is torch.float32: it must be torch.int64"),
    "no tensor": (GOOD | {"b": [1, 2]}, r"data\['b'\] is no dense tensor"),
    "sparse": (GOOD | {"b": torch.eye(2, dtype=torch.int64).to_sparse()}, r"data\['b'\] is no dense tensor"),
    "no values": (GOOD | {"b": GOOD["b"].to("meta")}, r"data\['b'\] is no dense tensor"),
    "dims": (GOOD | {"b": torch.zeros([1] * 65, dtype=torch.int64)}, r"data\['b'\] has more than 64 dims"),
}


@ranks(1, 2, 4)
@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_first_rank_sees_the_fault_and_all_raise_it(fault):
    bad, message = FAULTS[fault]
    mine = bad if dist.get_rank() == 0 else GOOD
    with pytest.raises(ValueError, match=message):
        data.broadcast_data(["a", "b"], mine, torch.int64, dist.group.WORLD)
    # and the group is as good as before
    mine = GOOD if dist.get_rank() == 0 else None
    same(data.broadcast_data(["a", "b"], mine, torch.int64, dist.group.WORLD), GOOD)


def test_alone():
    expected = batch()
    for keys in (list(expected), expected.keys(), iter(expected)):
        same(data.broadcast_data(keys, expected, torch.int64), expected)
    assert data._build_key_size_numel_dictionaries(iter(["text"]), expected)[2] == 51
    data._check_data_types(["text"], expected, torch.int64)
    with pytest.raises(ValueError, match=r"data\['text'\] is torch.int64: it must be torch.float32"):
        data._check_data_types(["text"], expected, torch.float32)
