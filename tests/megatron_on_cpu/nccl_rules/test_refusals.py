"""Refusals of NCCL's group before anything is sent, also of calls that gloo takes."""

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu.nccl_rules import NcclRules
from tests.ranks import ranks

pytestmark = pytest.mark.slow

RULES = NcclRules()


def message(x, source=0):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, source)


PASS_ON_GLOO = {
    "message of int16": (lambda: message(torch.ones(3).short()), TypeError, "torch.int16 was given; NCCL has"),
    "column": (
        lambda: dist.broadcast(torch.ones(4, 4)[:, :1], 0),
        ValueError,
        r"strides \[4, 1\] was given; NCCL takes contiguous tensors: call .contiguous",
    ),
    "bitwise": (
        lambda: dist.all_reduce(torch.ones(2).int(), dist.ReduceOp.BAND),
        ValueError,
        "ReduceOp.BAND is a reduction that NCCL does not have",
    ),
    "from any rank": (
        lambda: message(torch.ones(2), source=None),
        NotImplementedError,
        "NCCL receives only from a named rank",
    ),
    "objects": (lambda: dist.all_gather_object([None, None], "rank"), RuntimeError, "torch.cuda.set_device"),
    "monitored": (dist.monitored_barrier, ValueError, "GLOO|gloo"),  # torch itself
}


@pytest.mark.parametrize("name", PASS_ON_GLOO)
@ranks(2, rules="gloo")
def test_passes_on_gloo(name):
    program, *_ = PASS_ON_GLOO[name]
    program()


def refuses(programs):
    for name, (program, kind, text) in programs.items():
        try:
            with pytest.raises(kind, match=text):
                program()
        except BaseException as error:
            raise AssertionError(name) from error
    dist.barrier()  # nothing was sent, so the ranks go on


@ranks(2, rules=RULES)
def test_refused():
    receives = dist.get_rank() == 1
    refuses({name: case for name, case in PASS_ON_GLOO.items() if receives or name != "from any rank"})


REFUSED = {
    "message of a column": (lambda: dist.send(torch.ones(3, 2)[:, 0], 1 - dist.get_rank()), ValueError, "contiguous"),
    "float8 sum": (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fnuz)), TypeError, "float8"),
    "average of booleans": (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        TypeError,
        "AVG of booleans",
    ),
    "sparse": (lambda: dist.all_reduce(torch.eye(2).to_sparse()), (ValueError, RuntimeError), "layout"),
    "output of the wrong size": (
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(2)),
        ValueError,
        "5 elements; it needs 2 times the 2",
    ),
    "input that does not divide": (
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)),
        ValueError,
        "5 elements; it needs 2 times the 2",
    ),
    "splits that do not add up": (
        lambda: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 2], [2, 2]),
        ValueError,
        r"output_split_sizes=\[1, 2\] must add up to the 4 rows",
    ),
    "rows that do not divide": (
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)),
        ValueError,
        "3 rows do not divide by 2 ranks",
    ),
    "uneven gather": (
        lambda: dist.gather(torch.empty(2), [torch.empty(2), torch.empty(3)], dst=dist.get_rank()),
        ValueError,
        r"each output must have the shape \[2\]",
    ),
    "uneven scatter": (
        lambda: dist.scatter(torch.empty(2), [torch.empty(2), torch.empty(3)], src=dist.get_rank()),
        ValueError,
        r"each input must have the shape \[2\]",
    ),
    "all-gather of coalesced lists": (
        lambda: dist.all_gather_coalesced([[torch.empty(2)], [torch.empty(2)]], [torch.ones(2)]),
        NotImplementedError,
        "use all_gather",
    ),
}


@ranks(2, rules=RULES)
def test_refused_by_any_rank_alone():
    refuses(REFUSED)


@ranks(2, rules=NcclRules(device_is_set=True))
def test_objects_with_a_device():
    found = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": 0}, {"rank": 1}]
    box = [dist.get_rank()]
    dist.broadcast_object_list(box, src=1)
    assert box == [1]
    box = [None]
    dist.scatter_object_list(box, [["a"], ["b"]] if dist.get_rank() == 0 else None, src=0)
    assert box == [["ab"[dist.get_rank()]]]


@ranks(2, rules=RULES)
def test_objects_with_a_device_of_their_own():
    box = [dist.get_rank()]
    dist.broadcast_object_list(box, src=1, device=torch.device("cpu"))
    assert box == [1]


@ranks(2, rules=RULES)
def test_tags_are_ignored():
    """gloo delivers by tag; here the first message meets the first receive."""
    if dist.get_rank() == 0:
        for tag, value in ((1, 10.0), (2, 20.0)):
            dist.send(torch.tensor([value]), 1, tag=tag)
    else:
        x, y = torch.empty(1), torch.empty(1)
        dist.recv(x, 0, tag=2)
        dist.recv(y, 0, tag=1)
        assert (x.item(), y.item()) == (10.0, 20.0)


@ranks(2, rules=RULES)
def test_every_method_of_a_group_is_ours_or_refused():
    """The group has no backend to which C++ could hand a call, so nothing runs on gloo unseen."""
    group = dist.group.WORLD
    with pytest.raises(RuntimeError, match="No backend"):
        group._get_backend(torch.device("cpu"))
    torch_only = {
        name
        for name in vars(dist.ProcessGroup)
        if not name.startswith("__") and name not in vars(type(group)) and callable(vars(dist.ProcessGroup)[name])
    }
    for base in type(group).__mro__[1:-1]:
        if base.__module__.startswith("megatron_on_cpu"):
            torch_only -= vars(base).keys()
    # What asks or sets something, or is about backends, which there are none of; nothing that sends.
    harmless = {
        "rank size name boxed unbox BackendType set_timeout get_group_store split_group merge_remote_group",
        "_get_backend_name _backend_id _get_backend _set_default_backend _register_backend _set_group_name",
        "_set_group_desc _has_hooks _wait_for_pending_works _set_sequence_number_for_group",
        "_get_sequence_number_for_group _register_on_completion_hook _enable_collectives_timing _pybind11_conduit_v1_",
        "_id",
    }
    assert torch_only <= {name for line in harmless for name in line.split()}, torch_only
