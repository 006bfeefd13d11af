"""What the fused head and our layers would do in a user's model: it is built by its own script, and nothing is trained.

Megatron-LM's scripts build their models in `megatron.training.training.get_model`, after Megatron has parsed its
arguments and set up its groups. `stop_when_built` has that function report and end the process.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.megatron import model_seams


def check_model(model: Any) -> list[str]:
    """What would be fused in a model or in a list of its pipeline chunks, and whose linear layers it has, in words.

    Communicates nothing. A chunk of another pipeline stage than the last has no loss; it says so.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    lines = []
    for chunk in chunks:
        lines += _loss_of(chunk)
    return lines + _layers_of(chunks)


def _loss_of(chunk: Any) -> list[str]:
    try:
        found = model_seams.models_inside(chunk)
    except ValueError as error:
        return [f"not fused: {error}"]
    lines = []
    for one in found:
        name = type(one).__name__
        layer = model_seams.output_layer(one)
        if layer is None:
            lines.append(f"{name}: no output layer on this pipeline stage, nothing to fuse")
            continue
        try:
            model_seams.check_supported(one)
            reason = model_seams.why_not_fused(one)
        except ValueError as error:
            reason = str(error)
        lines.append(f"{name}: loss not fused: {reason}" if reason else f"{name}: loss fused, no logits in training")
    return lines or ["no language model on this pipeline stage, nothing to fuse"]


def _layers_of(chunks: list[Any]) -> list[str]:
    homes = Counter(
        type(m).__module__.split(".")[0]
        for chunk in chunks
        for m in chunk.modules()
        if "ParallelLinear" in type(m).__name__ or "ParallelEmbedding" in type(m).__name__
    )
    return [f"parallel layers: {homes['megatron_ext']} of megatron_ext, {homes['megatron']} of Megatron-Core"]


class Built(SystemExit):
    """The model was built and reported on: the process ends with exit code 0."""


def stop_when_built(report: Callable[[list[str]], None]) -> None:
    """Have Megatron-LM's `get_model` give its model to `check_model`, call `report` and raise `Built`, from now on.

    Raises:
        ImportError: there is no `megatron.training`; PyPI's package holds `megatron.core` alone.
    """
    training: Any = importlib.import_module("megatron.training.training")
    build = training.get_model

    def build_and_stop(*args: Any, **kwargs: Any) -> None:
        kwargs["wrap_with_ddp"] = False  # neither gradient buffers nor their collectives
        with torch.no_grad():
            model = build(*args[:2], **kwargs)
        report(check_model(model))
        raise Built(0)

    training.get_model = build_and_stop
    # No data is read: what reads it need not be compiled.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None  # type: ignore[attr-defined]
