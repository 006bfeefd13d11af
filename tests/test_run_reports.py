"""Settings of the launcher, its news and its report, in this process."""

import logging
import threading
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from megatron_ext import run


def test_last_rank_speaks_on_stderr_or_in_a_file(tmp_path, capsys):
    run.say_on_last_rank("found")
    with (tmp_path / "file").open("w") as file:
        run.say_on_last_rank("elsewhere", file)
    assert tuple(capsys.readouterr()) == ("", "found\n")
    assert (tmp_path / "file").read_text() == "elsewhere\n"


def test_bits_and_tokens_that_count():
    for given, settings in {
        ("--bits", "tensor_parallel"): {"bits": "tensor_parallel"},
        ("--skip-ignored", "any"): {"skip_ignored": True},
        ("--skip-ignored", "40"): {"skip_ignored": 40},
        (): {},
    }.items():
        assert run._settings(run.command_line().parse_args([*given, "script.py"])) == settings


@pytest.mark.parametrize(
    "given, told",
    [
        (["--linear-ce", "script.py"], "--cpu is not given: put it before SCRIPT"),
        (["--linear-ce", "script.py", "--cpu"], "--cpu is not given, but behind SCRIPT, where it is the script's own:"),
        (["--cpu", "--linear-ce", "script.py"], ""),
    ],
)
def test_missing_or_misplaced_cpu_option_is_told(given, told, caplog, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    run._tell_of_cpu(run.command_line().parse_args(given))
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


@pytest.mark.parametrize("rank, shown", [(0, False), (1, True)])
def test_launcher_shows_news_of_the_last_rank(rank, shown, monkeypatch, capsys):
    ours = logging.getLogger("megatron_ext")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(ours, "hasHandlers", lambda: False)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(ours, name, [] if name == "handlers" else getattr(ours, name))
    run._show_news()
    logging.getLogger("megatron_ext.run").info("a model was met")
    assert ("megatron_ext: a model was met\n" in capsys.readouterr().err) == shown
    ours.manager._clear_cache()


def test_report_leaves_other_optimizer_hooks_alone(monkeypatch):
    """Torch goes over a table of hooks, from which none may be taken meanwhile."""
    from torch.optim import SGD
    from torch.optim import optimizer as torchs

    said = []
    monkeypatch.setattr(run, "say_on_last_rank", said.append)
    monkeypatch.setattr(torchs, "_global_optimizer_post_hooks", OrderedDict())
    run._report_after_first_step()
    steps = []
    torchs.register_optimizer_step_post_hook(lambda *_: steps.append(1))
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step()
    optimizer.step()
    assert (len(said), len(steps)) == (1, 2)


def test_memory_of_the_head_is_counted_beside_a_gpu_run(monkeypatch, capsys):
    """Counting takes another process, in a thread, so that no step waits for the count."""
    from torch.optim import SGD
    from torch.optim import optimizer as torchs

    from megatron_ext.megatron import fusion_report

    def count(command, **options):
        assert command[-5:] == ["megatron_ext.memory", *["--tokens", "8", "--hidden", "4"]]
        assert options["env"]["CUDA_VISIBLE_DEVICES"] == ""
        return SimpleNamespace(stdout="a table\nTimes on a GPU are not known here\n")

    report = fusion_report.FusionReport([fusion_report.ModelFusion("GPTModel", sizes="--tokens 8 --hidden 4")] * 2)
    monkeypatch.setattr(fusion_report, "fusion_report", lambda: report)
    monkeypatch.setattr(run.subprocess, "run", count)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torchs, "_global_optimizer_post_hooks", OrderedDict())
    before = set(threading.enumerate())
    run._report_after_first_step(on_cpu=True)
    run._report_after_first_step()
    SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    told = capsys.readouterr().err
    assert told.endswith("fused head: a table\n")
    assert told.count("a table") == 1  # none of the job on the CPU


MISSING = "Transformer Engine and Apex are not installed. Falling back to Torch optimizers."


@pytest.mark.parametrize(
    "message, category, shown",
    [
        (MISSING, UserWarning, False),
        ("`torch.distributed.all_gather_into_tensor` is deprecated. Please use", FutureWarning, False),
        ("Apex is not installed. Falling back to Torch Norm", UserWarning, False),
        ("the loss is NaN", UserWarning, True),
        ("`torch.load` will change", FutureWarning, True),
    ],
)
def test_what_megatron_says_in_every_job_on_a_cpu_is_not_shown(message, category, shown):
    with warnings.catch_warnings():
        warnings.resetwarnings()
        run._hush()
        with warnings.catch_warnings(record=True) as found:
            warnings.warn_explicit(message, category, "optimizer.py", 1, "megatron.core.optimizer")
        assert bool(found) == shown
        warnings.filterwarnings("always", "Transformer Engine")  # a user's
        with warnings.catch_warnings(record=True) as found:
            warnings.warn_explicit(MISSING, UserWarning, "optimizer.py", 1, "megatron.core.optimizer")
        assert found
