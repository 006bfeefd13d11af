"""`python -m megatron_ext.memory`: bytes and time of the lm head in a training step, other packages' and ours.

Give the sizes, or a model of transformers (`--model NAME`), or a Megatron script's arguments (`--megatron ARGS...`).
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_ext.broken_pipe import until_the_reader_leaves
from megatron_ext.head.call.gpu_properties import Device
from megatron_ext.memory.heads import ours, peak_bytes, stock
from megatron_ext.memory.sizes import DTYPES, Sizes, of_config, of_megatron_arguments
from megatron_ext.memory.step_time import GPUS, PERCENT, LaunchCounter, gpu_here

MIB = 2**20
CACHES = ("bounded", 1.0, 0.5, 0.0)
# Fields of `Sizes`, with the options that set them.
_GIVEN = {"tokens": "--tokens", "width": "--hidden", "vocab": "--vocab"}


@until_the_reader_leaves()
def main(argv: list[str] | None = None) -> None:
    """Print the table for the sizes in `argv`; None: the process's arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        sizes, ignored = _sizes(options)
    except ValueError as fault:
        parser.error(str(fault))
    if ignored:
        print(f"says nothing of the head's sizes, ignored: {' '.join(ignored)}")
    without_kernels = importlib.util.find_spec("triton") is None
    if options.device == "cuda" and without_kernels:
        parser.error("--device cuda counts Triton's kernels, and Triton is not installed: pip install triton")
    on_cuda = options.device != "cpu" and not without_kernels
    if options.gpu and not on_cuda:
        fix = [*["leave out --device cpu"] * (options.device == "cpu"), *["pip install triton"] * without_kernels]
        parser.error(f"--gpu is {options.gpu}, and a CPU's run is counted: {', and '.join(fix)}")
    gpu, name = (GPUS[options.gpu], "") if options.gpu else gpu_here()
    caches = CACHES if options.cache is None else [options.cache]
    if not on_cuda:
        print("Counting as on a CPU, which takes up to a minute", file=sys.stderr, flush=True)
    for row in rows(sizes, caches, on_cuda=on_cuda, gpu=gpu if on_cuda else None):
        print(row, flush=True)
    if on_cuda and gpu is None:
        print(f"Times on {name or 'a GPU'} are not known here; --gpu h100 or --gpu h200 gives those of these cards.")
    if options.device is None and without_kernels:
        print("A GPU takes somewhat more or less: to count what it takes, pip install triton, which has the kernels.")
    if importlib.util.find_spec("megatron") is None:
        print("For a row of Megatron-Core's head: pip install megatron-core")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.memory",
        description="Count the bytes that the lm head takes on one rank in a training step, without running it, and "
        "estimate its time on a known GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a micro-batch, of all its sequences")
    parser.add_argument("--hidden", dest="width", type=int, metavar="N", help="hidden size")
    parser.add_argument("--vocab", type=int, metavar="N", help="the whole vocabulary, padded")
    parser.add_argument("--tp", dest="ranks", type=int, metavar="N", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--sequence-parallel", action="store_const", const=True, help="slices of tokens on ranks")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of hidden states and weight (default: bf16)")
    parser.add_argument("--cache", type=_cache, metavar="X", help="only this value; default: bounded, 1, 0.5 and 0")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="device of the counted code (default: cuda if Triton is installed)"
    )
    parser.add_argument("--gpu", choices=GPUS, help="the GPU of the times (default: this machine's, if it is known)")
    parser.add_argument("--model", metavar="NAME", help="a folder or a name that transformers finds a config for")
    parser.add_argument("--megatron", nargs=argparse.REMAINDER, metavar="ARGS", help="Megatron's arguments")
    return parser


def _cache(text: str) -> Any:
    """Parse a value of `cache`, except "auto", which depends on the memory that is free in the job."""
    try:
        if text == "bounded" or 0 <= float(text) < float("inf"):
            return text if text == "bounded" else float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be a fraction from 0 to 1, a number of bytes, or bounded")


def _sizes(options: argparse.Namespace) -> tuple[Sizes, list[str]]:
    """Return the sizes, and the flags of Megatron's that do not concern them; sizes given directly win."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    if options.model is not None:
        found |= of_config(options.model)
    if options.megatron is not None:
        read, ignored = of_megatron_arguments(options.megatron)
        found |= read
    found |= {
        name: value for name in (*_GIVEN, "ranks", "sequence_parallel") if (value := getattr(options, name)) is not None
    }
    if options.dtype is not None:
        found["dtype"] = DTYPES[options.dtype]
    missing = [option for name, option in _GIVEN.items() if name not in found]
    if missing:
        raise ValueError(f"sizes are missing: pass {', '.join(missing)}")
    return Sizes(**found), ignored


def rows(sizes: Sizes, caches: Any = CACHES, *, on_cuda: bool = True, gpu: Device | None = None) -> Iterator[str]:
    """Yield the table's lines, each when it is counted: for each head MiB, their percentage of the first head's if that
    is another package's, and milliseconds on `gpu`."""
    others = stock(sizes)
    heads = others | {f"megatron_ext, cache={_word(cache)}": partial(ours, cache) for cache in caches}
    width, first = max(map(len, heads)), None
    timed = gpu if sizes.dtype.itemsize == 2 else None
    unknown = False
    yield f"{sizes}: the head's peak on one rank, forward and backward"
    for name, build in heads.items():
        launches = LaunchCounter(timed) if timed else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-Core's warnings of missing packages
            nbytes = peak_bytes(sizes, build, on_cuda=on_cuda, launches=launches)
        first = first or (nbytes if others else None)
        row = f"{name:<{width}}{nbytes / MIB:>12.1f} MiB" + (f"{nbytes / first:>8.0%}" if first else "")
        if launches:
            seconds = launches.seconds
            unknown = unknown or seconds is None
            row += f"{'unknown':>13}" if seconds is None else f"{seconds * 1e3:>10.1f} ms"
        yield row
    where = "CUDA" if on_cuda else "a CPU"
    yield f"Counted as on {where}, beyond hidden states and weight; both gradients are in it."
    if gpu:
        yield from _about_times(sizes, gpu, unknown)


def _about_times(sizes: Sizes, gpu: Device, unknown: bool) -> Iterator[str]:
    """Yield the lines below the table that say how accurate its times are."""
    if sizes.dtype.itemsize != 2:
        yield "Times are not known in fp32: the rates are of 16-bit products."
        return
    rows_of = f"within {PERCENT} % of those measured on one (Megatron-Core's head and ours, at two sizes in bf16)"
    if gpu.name != "H200":
        rows_of = "no head has been measured on one; rates are from its data sheet, energies are those of an H200"
    alone = "; what ranks send each other is not in it" if sizes.ranks > 1 else ""
    yield f"Times are estimates for an {gpu.name}: {rows_of}{alone}."
    if unknown:
        yield "A time is unknown where products are less than half of it, or the host may take longer."


def _word(cache: Any) -> str:
    return cache if isinstance(cache, str) else f"{cache:g}"


if __name__ == "__main__":
    main()
