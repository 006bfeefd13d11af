"""`python -m megatron_ext.memory`: bytes and times as the benchmarks measure them, and sizes as jobs give them."""

import importlib.util
import re
import sys
from functools import partial

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.implementations import UNFUSED
from benchmarks.implementations import ours as measured
from benchmarks.meter import measure
from benchmarks.plan import A, B, measured_rows, plan
from megatron_ext import __main__ as programs
from megatron_ext import linear_cross_entropy, run
from megatron_ext.memory import __main__, step_time
from megatron_ext.memory.__main__ import main, rows
from megatron_ext.memory.heads import megatron, ours, peak_bytes, transformers
from megatron_ext.memory.sizes import Sizes
from megatron_ext.memory.step_time import GPUS, PERCENT, LaunchCounter
from tests.marks import slow
from tests.pages import DOCS

SMALL = Sizes(512, 64, 4096)


def test_bytes_are_those_of_real_tensors_on_a_cpu():
    """The meter of the benchmarks sees each tensor on a machine without CUDA."""
    x, w = torch.randn(512, 64).requires_grad_(), torch.randn(4096, 64).requires_grad_()
    labels = torch.randint(4096, (512,))
    for cache in ("bounded", 1.0, 0.0):
        with measure() as costs:
            loss = linear_cross_entropy(x, w, labels, cache=cache)
            torch.autograd.grad(loss, [x, w], torch.ones(512))
        counted = peak_bytes(Sizes(512, 64, 4096, dtype=torch.float32), partial(ours, cache), on_cuda=False)
        assert counted == pytest.approx(costs.peak_bytes, rel=1e-3)  # checks of labels' values aside


@pytest.mark.parametrize("ranks", [1, 4])
def test_bytes_as_on_cuda_are_those_of_the_plan(ranks):
    case = Case("small", 512, 64, 4096, ranks, torch.bfloat16)
    sizes = Sizes(512, 64, 4096, ranks)
    assert plan(case, measured(0))[1] == pytest.approx(peak_bytes(sizes, partial(ours, 0)), abs=4 * 512)
    assert plan(case, measured(1))[1] == pytest.approx(peak_bytes(sizes, partial(ours, 1)), abs=4 * 512)
    if ranks == 1:
        assert plan(case, UNFUSED)[1] == pytest.approx(peak_bytes(sizes, megatron), abs=4 * 512)


def test_stock_of_transformers_holds_logits_in_fp32():
    assert peak_bytes(SMALL, transformers) >= 512 * 4096 * (2 + 4 + 4)


def test_sequence_parallel_heads_are_counted():
    sizes = Sizes(4096, 64, 32768, 4, sequence_parallel=True)
    assert peak_bytes(sizes, partial(ours, 0)) < peak_bytes(sizes, megatron)


def test_table_has_a_row_for_each_cache():
    lines = "\n".join(rows(SMALL, ["bounded", 0.5]))
    found = re.findall(r"^(\S+(?:, cache=\S+)?) +([\d.]+) MiB +(\d+)%$", lines, re.M)
    assert [name for name, *_ in found] == [
        "Megatron-Core",
        "transformers",
        "megatron_ext, cache=bounded",
        "megatron_ext, cache=0.5",
    ]
    assert found[0][2] == "100"


@pytest.mark.parametrize("case", [A, *slow(B)], ids="AB")
def test_times_are_those_measured_on_an_h200(case):
    """One rank's shard, as the rows were measured."""
    sizes = Sizes(case.tokens, case.width, case.columns)
    heads = {UNFUSED.name: megatron, "ours, default": partial(ours, "bounded")}
    heads |= {measured(cache).name: partial(ours, cache) for cache in (1, 0.5, 0)}
    for name, build in heads.items():
        (row,) = measured_rows(case, name, GPUS["h200"])
        launches = LaunchCounter(GPUS["h200"])
        peak_bytes(sizes, build, launches=launches)
        assert launches.seconds * 1e3 == pytest.approx(row.p50, rel=PERCENT / 100), name


@pytest.mark.parametrize(
    "options, said, times",
    [
        ("--tokens 8192 --gpu h200", f"within {PERCENT} % of those measured on one", "ms"),
        ("--tokens 8192 --gpu h100 --tp 2", "no head has been measured on one; rates are from its data sheet", "ms"),
        ("--tokens 8192 --tp 2 --gpu h200", "what ranks send each other is not in it", "ms"),
        ("--tokens 64 --gpu h200", "A time is unknown where products are less than half of it", "unknown"),
        ("--tokens 8192 --gpu h200 --dtype fp32", "Times are not known in fp32", "MiB"),
        ("--tokens 8192", "Times on a GPU are not known here; --gpu h100 or --gpu h200", "MiB"),
    ],
)  # fmt: skip
def test_times_are_told_with_their_error_or_as_unknown(options, said, times, capsys, monkeypatch):
    monkeypatch.setattr(__main__, "stock", lambda sizes: {})
    main([*["--hidden", "4096", "--vocab", "128256", "--cache", "1"], *options.split()])
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.splitlines()[1].endswith(times)


@pytest.mark.parametrize("name, known", [("NVIDIA H200", True), ("NVIDIA H100 PCIe", False), ("NVIDIA B200", False)])
def test_times_of_the_gpu_here_need_its_exact_name(name, known, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: name)
    assert (step_time.gpu_here()[0] is not None) == known


def test_what_is_not_installed_is_told_with_its_remedy(monkeypatch, capsys):
    found = importlib.util.find_spec
    lacking = {"megatron", "transformers", "triton"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in lacking else found(name, *a))
    given = ["--tokens", "8", "--hidden", "8", "--vocab", "64", "--cache", "0"]
    main(given)
    said, before = capsys.readouterr()
    assert "Counted as on a CPU" in said
    assert "A GPU takes somewhat more or less: to count what it takes, pip install triton" in said
    assert before == "Counting as on a CPU, which takes up to a minute\n"
    assert "pip install megatron-core" in said
    assert "%" not in said  # of what another package takes
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--device", "cuda"])
    assert "--device cuda counts Triton's kernels, and Triton is not installed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--gpu", "h200"])
    assert capsys.readouterr().err.endswith("--gpu is h200, and a CPU's run is counted: pip install triton\n")


def test_megatron_arguments_give_the_sizes(capsys):
    """Megatron pads 4000 words to a multiple of 128 times the ranks."""
    given = "--cache 0 --megatron pretrain_gpt.py --num-layers 2 --hidden-size 64 --seq-length 128 --micro-batch-size 4"
    given += " --vocab-size=4000 --tensor-model-parallel-size 4 --sequence-parallel --bf16 --lr 1e-4"
    programs.main(["memory", *given.split()])
    said = capsys.readouterr().out
    assert said.startswith("says nothing of the head's sizes, ignored: --num-layers --lr\n")
    assert "512 tokens, hidden size 64, vocabulary 4096 over 4 ranks, sequence parallel, bf16:" in said


def test_config_of_transformers_gives_the_sizes(tmp_path, capsys):
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=4096, hidden_size=64, dtype="float16").save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--tokens", "512", "--cache", "0"])
    assert "512 tokens, hidden size 64, vocabulary 4096 over 1 rank, fp16:" in capsys.readouterr().out


def test_code_of_a_model_folder_is_never_run(tmp_path, capsys, monkeypatch):
    """Transformers would ask on the terminal, where somebody may say yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}')
    (tmp_path / "mine.py").write_text("raise SystemError('run')")
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(tmp_path), "--tokens", "512"])
    assert "its own code is never run: pass --hidden and --vocab instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, said",
    [
        ("--tokens 8", "sizes are missing: pass --hidden, --vocab"),
        ("--tokens 8 --hidden 8 --vocab 0", "--vocab is 0: it must be at least 1"),
        ("--tokens 8 --hidden 8 --vocab 9 --tp 2", "--vocab is 9: it must be a multiple of --tp, 2"),
        ("--tokens 9 --hidden 8 --vocab 8 --tp 2 --sequence-parallel", "--tokens is 9: with sequence parallelism"),
        ("--cache auto", "'auto' must be a fraction from 0 to 1, a number of bytes, or bounded"),
        ("--model /nowhere", "--model is '/nowhere', whose config cannot be read"),
        ("--megatron --hidden-size wide", "--megatron: argument --hidden-size: invalid int value: 'wide'"),
        ("--megatron --hidden-size 64 --seq-length 8", "sizes are missing: pass --vocab"),
        ("--tokens 8 --hidden 8 --vocab 64 --gpu h100 --device cpu", "run is counted: leave out --device cpu\n"),
    ],
)
def test_wrong_arguments_are_told(given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_count_by_another_process_may_fail(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert run.counted_memory("--tokens 8") == ""


@pytest.mark.slow
def test_another_process_counts_what_this_one_does():
    found = run.counted_memory("--tokens 512 --hidden 64 --vocab 4096 --cache 0.5")
    assert found == "\n".join(rows(SMALL, [0.5]))


def test_page_shows_the_table_that_is_printed():
    section = (DOCS / "faq.md").read_text().partition("## What do I gain")[2].partition("\n## ")[0]
    shown = section.partition("```text\n")[2].partition("```")[0]
    assert shown == "\n".join(rows(Sizes(8192, 4096, 128256), gpu=GPUS["h200"])) + "\n"
