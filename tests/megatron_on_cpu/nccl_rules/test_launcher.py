"""`megatron_ext.run --cpu --nccl-rules`: a script that takes GPUs for granted, with the rules that GPUs would have."""

import textwrap

import pytest

from megatron_ext import run
from tests.programs import python
from tests.test_run import report_of

pytestmark = pytest.mark.slow

EXCHANGE = """
    import os, sys, torch, torch.distributed as dist
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if "eager" in sys.argv else None)
    rank = dist.get_rank()
    names = [None, None]
    dist.all_gather_object(names, f"rank {rank}")
    assert names == ["rank 0", "rank 1"]
    group = dist.new_group(backend="nccl")
    x, y = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    works = [dist.irecv(y, 1 - rank, group=group), dist.isend(x, 1 - rank, group=group)]  # line 11
    for work in works:
        work.wait()
    assert y.tolist() == [1 - rank] * 4
"""


def start(tmp_path, source, *options, arguments=()):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source).lstrip())
    return python("-m", "megatron_ext.run", "--cpu", *options, script, *arguments, ranks=2, ignore_warnings=True)


def test_a_script_that_would_hang(tmp_path):
    assert start(tmp_path, EXCHANGE).returncode == 0
    lazy = start(tmp_path, EXCHANGE, "--nccl-rules")
    assert lazy.returncode != 0
    assert "these ranks wait for each other in a circle" in lazy.stderr
    assert "script.py:11 in <module>" in lazy.stderr
    assert "(ranks 0, 1), in launch order:\n    runs  recv from rank" in lazy.stderr
    assert " 0:1 (ranks" in lazy.stderr
    eager = start(tmp_path, EXCHANGE, "--nccl-rules", arguments=["eager"])
    assert "these ranks wait for each other in a circle" in eager.stderr
    assert " 0:1 (ranks" not in eager.stderr


def test_a_pretraining_script(tmp_path):
    """Tensor and data parallelism, Megatron's optimizer and checkpoints: the same losses as over gloo."""
    losses = [report_of(tmp_path, "--linear-ce", *options, ranks=2)["losses"] for options in ((), ("--nccl-rules",))]
    assert losses[0] == losses[1]


def test_on_gpus_nccl_sees_to_its_rules(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SystemExit):
        run.main(["--nccl-rules", str(script)])
    assert "add --cpu" in capsys.readouterr().err
