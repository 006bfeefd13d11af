"""Run an unmodified Megatron script on our head and layers, or without a GPU.

    torchrun --nproc-per-node 2 -m megatron_ext.run --cpu --linear-ce pretrain_gpt.py --num-layers 2 ...

The script runs as under `python SCRIPT ARGS...`: its folder is `sys.path[0]`, the script is `__main__`, its arguments
are in `sys.argv`. The process has the script's exit code, signals and tracebacks. Megatron is imported from where the
script would import it, and changed before the script runs. The last rank reports on stderr.
"""

import argparse
import atexit
import functools
import io
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_LOG = logging.getLogger("megatron_ext.run")  # by name, as __name__ is "__main__" under `python -m`

# Warnings of Megatron and torch in every job on a CPU that users cannot act on: missing kernels, one of Megatron's own
# defaults, deprecated functions of torch that Megatron calls.
_NOISE = [
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed"),
    (UserWarning, r"full scope is deprecated"),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
]

_TOLERANCE = 1e-3  # default of `--tolerance`: relative, of a step's loss

# The launcher's own `__main__`, kept alive while the script takes its place.
_replaced: list[Any] = []


def main(argv: list[str] | None = None, *, before: Callable[[], None] | None = None) -> None:
    """Run a script as `python -m megatron_ext.run` does with its arguments; return when the script ends.

    `before` is called after all changes, right before the script runs.
    """
    parser = command_line()
    options = parser.parse_args(argv)
    if not options.linear_ce and _settings(options):
        given = ", ".join("--" + name.replace("_", "-") for name in _settings(options))
        parser.error(f"settings of the fused head are given ({given}), and the head is not: add --linear-ce")
    if options.verify is None and (options.tolerance is not None or options.picture is not None):
        parser.error("--tolerance or --picture is given without --verify, which alone compares runs: add --verify N")
    if options.nccl_rules and not options.cpu:
        parser.error("--nccl-rules is given without --cpu: on GPUs NCCL itself sees to its rules; add --cpu")
    if options.transformer_engine and not options.cpu:
        parser.error("--transformer-engine is given without --cpu: on GPUs Megatron itself takes its layers; add --cpu")
    try:
        with io.open_code(options.script) as file:
            source = file.read()
    except OSError as error:
        parser.error(f"cannot open the script {options.script}: {error.strerror}")
    if options.verify is not None:
        verify(parser, options, sys.argv[1:] if argv is None else argv)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    sys.argv = [options.script, *options.args]
    _show_news()
    if options.cpu:
        _hush()
        _emulate(parser, options)
    changes = options.linear_ce or options.tensor_parallel or options.pipeline_vocab or options.check
    _tell_of_cpu(options)
    if changes:
        _change_megatron(parser, options)
    elif before is None and options.record is None:
        _LOG.info("nothing is plugged into %s: add --linear-ce or --tensor-parallel before it", options.script)
    if options.record is not None:
        _record(parser, *options.record, on_cpu=options.cpu)
    if before is not None:
        before()
    try:
        _become(os.path.abspath(options.script), source)
    except ValueError as error:
        if before is None and "RANK" not in os.environ and "expected, but not set" in str(error):
            error.add_note(
                "megatron_ext: the script takes its rank from the environment, so start it by torchrun: "
                "torchrun --nproc-per-node 1 -m megatron_ext.run OPTIONS SCRIPT ARGS..."
            )
        raise


def command_line(
    program: str = "python -m megatron_ext.run", description: str = "Run a Megatron script unmodified."
) -> argparse.ArgumentParser:
    """Return the parser of the launcher's options, which `megatron_ext.compare` takes too."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="Megatron-Core on the CPU and gloo, without a GPU")
    parser.add_argument(
        "--nccl-rules", action="store_true", help="with --cpu: wait or fail where NCCL would, and report why"
    )
    parser.add_argument(
        "--transformer-engine", action="store_true", help="with --cpu: Transformer Engine's layers, without its kernels"
    )
    parser.add_argument("--linear-ce", action="store_true", help="language models take their loss from the fused head")
    parser.add_argument("--chunk-tokens", type=_tokens, metavar="N", help="tokens per chunk of the fused head")
    parser.add_argument("--cache", type=_cache, metavar="X", help="exponentials kept: 0 to 1, bytes, bounded or auto")
    parser.add_argument("--z-loss", type=float, metavar="X", help="factor of lse^2 in the loss; logged as 'z loss'")
    parser.add_argument("--label-smoothing", type=float, metavar="X", help="0 to 1, as in torch's cross_entropy")
    parser.add_argument("--softcap", type=float, metavar="X", help="logits are X * tanh(logits / X) in the loss")
    parser.add_argument("--temperature", type=float, metavar="X", help="logits are divided by it in the loss")
    parser.add_argument("--entropy", action="store_const", const=True, help="log the entropy of the distributions")
    parser.add_argument(
        "--skip-ignored", type=_bound, metavar="N", help="leave masked tokens out; any, or N: at most N tokens count"
    )
    parser.add_argument("--bits", choices=["fast", "batch", "tensor_parallel"], help="how reproducible the head is")
    parser.add_argument("--logit-dtype", type=_dtype, metavar="X", help="bfloat16 or float16: logits are rounded to it")
    parser.add_argument(
        "--proof", choices=["first", "always", "off"], help="when the head is compared with the model's own loss"
    )
    parser.add_argument("--check", action="store_true", help="build models, report losses to be fused, train nothing")
    parser.add_argument(
        "--verify", type=_steps, metavar="N", help="first run N steps twice, stock and changed, and compare"
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help=f"of --verify: the largest difference allowed ({_TOLERANCE})",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of --verify: a PNG of both runs")
    parser.add_argument(
        "--record", nargs=2, metavar=("N", "FILE"), help="write loss, memory and time of N steps to FILE, and end"
    )
    parser.add_argument("--pipeline-vocab", action="store_true", help="pipeline stages share embedding and lm head")
    parser.add_argument("--tensor-parallel", action="store_true", help="our layers instead of Megatron's")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the fused head that were given."""
    names = "chunk_tokens cache z_loss label_smoothing softcap temperature entropy skip_ignored proof bits logit_dtype"
    return {name: value for name in names.split() if (value := getattr(options, name)) is not None}


def _positive(what: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of {what}")
    return int(text)


def _number(rule: str, words: Sequence[str], text: str) -> Any:
    """Parse a number of at least 0, or one of `words`."""
    try:
        if text in words or 0 <= float(text) < float("inf"):
            return text if text in words else float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")


_tokens, _steps = (functools.partial(_positive, what) for what in ("tokens", "steps"))
_tolerance = functools.partial(_number, "a number at least 0: a largest relative difference", ())
_CACHES = ("bounded", "auto")
_cache = functools.partial(_number, "a fraction from 0 to 1, a number of bytes, bounded or auto", _CACHES)


def _dtype(text: str) -> Any:
    import torch

    allowed = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    if text not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(allowed)}")
    return allowed[text]


def _bound(text: str) -> int | bool:
    try:
        return True if text == "any" else _tokens(text)
    except argparse.ArgumentTypeError as refusal:
        raise argparse.ArgumentTypeError(f"{refusal}, or any") from None


def _emulate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Emulate GPUs for the rest of the process, also for the functions that the script registers with `atexit`."""
    from megatron_on_cpu import megatron_on_cpu
    from megatron_on_cpu.nccl_rules import NcclRules
    from megatron_on_cpu.script_flags import flags_for_cpu

    emulation = ExitStack()
    if not options.transformer_engine:
        emulation.enter_context(flags_for_cpu(_LOG.info))
    try:
        emulation.enter_context(
            megatron_on_cpu(options.transformer_engine, NcclRules() if options.nccl_rules else None)
        )
    except ModuleNotFoundError as missing:
        parser.error(f"--transformer-engine: {missing}")
    atexit.register(emulation.close)


def _tell_of_cpu(options: argparse.Namespace) -> None:
    """Warn that there is no GPU if `--cpu` is not given, as Megatron's own error does not name `--cpu`."""
    from torch import cuda

    if not options.cpu and not cuda.device_count():  # does not initialise CUDA, for which the script may set options
        where = ", but behind SCRIPT, where it is the script's own" if "--cpu" in options.args else ""
        _LOG.warning("no GPU is here, and --cpu is not given%s: put it before SCRIPT if the script needs a GPU", where)


def _show_news() -> None:
    """Print the package's log on the last rank's stderr, from level INFO on, unless a handler is set."""
    ours = logging.getLogger("megatron_ext")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ours.hasHandlers() or os.environ.get("RANK", "0") != str(ranks - 1):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("megatron_ext: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False  # a root handler of the script's would show each line twice


def _hush() -> None:
    """Hide the warnings that come in every job on a CPU, unless the user has asked for them (`-W`)."""
    for category, message in _NOISE:
        warnings.filterwarnings("ignore", message, category, append=True)


def _change_megatron(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        import megatron.core  # noqa: F401
    except ModuleNotFoundError as error:
        parser.error(
            f"--linear-ce, --tensor-parallel, --pipeline-vocab and --check are about Megatron-Core, which is not to be "
            f"found: {error}"
        )
    from megatron_ext.proof import why_fusion_is_off

    if options.tensor_parallel:
        from megatron_ext import substitute_tensor_parallel

        substitute_tensor_parallel()
    if options.linear_ce:
        from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
        from megatron_ext.megatron.language_model_patch import patch_language_models

        try:
            patch_language_models(HeadSettings(**_settings(options)))
        except ValueError as refusal:
            parser.error(str(refusal))
        _report_after_first_step(on_cpu=options.cpu)
    if options.pipeline_vocab and (off := why_fusion_is_off()) is not None:
        _LOG.warning("pipeline stages share no vocabulary: %s", off)
    elif options.pipeline_vocab:
        from megatron_ext.experimental import pipeline_vocabulary

        try:
            pipeline_vocabulary.share_vocabulary()
        except RuntimeError as missing:
            parser.error(str(missing))
    if options.check:
        from megatron_ext.megatron.build_check import stop_when_built

        stop_when_built(say_on_last_rank)


def verify(
    parser: argparse.ArgumentParser, options: argparse.Namespace, argv: list[str], must_compare: bool = False
) -> None:
    """Run the script's first steps stock and with `argv`, print how they differ, and end the process if they do, or if
    `--linear-ce` fused no loss.

    The last rank prints its table, and so does each rank whose runs differ. With `MEGATRON_EXT_FUSION=off` nothing is
    run or compared, and the last rank says so, or with `must_compare` the process ends with an error.
    """
    from megatron_ext.proof import why_fusion_is_off
    from megatron_ext.verify.side_by_side import draw
    from megatron_ext.verify.two_runs import run_twice

    if not (options.linear_ce or options.tensor_parallel or options.pipeline_vocab):
        parser.error("--verify is given, and nothing that changes the script: add --linear-ce or --tensor-parallel")
    script = [options.script, *options.args]
    ways = argv[: len(argv) - len(script)]
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    try:
        if (off := why_fusion_is_off()) is not None:
            nothing = f"verify: nothing was compared: {off}"
            if must_compare:
                sys.exit(nothing)
            if last:
                print(nothing, file=sys.stderr, flush=True)
            return
        tolerance = _TOLERANCE if options.tolerance is None else options.tolerance
        found = run_twice(_without_verify(ways), script, options.verify, tolerance)
    except ValueError as refusal:
        parser.error(str(refusal))
    except RuntimeError as failure:
        sys.exit(f"verify: {failure}")
    if last and options.picture is not None:
        print(draw(found, options.picture), file=sys.stderr, flush=True)
    if last or found.fault is not None:
        rank = "" if last else f"rank {os.environ['RANK']}:\n"
        print(f"{rank}{found}", file=sys.stderr, flush=True)
    if found.fault is not None:
        sys.exit(f"verify: {found.fault}")
    if last and found.shows_nothing:
        sys.exit("verify: no loss or gradient norm of a step was seen in either run: nothing was compared")
    if options.linear_ce and found.fuses_nothing:
        sys.exit("verify: --linear-ce fused no loss, so the fused head was not compared: --check reports why")
    if last:
        if len(found.ours) < options.verify:
            ended = f"verify: the script ended after {len(found.ours)} of the {options.verify} steps"
            print(ended, file=sys.stderr, flush=True)
        print(f"verify: the same, {found.agreement}", file=sys.stderr, flush=True)


def _without_verify(ways: list[str]) -> list[str]:
    """Return the launcher's options without `--verify` and the options of `--verify`."""
    kept: list[str] = []
    words = iter(ways)
    for word in words:
        if word in ("--verify", "--tolerance", "--picture"):
            next(words)
        elif not word.startswith(("--verify=", "--tolerance=", "--picture=")):
            kept.append(word)
    return [word for word in kept if word != "--"]


def _record(parser: argparse.ArgumentParser, steps: str, file: str, *, on_cpu: bool) -> None:
    from torch import cuda

    from megatron_ext.verify.step_recorder import StepRecorder

    try:
        StepRecorder(Path(file), _steps(steps), on_gpu=not on_cpu and cuda.is_available()).start()
    except argparse.ArgumentTypeError as refusal:
        parser.error(f"--record: {refusal}")


def why_no_pipeline_vocabulary() -> str | None:
    """Return why `--pipeline-vocab` does not work here; None if it does."""
    try:
        from megatron_ext.experimental.pipeline_vocabulary.paused_forward import check_installed

        check_installed()
    except (ImportError, RuntimeError) as missing:
        return str(missing)
    return None


def _report_after_first_step(on_cpu: bool = False) -> None:
    from torch import cuda
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from megatron_ext.megatron.fusion_report import fusion_report

    @functools.cache  # once; the hook cannot be removed while torch iterates over its table of hooks
    def report() -> None:
        found = fusion_report()
        say_on_last_rank(found)
        if not on_cpu and cuda.is_available() and on_last_rank():
            sizes = [one.sizes for one in found.models if one.sizes]
            threading.Thread(target=_say_counted_memory, args=(sizes,), daemon=True).start()

    register_optimizer_step_post_hook(lambda *_: report())


def say_on_last_rank(found: Any, file: TextIO | None = None) -> None:
    """Print on the last rank, which has the pipeline's last stage and so the output layer; on stderr, or in `file`."""
    if on_last_rank():
        print(found, file=file or sys.stderr, flush=True)


def on_last_rank() -> bool:
    """Return whether this process is the last rank, or the only one."""
    from torch import distributed as dist

    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def _say_counted_memory(sizes: Iterable[str]) -> None:
    """Print the peak memory of heads of these sizes, while training goes on."""
    for one in dict.fromkeys(sizes):
        if table := counted_memory(one):
            print(f"fused head: {table}", file=sys.stderr, flush=True)


def counted_memory(arguments: str) -> str:
    """Return the table of `megatron-ext memory`, from a process that sees no GPU; "" if it fails or takes a minute.

    It runs in another process because counting changes torch for all threads of a process.
    """
    command = [sys.executable, "-W", "ignore", "-m", "megatron_ext.memory", *arguments.split()]
    unseen = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, env=unseen, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\nTimes on ")[0].strip()


def _become(script: str, source: bytes) -> None:
    """Run the script as `__main__`, and leave it there for worker processes and pickles, which look it up."""
    module = ModuleType("__main__")
    module.__file__ = script
    module.__dict__.update(__builtins__=__builtins__, __cached__=None, __spec__=None)
    code = compile(source, script, "exec", dont_inherit=True)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
