"""Report on this machine: `python -m megatron_ext.doctor`, one screen, or `--json`.

The report says which versions are installed, which Megatron-Core is imported, whether each way into it works or why
not, which kernels and fusions are active or why not, and whether the head's results are right. The exit code is 1 if
they are not. With `--model` the report says instead what would be fused in a training script (start the doctor under
torchrun if the script needs that).
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sys
import textwrap
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext import reference
from megatron_ext.broken_pipe import until_the_reader_leaves
from megatron_ext.head import linear_cross_entropy
from megatron_ext.integrations import nemo_rl, trl, verl
from megatron_ext.numerics import cpu_products
from megatron_ext.optional_packages import why_not_importable
from megatron_ext.run import why_no_pipeline_vocabulary

PACKAGES = {
    "Triton": "triton",
    "Megatron-Core": "megatron-core",
    "Transformer Engine": "transformer-engine",
    "Apex": "apex",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "PEFT": "peft",
    "TRL": "trl",
    "verl": "verl",
    "NeMo-RL": "nemo-rl",
    "Ray": "ray",
    "greenlet": "greenlet",
}
# Ways in that work if these packages can be imported.
_NEED = {
    "dtensor (use_fused_loss, parallelize)": ("transformers",),
    "policy.DTensorPolicyWorker": ("transformers", "accelerate"),
    "policy.RayPolicy": ("ray", "psutil", "transformers"),
}
TOKENS, WIDTH, VOCAB = 256, 128, 4096
_TE_USE = (
    "RNG tracker and FP8 recomputation where asked for, dummy weight gradients. The patch's head takes the lm head's "
    "place (not that of fp8_output_proj); gpt_layer_spec's layers, norms and attention take TE's; a substitution "
    "leaves TE's layers where they are"
)
_APEX_USE = (
    "none: our layers add weight gradients into main_grad by PyTorch's matmul; Megatron's own layers need Apex or TE"
)


def report() -> dict[str, Any]:
    """Return all findings, in types that JSON can hold."""
    imported = megatron()
    named = versions()
    named["Megatron-Core"] = imported["version"] or named["Megatron-Core"]
    found = {"versions": named, "megatron": imported, "frameworks": ways(), "kernels": kernels()}
    return found | {"engines": engines(named), "self_test": self_test()}


def versions() -> dict[str, str | None]:
    """Return the version of each part by its name; None for a part that is not installed."""
    has_nccl = dist.is_available() and dist.is_nccl_available() and torch.version.cuda is not None
    found = {
        "megatron_ext": megatron_ext.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return found | {name: _installed(package) for name, package in PACKAGES.items()}


def _installed(package: str) -> str | None:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if package == "apex" and importlib.util.find_spec("amp_C") is None:
        return f"{version} (without NVIDIA's kernels: PyPI's apex is another project)"
    return version


def megatron() -> dict[str, Any]:
    """Describe the imported Megatron-Core and each way in: {"version", "path", "tested", "ways", "note"}.

    A way in is None if it works, else the reason why not. Without Megatron all values except "note" are None.
    """
    nothing = {"version": None, "path": None, "tested": None, "ways": None}
    if importlib.util.find_spec("megatron") is None:
        return nothing | {"note": "Megatron-Core is not installed"}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            from megatron_ext.megatron import versions as megatron_versions

            found = {
                "version": megatron_versions.megatron_version(),
                "path": megatron_versions.megatron_path(),
                "tested": megatron_versions.is_tested(megatron_versions.megatron_version()),
                "ways": _ways(),
            }
    except Exception as error:  # that Megatron cannot be imported is a finding
        return nothing | {"note": f"{type(error).__name__}: {error}"}
    tested = megatron_versions.TESTED
    within = "in" if found["tested"] else "outside"
    note = f"{found['version']} is {within} the tested range, {tested[0]} to {tested[-1]}"
    installed = _installed("megatron-core")
    if installed is not None and installed != found["version"]:
        note += f"; pip's metadata says {installed}, which is not what is imported"
    return found | {"note": note}


def _ways() -> dict[str, str | None]:
    from megatron_ext.megatron import substitute
    from megatron_ext.megatron import versions as megatron_versions

    patch, substitution = megatron_versions.why_no_patch(), substitute.why_not_substituted()
    return {
        "launcher --linear-ce": patch,
        "launcher --tensor-parallel": substitution,
        "launcher --pipeline-vocab": patch or why_no_pipeline_vocabulary(),
        "patch": patch,
        "gpt_layer_spec": megatron_versions.why_no_spec("spec"),
        "hybrid_stack_spec": megatron_versions.why_no_spec("hybrid spec"),
        "substitution": substitution,
    }


def ways() -> dict[str, str | None]:
    """Return for each way into another framework None if it would work, else why not. Imports installed frameworks."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        ours = [module._substitution for module in (nemo_rl, verl, trl)]
        return {f"integrations.{one.package}.apply()": one.why_not() for one in ours} | {
            way: next(filter(None, map(why_not_importable, packages)), None) for way, packages in _NEED.items()
        }


def kernels() -> list[dict[str, Any]]:
    """List kernels and fusions: {"name", "active", "why"}."""
    gpu = torch.cuda.is_available()
    no_gpu = "no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
    has_triton = importlib.util.find_spec("triton") is not None
    flash = gpu and torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    no_triton = "Triton is not installed: plain PyTorch, several passes"
    dtypes = (torch.bfloat16, torch.float16)
    ours = " and ".join(str(x).removeprefix("torch.") for x in dtypes if not cpu_products.has_sixteen_bit_products(x))
    in_tiles = f"oneDNN lacks {ours}: computed in fp32 tiles, about as fast as fp32"

    def of_gpu(name: str, why: str, active: bool = True) -> dict[str, Any]:
        why = why if gpu else f"{no_gpu}; the CPU path computes the same"
        return {"name": name, "active": bool(gpu and active), "why": why}

    return [
        of_gpu("head: Triton row passes", "CUDA tensors take them" if has_triton else no_triton, has_triton),
        of_gpu("head: 16-bit matmul, fp32 logits", "CUDA tensors take it"),
        of_gpu("layers: gathers under matmuls", "on CUDA, with sequence parallelism"),
        of_gpu(
            "attention: flash kernels",
            "on CUDA, where head size and dtype fit" if flash else "torch has them turned off",
            flash,
        ),
        {"name": "16-bit products on the CPU", "active": not ours, "why": in_tiles if ours else "by oneDNN"},
        {
            "name": "weight gradients into main_grad",
            "active": True,
            "why": "with gradient_accumulation_fusion and our layers; needs no Apex",
        },
    ]


def engines(named: dict[str, str | None]) -> list[dict[str, Any]]:
    """Describe Transformer Engine and Apex, after importing them: {"name", "version", "why_not", "use"}.

    "why_not": why we or the imported Megatron-Core cannot use the package; None if both can. "use": which of its
    functions we use, and which of ours take the place of its functions.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        te = why_not_importable("transformer_engine.pytorch")
        apex = why_not_importable("fused_weight_gradient_mlp_cuda")
        if te is None:
            with contextlib.suppress(ImportError):  # a missing Megatron-Core is reported by `megatron`
                from megatron_ext.megatron import versions as megatron_versions

                te = megatron_versions.why_not_with_transformer_engine(named["Transformer Engine"])
    rows = (("Transformer Engine", te, _TE_USE), ("Apex", apex, _APEX_USE))
    return [{"name": name, "version": named[name], "why_not": why, "use": use} for name, why, use in rows]


def self_test() -> dict[str, Any]:
    """Compare the errors of the head and of plain PyTorch in the same dtype, both against fp64, on this device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = [torch.float32, torch.bfloat16]
    results = [_compare(device, dtype) for dtype in dtypes]
    return {"device": str(device), "passed": all(result["passed"] for result in results), "results": results}


def _compare(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(device, dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).div(WIDTH**0.5).to(device, dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator).to(device)
    labels[::7] = -100
    grad = torch.rand(TOKENS, generator=generator).to(device)

    def run(of: Any, wide: torch.dtype) -> tuple[list[torch.Tensor], float]:
        x, w = (t.to(wide).clone().requires_grad_() for t in (hidden, weight))
        started = time.perf_counter()
        loss = of(x, w)
        loss.backward(grad.to(loss.dtype))
        assert x.grad is not None
        assert w.grad is not None
        results = [t.detach().double().cpu() for t in (loss, x.grad, w.grad)]  # waits for the device
        return results, 1e3 * (time.perf_counter() - started)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = reference.logits(x, w)
        return reference.cross_entropy(z if z.dtype == torch.float64 else z.float(), labels)

    truth, _ = run(plain, torch.float64)
    run(lambda x, w: linear_cross_entropy(x, w, labels), dtype)  # compiles the kernels
    ours, time_ms = run(lambda x, w: linear_cross_entropy(x, w, labels), dtype)
    theirs, _ = run(plain, dtype)
    error, baseline = (
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)])
        .max()
        .item()  # NaN if any is
        for found in (ours, theirs)
    )
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "passed": error <= 2 * baseline,
        "error": error,
        "error_of_plain_pytorch": baseline,
        "time_ms": time_ms,
    }


def screen(found: dict[str, Any]) -> str:
    """Return the report as text."""
    there = {name: version for name, version in found["versions"].items() if version and name != "megatron_ext"}
    built_with = [f", {name} {there.pop(name)}" for name in ("CUDA", "NCCL") if name in there]
    there = {name: version + "".join(built_with) if name == "torch" else version for name, version in there.items()}
    lines = [f"megatron_ext {megatron_ext.__version__}, with these versions"]
    lines += [f"  {name:<20}{version}" for name, version in there.items()]
    lines += [f"  not here: {', '.join(name for name, version in found['versions'].items() if not version)}"]
    lines += ["", "Ways into Megatron-Core"]
    megatron = found["megatron"]
    lines += [f"  {megatron['path']}"] if megatron["path"] else []
    lines += [f"  {megatron['note']}"]
    lines += _of_ways(megatron["ways"] or {})
    lines += ["", "Ways into other frameworks", *_of_ways(found["frameworks"])]
    lines += ["", "Kernels and fusions"]
    lines += [f"  {'on ' if k['active'] else 'off'} {k['name']:<34}{k['why']}" for k in found["kernels"]]
    lines += ["", "Transformer Engine and Apex, both optional"]
    for engine in found["engines"]:
        named = f"{'no' if engine['why_not'] else 'ok'} {engine['name']} {engine['version'] or ''}".rstrip()
        text = f"{named}: {engine['why_not'] or engine['use']}"
        lines += textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent=5 * " ")
    lines += ["", f"Self-test of the head on {found['self_test']['device']}: {TOKENS} x {WIDTH} x {VOCAB}"]
    lines += [
        f"  {'ok  ' if r['passed'] else 'FAIL'} {r['dtype']:<10}error {r['error']:.1e}, plain PyTorch "
        f"{r['error_of_plain_pytorch']:.1e}, both against fp64; forward and backward {r['time_ms']:.1f} ms"
        for r in found["self_test"]["results"]
    ]
    return "\n".join(lines)


def _of_ways(ways: dict[str, str | None]) -> list[str]:
    return [f"  {'no' if reason else 'ok'} {name:<38} {reason or ''}".rstrip() for name, reason in ways.items()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.doctor", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cpu", action="store_true", help="with --model: Megatron-Core on CPU and gloo")
    parser.add_argument(
        "--model", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="build that script's model, train nothing"
    )
    options = parser.parse_args(argv)
    if options.model is not None:
        if not options.model:
            parser.error("--model needs a script: --model SCRIPT ARGS...")
        return check_script(options.model, cpu=options.cpu)
    if options.cpu:
        parser.error("--cpu is of use with --model alone: add --model SCRIPT ARGS...")
    found = report()
    with until_the_reader_leaves():
        print(json.dumps(found, indent=2) if options.json else screen(found))
    return 0 if found["self_test"]["passed"] else 1


def check_script(command: list[str], *, cpu: bool = False) -> int:
    """Run a training script until its models are built, and print what would be fused, on the last rank.

    Returns:
        0 if the head would compute all losses; 1 if not, or if the script built no model. Errors of the script are
        raised.
    """
    from megatron_ext import run

    def stop() -> None:
        from megatron_ext.megatron.build_check import stop_when_built

        stop_when_built(lambda found: run.say_on_last_rank(found, sys.stdout))

    try:
        run.main([*(["--cpu"] if cpu else []), *command], before=stop)
    except Exception as error:
        if "RANK" not in os.environ:
            error.add_note(
                "doctor: the script ran as one process without torchrun; one that takes its rank from torchrun is "
                "started by: torchrun --nproc-per-node N -m megatron_ext.doctor [--cpu] --model SCRIPT ARGS..."
            )
        raise
    print(f"doctor: {command[0]} ended without building a language model of Megatron's", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
