"""The unmodified pretraining scripts of Megatron's sources, by the launcher on two CPU ranks: the same losses.

    make test-source MEGATRON=<tree>

PyPI's Megatron-Core has no scripts: with it there is nothing to run here, and these tests are left out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from tests.ranks import TIMEOUT_S
from tests.test_run import ENVIRONMENT, ROOT

SOURCE = Path(megatron.core.__file__).parents[2]
STEPS = 5
ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --use-distributed-optimizer --use-cpu-initialization
""".split()
# pretrain_hybrid.py always takes a spec; Megatron's own needs Transformer Engine, so it is ours on both sides.
HYBRID = ["--hybrid-layer-pattern", "*-*-", "--spec", "megatron_ext.megatron.hybrid_layer_specs", "hybrid_stack_spec"]
GPT, TP2, PP2 = "pretrain_gpt.py", ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
UNTIED = ["--untie-embeddings-and-output-weights"]
HEAD, LAYERS, STAGES = ["--linear-ce"], ["--linear-ce", "--tensor-parallel"], ["--pipeline-vocab"]
DIGITS = 3e-7  # Megatron prints 7 of them
CASES = {
    "gpt-tp2": (GPT, TP2, HEAD, DIGITS),
    "gpt-pp2-untied": (GPT, PP2 + UNTIED, HEAD, DIGITS),
    "hybrid-tp2": ("pretrain_hybrid.py", TP2 + HYBRID, HEAD, DIGITS),
    "gpt-tp2-layers": (GPT, TP2, LAYERS, 2e-6),
    "gpt-stages": (GPT, PP2, STAGES, DIGITS),
    "gpt-stages-untied": (GPT, PP2 + UNTIED, STAGES, DIGITS),
}


def losses(folder: Path, script: str, options: list[str], *ways: str) -> tuple[list[str], str]:
    """The losses as the script prints them, and all that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_ext.run", "--cpu", *ways, str(SOURCE / script), *ARGUMENTS, *options]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SOURCE)]), "PATH": os.environ["PATH"]}
    environment = ENVIRONMENT | paths
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return re.findall(r"lm loss: (\S+)", done.stdout), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, (script, *_) in CASES.items() if (SOURCE / script).exists()])
def test_an_unmodified_script_trains_as_stock(tmp_path, case):
    script, options, ways, limit = CASES[case]
    stock, _ = losses(tmp_path, script, options)
    ours, said = losses(tmp_path, script, options, *ways)
    assert len(stock) == STEPS
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in stock], rel=limit)
    if "--linear-ce" in ways:
        assert re.search(r"fused head: \w+Model: [1-9]\d* loss(es)? fused, logits made 0 times\n", said)
