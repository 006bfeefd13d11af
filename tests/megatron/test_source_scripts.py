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
SCRIPTS = [name for name in ("pretrain_gpt.py", "pretrain_hybrid.py") if (SOURCE / name).exists()]
STEPS = 5
ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --transformer-impl local
    --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --distributed-backend nccl --use-distributed-optimizer
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-bias-swiglu-fusion --use-cpu-initialization
""".split()
# pretrain_hybrid.py always takes a spec; Megatron's own needs Transformer Engine, so it is ours on both sides.
HYBRID = ["--hybrid-layer-pattern", "*-*-", "--spec", "megatron_ext.megatron.hybrid_layer_specs", "hybrid_stack_spec"]
CASES = {
    "gpt-tp2": ("pretrain_gpt.py", ["--tensor-model-parallel-size", "2"]),
    "gpt-pp2-untied": (
        "pretrain_gpt.py",
        ["--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"],
    ),
    "hybrid-tp2": ("pretrain_hybrid.py", ["--tensor-model-parallel-size", "2", *HYBRID]),
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
@pytest.mark.parametrize("case", [name for name, (script, _) in CASES.items() if script in SCRIPTS])
def test_an_unmodified_script_trains_as_stock(tmp_path, case):
    script, options = CASES[case]
    stock, _ = losses(tmp_path, script, options)
    ours, said = losses(tmp_path, script, options, "--linear-ce")
    assert len(stock) == STEPS
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in stock], rel=3e-7)  # Megatron prints 7 digits
    assert re.search(r"fused head: \w+Model: [1-9]\d* losses fused, logits made 0 times\n", said)


@pytest.mark.slow
@pytest.mark.skipif("pretrain_gpt.py" not in SCRIPTS, reason="PyPI's Megatron-Core has no scripts")
def test_our_layers_train_an_unmodified_script_as_stock(tmp_path):
    script, options = CASES["gpt-tp2"]
    stock, _ = losses(tmp_path, script, options)
    ours, _ = losses(tmp_path, script, options, "--linear-ce", "--tensor-parallel")
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in stock], rel=2e-6)


@pytest.mark.slow
@pytest.mark.skipif("pretrain_gpt.py" not in SCRIPTS, reason="PyPI's Megatron-Core has no scripts")
@pytest.mark.parametrize("options", [[], ["--untie-embeddings-and-output-weights"]], ids=["tied", "untied"])
def test_stages_share_the_vocabulary_of_an_unmodified_script(tmp_path, options):
    options = ["--pipeline-model-parallel-size", "2", *options]
    stock, _ = losses(tmp_path, "pretrain_gpt.py", options)
    ours, _ = losses(tmp_path, "pretrain_gpt.py", options, "--pipeline-vocab")
    assert len(stock) == STEPS
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in stock], rel=3e-7)
