"""Run an unmodified Megatron script on our head and layers, or without a GPU.

    torchrun --nproc-per-node 2 -m megatron_ext.run --cpu --linear-ce pretrain_gpt.py --num-layers 2 ...

The script finds what it would find under `python SCRIPT ARGS...`: its folder at `sys.path[0]`, itself as `__main__`,
its arguments in `sys.argv`. Its exit code, its signals and its tracebacks are those of the process. Megatron is
imported from where the script would import it, and changed before the script runs.

With `--linear-ce` the last rank says on stderr, after the first step of an optimizer, what was fused. With `--check`
the script ends when its models are built, and the last rank says what would be fused.
"""

import argparse
import atexit
import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TextIO

# What Megatron and torch warn of in every job on a CPU, and nobody can change there: kernels that are missing, one of
# Megatron's own defaults, functions of torch that Megatron calls.
_NOISE = [
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed"),
    (UserWarning, r"full scope is deprecated"),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
]

# What the launcher keeps alive while the script is `__main__` in its place.
_replaced: list[Any] = []


def main(argv: list[str] | None = None, *, before: Callable[[], None] | None = None) -> None:
    """Run a script as `python -m megatron_ext.run` does with its arguments; return when the script ends.

    `before` is called when everything is changed, right before the script runs.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.linear_ce and _settings(options):
        given = ", ".join("--" + name.replace("_", "-") for name in _settings(options))
        parser.error(f"settings of the fused head are given ({given}), and the head is not: add --linear-ce")
    if options.nccl_rules and not options.cpu:
        parser.error("--nccl-rules is given without --cpu: on GPUs NCCL itself sees to its rules; add --cpu")
    if options.transformer_engine and not options.cpu:
        parser.error("--transformer-engine is given without --cpu: on GPUs Megatron itself takes its layers; add --cpu")
    try:
        with io.open_code(options.script) as file:
            source = file.read()
    except OSError as error:
        parser.error(f"cannot open the script {options.script}: {error.strerror}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    sys.argv = [options.script, *options.args]
    if options.cpu:
        _hush()
        _emulate(parser, options)
    if options.linear_ce or options.tensor_parallel or options.pipeline_vocab or options.check:
        _change_megatron(parser, options)
    if before is not None:
        before()
    _become(os.path.abspath(options.script), source)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.run", description="Run a Megatron script unmodified.", allow_abbrev=False
    )
    parser.add_argument("--cpu", action="store_true", help="Megatron-Core on CPU and gloo, no GPU asked for")
    parser.add_argument(
        "--nccl-rules", action="store_true", help="with --cpu: hang and refuse where NCCL does, and say why"
    )
    parser.add_argument(
        "--transformer-engine", action="store_true", help="with --cpu: Transformer Engine's layers, without its kernels"
    )
    parser.add_argument("--linear-ce", action="store_true", help="language models take their loss from the fused head")
    parser.add_argument("--chunk-tokens", type=_tokens, metavar="N", help="tokens per chunk of the fused head")
    parser.add_argument("--cache", type=_cache, metavar="X", help="what the head keeps: 0 to 1, bytes, bounded or auto")
    parser.add_argument("--z-loss", type=float, metavar="X", help="factor of lse^2 in the loss; logged as 'z loss'")
    parser.add_argument("--label-smoothing", type=float, metavar="X", help="0 to 1, as in torch's cross_entropy")
    parser.add_argument("--softcap", type=float, metavar="X", help="logits are X * tanh(logits / X) in the loss")
    parser.add_argument("--temperature", type=float, metavar="X", help="logits are divided by it in the loss")
    parser.add_argument(
        "--skip-ignored", type=_bound, metavar="N", help="masked tokens make no product; any, or N: no more count"
    )
    parser.add_argument("--bits", choices=["fast", "batch", "tensor_parallel"], help="which bits of the head are equal")
    parser.add_argument("--logit-dtype", type=_dtype, metavar="X", help="bfloat16 or float16: logits are rounded to it")
    parser.add_argument(
        "--proof", choices=["first", "always", "off"], help="when the head is compared with the model's own loss"
    )
    parser.add_argument("--check", action="store_true", help="build the models, say what would be fused, train nothing")
    parser.add_argument("--pipeline-vocab", action="store_true", help="pipeline stages share embedding and lm head")
    parser.add_argument("--tensor-parallel", action="store_true", help="megatron.core.tensor_parallel is ours")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="all that follows is the script's")
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the fused head that were given."""
    names = ("chunk_tokens", "cache", "z_loss", "label_smoothing", "softcap", "temperature", "skip_ignored", "proof")
    return {name: value for name in (*names, "bits", "logit_dtype") if (value := getattr(options, name)) is not None}


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of tokens")
    return int(text)


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


def _cache(text: str) -> Any:
    try:
        if text in ("bounded", "auto") or 0 <= float(text) < float("inf"):
            return text if text in ("bounded", "auto") else float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be a fraction from 0 to 1, a number of bytes, bounded or auto")


def _emulate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """For the rest of the process: what the script itself leaves to `atexit` still runs on the CPU."""
    from megatron_on_cpu import megatron_on_cpu
    from megatron_on_cpu.nccl_rules import NcclRules

    emulation = ExitStack()
    try:
        emulation.enter_context(
            megatron_on_cpu(options.transformer_engine, NcclRules() if options.nccl_rules else None)
        )
    except ModuleNotFoundError as missing:
        parser.error(f"--transformer-engine: {missing}")
    atexit.register(emulation.close)


def _hush() -> None:
    """Warnings that come in every job on a CPU are not shown, unless the user has asked for them (`-W`)."""
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
        _report_after_first_step()
    if options.pipeline_vocab:
        from megatron_ext.experimental import pipeline_vocabulary

        try:
            pipeline_vocabulary.share_vocabulary()
        except RuntimeError as missing:
            parser.error(str(missing))
    if options.check:
        from megatron_ext.megatron.build_check import stop_when_built

        stop_when_built(say_on_last_rank)


def why_no_pipeline_vocabulary() -> str | None:
    """The reason for which `--pipeline-vocab` does not work here; None where it does."""
    try:
        from megatron_ext.experimental.pipeline_vocabulary.paused_forward import check_installed

        check_installed()
    except (ImportError, RuntimeError) as missing:
        return str(missing)
    return None


def _report_after_first_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from megatron_ext.megatron.fusion_report import fusion_report

    def report(*_: Any) -> None:
        handle.remove()
        say_on_last_rank(fusion_report())

    handle = register_optimizer_step_post_hook(report)


def say_on_last_rank(found: Any, file: TextIO | None = None) -> None:
    """On stderr, or in `file`. The last rank has the last stage of the pipeline, and with it the output layer."""
    from torch import distributed as dist

    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        print(found, file=file or sys.stderr, flush=True)


def _become(script: str, source: bytes) -> None:
    """Run the script as `__main__`, which it stays: worker processes and pickles look it up there."""
    module = ModuleType("__main__")
    module.__file__ = script
    module.__dict__.update(__builtins__=__builtins__, __cached__=None, __spec__=None)
    code = compile(source, script, "exec", dont_inherit=True)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
