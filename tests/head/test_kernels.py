import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head.kernels import blocks
from megatron_ext.memory.fake_cuda import kernels
from tests.head.as_on_cuda import cuda_branches
from tests.head.hopper import OLDER_TRITON, recorded

ROOT = Path(__file__).parents[2]

# Columns of a rank at the sizes that count: V 128256 whole and in 8 shards, V 152064 and 262144 in 8, and an odd one.
SHARDS = {"V128256": 128256, "V128256/8": 16032, "V152064/8": 19008, "V262144/8": 32768, "V50257": 50257}

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def interpret(*command: str) -> str:
    """Run a Python command where CPU tensors take the Triton passes, and return what it prints."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_both_instances_of_row_passes_take_the_same_arguments():
    """Names, order, defaults and types of arguments agree, since callers know one instance only."""
    from megatron_ext.head.kernels import TRITON
    from megatron_ext.head.row_passes.passes import PYTORCH, RowPasses

    passes = [name for name in vars(RowPasses) if not name.startswith("_")]
    assert vars(TRITON).keys() == set(passes)
    for name in passes:
        assert inspect.signature(getattr(TRITON, name)) == inspect.signature(getattr(PYTORCH, name)), name


def test_kernels_say_shape_and_role_of_each_argument():
    """A docstring gives the shapes of tensors and the names of numbers, or points to another kernel's docstring."""
    package = ROOT / "megatron_ext"
    files = [*(package / "head" / "kernels").rglob("*.py"), package / "numerics" / "fixed_order_kernels.py"]
    functions = [
        node for path in files for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.FunctionDef
    ]
    kernels = {node.name: node for node in functions if node.name.endswith("_kernel")}
    assert len(kernels) == 25, sorted(kernels)
    for name, node in kernels.items():
        said = ast.get_docstring(node) or ""
        others = [ast.get_docstring(kernels[other]) for other in re.findall(r"as\s+for\s+`(\w+_kernel)`", said)]
        said = " ".join([said, *others])
        for argument in node.args.args:
            if "_stride" in argument.arg or argument.arg.startswith("stride_") or argument.arg.isupper():
                continue
            tensor = re.search(r"_ptr$|_[TV]$|^(x|w|out|kept)$", argument.arg)
            told = f"{argument.arg}:\\s+`\\[" if tensor else f"\\b{argument.arg}\\b"
            assert re.search(told, said), f"{name} does not say what {argument.arg} is"


@pytest.mark.slow
def test_twins_agree_under_the_interpreter():
    from tests.head import twins

    printed = re.fullmatch(r"(\d+) comparisons\n", interpret("-W", "ignore", "-m", "tests.head.twins"))
    assert printed
    assert int(printed[1]) == len(twins.comparisons()) > 100


# What is run with the kernels: the tests whose file and name hold every word of one of these lines.
CHOSEN = [
    *("test_edges.py test_shapes", "test_edges.py test_backward_twice", "test_edges.py test_any_memory"),
    *("test_edges.py infinity", "test_edges.py huge world2"),
    *("test_logits.py test_values_and_gradients plain world1", "test_logits.py test_values_and_gradients all world2"),
    "test_linear.py values_and_gradients all world2",
    *("test_label_rows.py windows", "test_flatten.py test_values_and_gradients columns some"),
    *("test_lora.py sixteen_bits bfloat16", "test_lora.py dropout_leaves", "test_sampling.py top_p_beside"),
    *("test_read.py test_a_hundred world1", "test_fused_epilogue.py compiled", "test_fused_epilogue.py margin"),
    *(f"test_fused_epilogue.py pytorch {name}-world2" for name in ("layouts", "reach", "frozen", "one", "nothing")),
]


@pytest.mark.slow
def test_the_head_itself_under_the_interpreter():
    """All options together and in any combination, loss and log-probabilities, layouts and caches, 1 and 2 ranks, any
    shape and memory: values and gradients. `twins` has each option, read-out and dtype.

    A test that was renamed is missed: each line above has to choose one.
    """
    chosen = " or ".join(f"({words.replace(' ', ' and ')})" for words in CHOSEN)
    files = sorted({f"tests/head/{words.split()[0]}" for words in CHOSEN})
    passed = re.findall(
        r"^PASSED (.+)",
        interpret("-m", "pytest", "-rA", "-m", "not slow and not gpu", *files, "-k", chosen),
        re.MULTILINE,
    )
    for words in CHOSEN:
        assert any(all(word in test for word in words.split()) for test in passed), f"{words!r} chooses no test"


@pytest.mark.slow
def test_the_interpreters_variable_sends_cpu_tensors_to_triton():
    ask = (
        "import torch; from megatron_ext.head.row_passes import passes; "
        "print(passes.passes_of(torch.zeros(1)).row_statistics.__module__)"
    )
    for value, module in (
        ("0", "megatron_ext.head.row_passes.passes"),
        ("1", "megatron_ext.head.kernels.row_statistics"),
    ):
        env = {**os.environ, "TRITON_INTERPRET": value}
        found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, env=env, capture_output=True, text=True)
        assert found.stdout.strip() == module, found.stderr


def launches(columns: int, dtype=torch.bfloat16, of_logits=False, **options):
    """Every launch of forward and backward on CUDA tensors, compiled for the arguments that the head gives it.

    `of_logits`: without those of the options that hidden states alone have.
    """
    hidden, weight = torch.zeros(16, 64, dtype=dtype), torch.zeros(columns, 64, dtype=dtype)
    bias = torch.zeros(columns, dtype=dtype) if options.pop("bias", False) and not of_logits else None
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    labels = torch.zeros(16, dtype=torch.int64)
    with cuda_branches(kernels), recorded() as found:
        if of_logits:
            options.pop("cache")
            loss = vocab_parallel_cross_entropy(hidden @ weight.t(), labels, **options)
        else:
            loss = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
        torch.autograd.grad(loss.sum(), leaves)
    return found


def by_name(found):
    return {launch.name.removeprefix("_").removesuffix("_kernel"): launch for launch in reversed(found)}


EVERYTHING = {"bias": True, "softcap": 30.0, "temperature": 0.7, "label_smoothing": 0.1, "z_loss": 0.01}
compiled = pytest.mark.skipif(interpreted, reason="interpreted kernels are not compiled; the ordinary run does")


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["V128256", "V128256/8", "V152064/8", "V262144/8"])
def test_instructions_on_hopper(shard):
    """The launches of a plain loss spill nothing, load 16 bytes at a time, leave room for two programs an SM, and take
    no more instructions an element than a pass at the speed of memory leaves room for (about 20 for 4 bytes read)."""
    found = by_name(launches(SHARDS[shard], cache=0.5))
    long_rows = blocks.whole_row(SHARDS[shard], SHARDS[shard], more=False, double=False) is None
    of_logits = {"row_gradient", "long_row" if long_rows else "whole_row"}
    of_tokens = {"ids_exist", "columns", "label_rows", "finish_dx", "scale_rows", "combined", "token_gradient"}
    assert found.keys() == of_logits | of_tokens
    for launch in found.values():
        launch.check_programs()
    for name in of_logits:
        loads = found[name].loads()
        assert sum(width == 16 for width in loads) >= len(loads) - 4, (name, loads)
    if long_rows:
        first, _, again, _ = map(len, found["long_row"].loops())  # of each pair the second masks columns past the end
        constants = found["long_row"].arguments
        each = constants["STEPS"] * constants["LANES"] / 256
        assert first <= 11.5 * each, "statistics and kept exponentials"
        assert again <= (4.6 if OLDER_TRITON else 4.5) * each, "of rows that are read again"
    else:
        constants = found["whole_row"].arguments
        assert SHARDS[shard] > 0.9 * (lanes := constants["FIRST"] + constants["REST"])
        assert len(found["whole_row"].instructions()) <= 12 * lanes / (32 * constants["num_warps"])
    assert len(found["row_gradient"].instructions()) <= 11 * found["row_gradient"].arguments["BLOCK_V"] / 128


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["V128256", "V152064/8", "V50257"])
@pytest.mark.parametrize("of_logits", [False, True])
def test_no_spills_on_hopper(shard, of_logits):
    found = launches(SHARDS[shard], of_logits=of_logits, cache=0.5, **EVERYTHING)
    assert found
    for launch in found:
        launch.check_spills()


@compiled
@pytest.mark.slow
def test_label_rows_on_hopper():
    """The kernels spill nothing and leave room for two programs an SM, for so many tokens that a label's may lie in
    several windows."""
    from megatron_ext.head.kernels.label_terms import add_label_rows

    x, out = torch.zeros(1000, 4096, dtype=torch.bfloat16), torch.zeros(300, 4096, dtype=torch.bfloat16)
    with cuda_branches(), recorded() as found:
        for common in (None, torch.zeros(4096)):
            counted = None if common is None else torch.zeros(300)
            add_label_rows(out, x, torch.zeros(1000).long(), torch.zeros(1000), common, counted)
    assert [launch.name for launch in found] == 2 * ["_label_parts_kernel", "_label_rows_kernel"]
    for launch in found:
        launch.check_programs()
        assert max(launch.loads()) == 16, launch.name


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("of_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["fp64", "fp16"])
def test_what_is_not_benchmarked_compiles_too(dtype, of_logits):
    """The interpreter runs what Triton refuses, as an operation of fp32 beside a return that fp64 takes."""
    for options in ({"temperature": 0.7}, EVERYTHING):
        assert launches(301, dtype=dtype, of_logits=of_logits, cache=0.5, **options)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nucleus_and_first_columns_on_hopper(dtype):
    """Two programs an SM, nothing spilled, no call, and as many instructions a logit as leave a pass of sums near the
    time of memory; what a top-k scans is loaded 16 bytes at a time where every row is read."""
    from megatron_ext.head.kernels import nucleus, selection

    z = torch.zeros(4, 128256, dtype=dtype)
    with cuda_branches(), recorded() as found:
        for temperature in (1.0, 0.7):
            nucleus.nucleus(z, 0.9, temperature, torch.mm)
        selection.group_maxima(z, 2004, 64)
        selection.first_columns(z, torch.zeros(4, 64, dtype=torch.int64), 64, 64, False)
    for launch in found:
        launch.check_programs()
    for launch, most in zip(found[:2], (36, 41), strict=True):
        of_sums = min(len(loop) for loop in launch.loops() if sum("MUFU.EX2" in text for text in loop) > 8)
        assert of_sums <= most * 8 * blocks.NUCLEUS / 256
        assert not any("CALL" in text for loop in launch.loops() for text in loop)
    assert max(found[2].loads()) == 16
    of_bits = [len(loop) for loop in found[3].loops() if not any("LDG" in text for text in loop)]
    assert max(of_bits) <= 100, "a step of the search for the k-th key, of 16 columns a thread"


READ_BYTES = """
import torch
from benchmarks.interpreter import counted_reads
from megatron_ext.head.kernels import nucleus
from megatron_ext.head.row_passes import nucleus as plain
torch.manual_seed(0)
for size in (1.0, 3.0):
    z = size * torch.randn(1, 128256)
    with counted_reads() as read:
        cut, peak, total = nucleus.nucleus(z, 0.9, 1.0, torch.mm)
    wanted_cut, wanted_peak, wanted_total = plain.nucleus(z, 0.9, 1.0, torch.mm)
    assert cut.equal(wanted_cut) and peak.equal(wanted_peak), (cut, wanted_cut)
    torch.testing.assert_close(total, wanted_total, rtol=1e-6, atol=0.0)
    print(sum(read) / z.nbytes)
"""


@pytest.mark.slow
def test_a_nucleus_is_found_in_four_passes_and_a_list():
    """The bytes read are those of a row of normally distributed logits, four times, and of a short list."""
    passes = [float(line) for line in interpret("-W", "ignore", "-c", READ_BYTES).split()]
    assert len(passes) == 2
    assert all(4 <= rows <= 4.4 for rows in passes), passes


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_sums_of_one_order_on_hopper(dtype):
    """A thread that sums rows or segments keeps its sums in registers and adds none by atomics; rows are read 16 bytes
    at a time."""
    from megatron_ext.head.kernels.fixed_order_sums import row_sums, segment_sums

    x, lengths = torch.zeros(64, 4096, dtype=dtype), torch.full((64,), 64)
    with cuda_branches(), recorded() as found:
        row_sums(x)
        segment_sums(x[0], lengths)
    assert [launch.grid for launch in found] == [(64,), (64,)]
    for launch in found:
        launch.check_spills()
        assert launch.resources()["REG"] <= 64, launch.resources()
        assert not any(re.search(r"\b(RED|ATOM)", text) for _, text in launch.instructions())
    assert max(found[0].loads()) == 16


@compiled
@pytest.mark.parametrize("columns", [128256, 50257])
def test_softmax_of_an_engine_is_summed_by_the_same_threads(columns):
    """Each reduction has the layout of Megatron's kernel, which decides the order within a block.

    Theirs names no axis: Triton calls the threads' numbers another layout then, and moves none.
    """
    pytest.importorskip("megatron.core")
    from megatron_ext.head.kernels.fixed_order_sums import write_sums
    from tests.head.engine_kernels import megatrons

    z, room = torch.zeros(2, columns, dtype=torch.bfloat16), -columns % 16
    with cuda_branches(), recorded() as found:
        megatrons().log_softmax(z.float())
        write_sums(
            torch.zeros(2, columns + room, dtype=z.dtype)[:, :columns], torch.zeros(3, 2), None, columns, None, 1.0
        )
    layouts = []
    for launch in found:
        text = launch.compiled.asm["ttgir"]
        called = r"allow_reorder : tensor<1024xf32, (#\w+)> -> tensor<1024xf32, (#\w+)>"
        before = {new: old for old, new in re.findall(called, text)}
        names = {before.get(name, name) for name in re.findall(r"tensor<1024xf32, (#\w+)>\) -> f32", text)}
        layouts.append({re.search(rf"^{name} = (.*)", text, re.M)[1] for name in names})
        launch.check_spills()
    assert len(found) == 2
    assert layouts[0] == layouts[1] != set()


@compiled
@pytest.mark.slow
def test_labels_take_three_launches_on_hopper():
    from megatron_ext.head.kernels.token_ids import columns_of, ids_exist, labels_checksum

    ids = torch.zeros(16384, dtype=torch.int64)
    with cuda_branches(), recorded() as found:
        ids_exist(ids, 128256, -100)
        columns_of(ids, ids == 0, 16032, 32064)
        labels_checksum([ids], None)
    assert [launch.grid for launch in found] == [(1,), (16,), (1,)]
    for launch in found:
        launch.check_spills()


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_checks_of_an_exchange_are_one_launch_on_hopper(softcap):
    from megatron_ext.distributed.groups import VocabShard
    from megatron_ext.head.call.resolved_head import ResolvedHead
    from megatron_ext.head.kernels.exchange_checks import exchange_checks

    call = ResolvedHead(None, VocabShard(0, 16032, 128256), softcap=softcap, largest=softcap)
    with cuda_branches(), recorded() as found:
        exchange_checks(torch.zeros(8, 6, 8193), torch.zeros(8192, dtype=torch.int64), call)
    assert [launch.grid for launch in found] == [(1,)]
    found[0].check_spills()
