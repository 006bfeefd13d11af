"""The recipe of Llama-3 8B: its command for 8 GPUs, and the same script at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import EXAMPLES
from tests.ranks import TIMEOUT_S

ROOT = EXAMPLES.parent
RECIPE = EXAMPLES / "pretrain_llama3_8b.sh"


def recipe(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """The finished script, whose torchrun is the one in `cwd`, or else that of this Python."""
    path = os.pathsep.join([str(cwd), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {name: value for name, value in os.environ.items() if name not in ("MEGATRON_LM", "DATA", "TOKENIZER")}
    environment = given | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [str(RECIPE), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture
def said(tmp_path):
    """Gives the words that torchrun is started with, by a Megatron-LM of an empty pretrain_gpt.py."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()

    def words(*arguments: str, **variables: str) -> list[str]:
        done = recipe(*arguments, cwd=tmp_path, **{"MEGATRON_LM": str(tmp_path)} | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return words


def values(words: list[str]) -> dict[str, str]:
    """Each flag's last value, as argparse takes it; switches have an empty one."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_recipe_describes_llama3_8b_on_8_gpus(said, tmp_path):
    words = said("--train-iters", "7")
    launch = f"--nproc-per-node 8 -m megatron_ext.run --linear-ce {tmp_path}/pretrain_gpt.py".split()
    assert words[: len(launch)] == launch
    given = values(words[len(launch) :])
    assert given["--tensor-model-parallel-size"] == "8"
    assert given["--train-iters"] == "7"
    assert given["--rotary-base"] == "500000"
    assert given["--norm-epsilon"] == "1e-5"
    assert given["--seq-length"] == given["--max-position-embeddings"] == "8192"
    assert given["--normalization"] == "RMSNorm"
    assert {
        "--bf16",
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--group-query-attention",
        "--swiglu",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        "--mock-data",
    } <= given.keys()
    sizes = "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups vocab-size"
    layers, hidden, ffn, heads, groups, vocab = (int(given[f"--{name}"]) for name in sizes.split())
    layer = 2 * hidden**2 * (1 + groups / heads) + 3 * hidden * ffn + 2 * hidden
    assert layers * layer + 2 * vocab * hidden + hidden == 8_030_261_248  # the parameters of Llama-3 8B


def test_recipe_takes_data_nodes_and_stock(said):
    given = values(said(DATA="one two", TOKENIZER="llama"))
    assert "--mock-data" not in given
    assert "--standalone" not in given, "it would hide the other nodes"
    assert (given["--data-path"], given["--tokenizer-model"]) == ("one", "llama")
    assert "--linear-ce" not in said("--stock")
    tiny = values(said("--tiny"))
    assert {"--cpu", "--linear-ce", "--mock-data"} <= tiny.keys()
    assert tiny["--num-layers"] == "2"
    assert "--bf16" not in tiny


def test_recipe_answers_help_and_refuses_missing_folders(tmp_path):
    done = recipe("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: MEGATRON_LM=DIR examples/pretrain_llama3_8b.sh [--tiny]")
    assert done.stdout.splitlines()[-1].endswith("--train-iters 10")
    for folder, words in (("", []), ("nowhere", []), ("nowhere", ["--tiny"])):
        done = recipe(*words, cwd=tmp_path, MEGATRON_LM=folder)
        assert done.returncode == 2
        assert f"MEGATRON_LM is '{folder}': it must be a folder of Megatron-LM" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tiny_llama3_has_equal_losses_stock_and_ours(tmp_path):
    losses = {}
    for words, said in (
        (["--stock"], "head: Megatron-Core's own, through logits"),
        ([], "fused head: GPTModel: 40 losses fused, logits made 0 times"),
    ):
        done = recipe("--tiny", *words, "--metrics", "metrics.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        losses[said] = json.loads((tmp_path / "metrics.json").read_text())["losses"]
    stock, ours = losses.values()
    assert len(stock) == 10
    assert stock[-1] < stock[0] - 0.5
    assert ours == pytest.approx(stock, rel=1e-6)
