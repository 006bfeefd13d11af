"""The script's own parts, on every rank of a small world. How it runs as a program: test_programs.py."""

import gc
from contextlib import contextmanager, nullcontext
from pathlib import Path

import checkpoint
import pretrain_gpt
import pytest
import text
import torch
from arguments import check_arguments, parse_arguments

from tests.examples import EXAMPLES
from tests.gpt import child_processes, model_parallel, ours_everywhere
from tests.ranks import ranks

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --micro-batch-size 1 "
    f"--global-batch-size 8 --train-iters 6 --lr 2e-3 --use-cpu-initialization --data {EXAMPLES.parent / 'LICENSE'}"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
FOUR_RANKS = f"{NO_DROPOUT} --global-batch-size 4"  # one sample for each replica


def parse(words: str):
    return parse_arguments(words.split())


@contextmanager
def started(words: str, cache: Path):
    """Megatron initialised for the arguments, as main() does it."""
    args = parse(f"{SMALL} {words}")
    text.CACHE = cache
    with model_parallel(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size):
        check_arguments(args, torch.distributed.get_world_size())
        gc.collect()  # models of the run before: ours cannot take their place
        with ours_everywhere() if args.layers == "ext" else nullcontext():
            yield args


def metrics_of(words: str, cache: Path) -> dict:
    with started(f"{words} --metrics unwritten", cache) as args:
        return pretrain_gpt.train(args)


def go_back_to_step_3(run: Path) -> None:
    """Makes `--load` of the folder take step 3. All ranks read the file that one of them writes."""
    if torch.distributed.get_rank() == 0:
        (run / checkpoint.LATEST).write_text("3\n")
    torch.distributed.barrier()


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    "variant", ["--sequence-parallel", "--untie-embeddings-and-output-weights"], ids=["sequence-parallel", "untied"]
)
def test_stock_and_ours_have_the_same_losses(variant, tmp_path):
    words = f"--tensor-model-parallel-size 2 {variant}"
    stock = metrics_of(f"{words} --head stock --layers stock", tmp_path)
    ours = metrics_of(f"{words} --head fused --layers ext", tmp_path)
    assert stock["losses"][-1] < stock["losses"][0] - 0.05, "nothing was learnt"
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-5, atol=0)
    parallel = "--sequence-parallel" in variant
    assert ours["head"]["collectives"] == (4 if parallel else 2)
    assert stock["head"]["collectives"] == (6 if parallel else 4)
    assert ours["head"]["peak_mib"] > 0


@pytest.mark.slow
@ranks(2)
def test_a_run_goes_on_where_it_was_saved(tmp_path):
    """Weights, optimizer, schedule, random numbers and the place in the text."""
    words = "--tensor-model-parallel-size 2 --hidden-dropout 0.3"
    with child_processes():
        whole = metrics_of(f"{words} --save {tmp_path}/run --save-interval 3", tmp_path)["losses"]
    go_back_to_step_3(tmp_path / "run")
    rest = metrics_of(f"{words} --load {tmp_path}/run", tmp_path)["losses"]
    assert rest == whole[3:]
    with pytest.raises(ValueError, match="a checkpoint of 512 words, and --vocab-size is 600"):
        metrics_of(f"{words} --vocab-size 600 --load {tmp_path}/run", tmp_path)


@pytest.mark.slow
@ranks(1)
def test_a_checkpoint_of_another_script_is_refused(tmp_path):
    words = f"{NO_DROPOUT} --num-layers 1 --train-iters"
    with child_processes():
        metrics_of(f"{words} 1 --save {tmp_path}/run", tmp_path)
    common = tmp_path / "run" / "iter_0000001" / "common.pt"
    facts = torch.load(common, weights_only=False)
    del facts["consumed_samples"]
    torch.save(facts, common)
    with pytest.raises(ValueError, match="a checkpoint without consumed_samples: it was not written by this script"):
        metrics_of(f"{words} 2 --load {tmp_path}/run", tmp_path)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("layers", ["stock", "ext"])
def test_a_run_saved_at_tp2_goes_on_at_other_sizes(layers, tmp_path):
    common = f"{FOUR_RANKS} --layers {layers} --lr-warmup-iters 2"
    with child_processes():
        words = f"{common} --tensor-model-parallel-size 2 --save {tmp_path}/run --save-interval 3"
        whole = metrics_of(words, tmp_path)["losses"]
    go_back_to_step_3(tmp_path / "run")
    every = (
        "",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
    )
    for sizes in every if layers == "ext" else every[:1]:  # of stock: that the script saves and loads it as well
        rest = metrics_of(f"{common} {sizes} --load {tmp_path}/run", tmp_path)["losses"]
        torch.testing.assert_close(rest, whole[3:], rtol=1e-5, atol=0)


BAD = {
    "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 12 --vocab-size 513": (
        "the number of ranks is 4: it must be a multiple of --tensor- x --pipeline-model-parallel-size, which is 3"
    ),
    "--hidden-size 33": "--hidden-size is 33: .* --num-attention-heads, which is 4; 32 or 36 would fit",
    "--tensor-model-parallel-size 4 --num-attention-heads 2": "--num-attention-heads is 2: .* which is 4",
    "--tensor-model-parallel-size 2 --vocab-size 511": "--vocab-size is 511: .* which is 2; 510 or 512 would fit",
    "--pipeline-model-parallel-size 4": "--num-layers is 2: .* --pipeline-model-parallel-size, which is 4",
    "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31": "--seq-length is 31: .* which is 2",
    "--sequence-parallel": "--sequence-parallel needs .*: --tensor-model-parallel-size is 1",
    "--global-batch-size 6": "--global-batch-size is 6: .* --micro-batch-size x 4 replicas, which is 4",
    "--train-iters 0": "--train-iters is 0: it must be at least 1",
    "--hidden-dropout 1": "--hidden-dropout is 1.0: it must be at least 0 and below 1",
    "--lr-warmup-iters 6": "--lr-warmup-iters is 6: it must be at least 0 and below --train-iters, which is 6",
    "--min-lr 1": "--min-lr is 1.0: it must be at least 0 and at most --lr, which is 0.002",
    "--num-query-groups 2": "--num-query-groups is 2: it needs --group-query-attention",
    "--group-query-attention --num-query-groups 3": "--num-attention-heads is 4: .*, which is 3",
    "--tensor-model-parallel-size 2 --ffn-hidden-size 33": "--ffn-hidden-size is 33: .* which is 2",
    "--ffn-hidden-size 0": "--ffn-hidden-size is 0: it must be at least 1",
    "--swiglu": "--swiglu is given without --ffn-hidden-size",
    "--norm-epsilon 0": "--norm-epsilon is 0.0: it must be above 0",
    "--mock-data": "--data names files, and --mock-data trains without any",
    "--vocab-size 100": "--vocab-size is 100: bytes alone make a vocabulary of 257",
    "--save-interval 2": "--save-interval is 2: it must be at least 1, beside --save PATH",
    "--data nowhere.txt": "--data names 'nowhere.txt', which is not a file",
    "--load nowhere": "--load is 'nowhere': it has no latest_checkpointed_iteration.txt",
}


def test_faults_of_the_end_of_a_run_are_refused_at_its_start(tmp_path):
    (tmp_path / "file").write_text("6\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    for words, message in {
        f"--save {tmp_path}/file": "--save writes to '.*file': File exists; give a folder that can be written",
        f"--metrics {tmp_path}/file/x.json": "--metrics writes to '.*file': File exists",
        f"--load {tmp_path}": "--load has 6 iterations behind it: --train-iters is 6, and must be more",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_arguments(parse(f"{SMALL} {words}"), world_size=4)


@pytest.mark.parametrize("words,message", BAD.items(), ids=list(BAD))
def test_bad_arguments_are_refused(words, message):
    args = parse(f"{SMALL} {words}")
    with pytest.raises(ValueError, match=message):
        check_arguments(args, world_size=4)


def test_the_flags_are_megatrons():
    """Defaults suit each other, for one rank and for two."""
    check_arguments(parse(""), world_size=1)
    check_arguments(parse("--tensor-model-parallel-size 2 --sequence-parallel"), world_size=2)
