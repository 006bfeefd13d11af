"""Outcomes of test bodies that run on ranks."""

import os
import subprocess
import sys

import pytest

from tests.ranks import ranks


@ranks(2)
def skipped_on_all():
    pytest.skip("of no use here")


@ranks(2)
def skipped_on_one():
    import torch.distributed as dist

    if dist.get_rank():
        pytest.skip("of no use on rank 1")


def test_skip_of_all_ranks_is_a_skip_and_of_one_a_failure():
    with pytest.raises(pytest.skip.Exception, match="of no use here"):
        skipped_on_all(world_size=2)
    with pytest.raises(pytest.fail.Exception, match="of no use on rank 1"):
        skipped_on_one(world_size=2)


@ranks(2)
def test_ranks_have_hash_seeds_of_their_own():
    """Sets have other orders on each rank, as under torchrun, so that tests find code that relies on an order."""
    import torch.distributed as dist

    names = {"gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    orders = [None, None]
    dist.all_gather_object(orders, [hash(name) for name in sorted(names)])
    assert orders[0] != orders[1]


def send_triton_interpret(connection, rank):
    connection.send(os.environ.get("TRITON_INTERPRET"))


def test_interpreting_process_has_interpreted_ranks():
    """Also where ranks of the run that started it, which do not interpret, are there already."""
    names = "from tests.rank_servers import begin_run, fork; from tests.test_ranks import send_triton_interpret, sys"
    ask = 'begin_run(); sys.exit(fork(1, send_triton_interpret)[0].connection.recv() == "1")'
    for value, interpreted in (("0", 0), ("1", 1)):
        command = [sys.executable, "-c", f"{names}; {ask}"]
        # Its output is not captured: the ranks' server would hold the pipe open.
        assert subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": value}).returncode == interpreted
