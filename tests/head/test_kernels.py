import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ext.head.kernels import blocks

ROOT = Path(__file__).parents[2]
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

# Columns of a rank at the sizes that count: V 128256 whole and in 8 shards, V 152064 in 8.
SHARDS = {"V128256": 128256, "V128256/8": 16032, "V152064/8": 19008}

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def interpret(*command: str) -> str:
    """What a Python command prints, run where CPU tensors take the Triton passes."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("part", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_twins_agree_under_the_interpreter(part):
    assert re.search(r"^(\d+) comparisons", interpret("-W", "ignore", "-m", "tests.head.twins", part))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        "test_edges.py -k test_shapes or test_backward_twice or test_any_memory or infinity or huge and not world4",
        "test_logits.py -k test_values_and_gradients and world1 or test_values_and_gradients and all and world2",
        "test_linear.py -k test_values_and_gradients and all and world2 or test_precision and plain and world2",
        "test_properties.py -k test_a_few",
    ],
)
def test_the_head_itself_under_the_interpreter(tests):
    """Every option alone and all in any combination, each read-out, dtype, layout and cache, 1 and 2 ranks, any shape
    and memory: values and gradients."""
    file, chosen = tests.split(" -k ")
    interpret("-m", "pytest", "-q", "-m", "not slow and not gpu", f"tests/head/{file}", "-k", chosen)


@pytest.mark.slow
def test_the_interpreters_variable_sends_cpu_tensors_to_triton():
    ask = "import torch; from megatron_ext.head import passes; print(passes._side(torch.zeros(1)).__name__)"
    for value, module in (("0", "megatron_ext.head.rows"), ("1", "megatron_ext.head.kernels.rows")):
        env = {**os.environ, "TRITON_INTERPRET": value}
        found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, env=env, capture_output=True, text=True)
        assert found.stdout.strip() == module, found.stderr


def spilled_bytes(kernel, types: dict[str, str], constants: dict[str, object], warps: int, folder: Path) -> int:
    """Bytes that Hopper's registers do not hold, as ptxas reports them."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    report = subprocess.run(
        [PTXAS, "-v", "-arch=sm_90a", ptx, "-o", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stderr
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert found, report
    return int(found[1]) + int(found[2])


def test_all_kernels_are_compiled_below():
    from megatron_ext.head.kernels import rows

    kernels = {name for name in vars(rows) if name.endswith("_kernel")}
    assert kernels == {"_statistics_kernel", "_gradient_kernel"}


# Logits as they come: fp32 out of a matmul, with exponentials kept in 16 bits; or the caller's, in 16 bits.
@pytest.mark.skipif(interpreted, reason="interpreted kernels are not compiled; the ordinary run does")
@pytest.mark.parametrize("logits", ["made", "given"])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("shard", ["V128256", pytest.param("V128256/8", marks=pytest.mark.slow), "V152064/8"])
def test_no_spills_on_hopper(shard, everything, logits, tmp_path):
    from megatron_ext.head.kernels import rows

    columns = SHARDS[shard]
    z_type = "*fp32" if logits == "made" else "*bf16"
    pointers = {"z_ptr": z_type, "exp_ptr": "*bf16", "out_ptr": "*bf16", "target_ptr": "*i64"}
    integers = {"columns_all": "i32", "counted": "i32", "target_stride": "i32"}
    floats = {"softcap": "fp32", "temperature": "fp32", "tiny": "fp32"}

    def types_of(kernel, **more):
        types = {}
        for name in kernel.arg_names:
            if name.endswith("_ptr"):
                types[name] = {**pointers, **more}.get(name, "*fp32")
            elif "stride" in name or name in integers:
                types[name] = integers.get(name, "i64")
            elif name in floats:
                types[name] = floats[name]
        return types

    table = blocks.STATISTICS_AND_MORE if everything else blocks.STATISTICS
    step, warps = blocks.sizes(table, columns, double=False)
    flags = ("HAS_BIAS", "HAS_SOFTCAP", "WITH_MEAN", "WITH_ENTROPY", "WITH_HITS")
    constants = dict.fromkeys(flags, everything) | {
        "HAS_EXP": logits == "made",
        "WHOLE_ROW": columns <= step,
        "DTYPE": tl.float32,
        "BLOCK_V": step,
    }
    kernel = rows._statistics_kernel
    assert spilled_bytes(kernel, types_of(kernel), constants, warps, tmp_path) == 0

    step, warps = blocks.sizes(blocks.GRADIENT, columns, double=False)
    flags = ("HAS_SCALE", "HAS_SLOPE", "HAS_OFFSET", "HAS_VALUE", "HAS_BIAS", "HAS_SOFTCAP")
    for source_is_exp in (False, True) if logits == "made" else (False,):
        constants = dict.fromkeys(flags, everything) | {
            "SOURCE_IS_EXP": source_is_exp,
            "DTYPE": tl.float32,
            "BLOCK_V": step,
        }
        kernel = rows._gradient_kernel
        types = types_of(kernel, source_ptr="*bf16" if source_is_exp else z_type)
        assert spilled_bytes(kernel, types, constants, warps, tmp_path) == 0
