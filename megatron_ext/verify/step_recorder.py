"""Record loss, gradient norm, memory and time of a script's first steps, without a change to the script.

A step's loss is the sum of the scalars from which backward starts: with Megatron's schedules the losses of its
micro-batches, on the last stage of a pipeline. The gradient norm is that which Megatron's optimizer returns, over all
ranks and before clipping. For any other optimizer it is the norm of this rank's gradients, before torch's functions
clip them.
"""

import functools
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_ext.replace import Replacement, in_modules
from megatron_ext.verify.side_by_side import RecordedStep


def file_of_rank(folder: str | os.PathLike, name: str) -> Path:
    """Return the file into which this process's rank records the run `name`."""
    return Path(folder) / f"{name}-{os.environ.get('RANK', '0')}.jsonl"


def read_steps(file: Path) -> list[RecordedStep]:
    """Return the recorded steps; none if there is no file."""
    return [RecordedStep(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


class StepRecorder:
    """Recorder that writes each step into `file`, and ends the script with SystemExit after `steps` steps."""

    def __init__(self, file: Path, steps: int, on_gpu: bool):
        self.file, self.steps, self.on_gpu = file, steps, on_gpu
        self._losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._unclipped: dict[Tensor, Tensor] = {}  # norms of gradients, by parameter
        self._backwards = self._done = self._depth = 0
        self._before: float | None = None

    def start(self) -> None:
        """Record from now on the steps of all optimizers and backward passes in this process."""
        Replacement(torch.autograd, "backward", self._seen).apply()
        clips = "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"
        for module, name, _ in [*in_modules(getattr(torch.nn.utils, name) for name in clips)]:
            Replacement(module, name, self._clipping).apply()
        register_optimizer_step_pre_hook(self._norm_of)
        register_optimizer_step_post_hook(self._after_torch)
        try:
            from megatron.core.optimizer import optimizer as megatron_optimizers
            from megatron.core.pipeline_parallel import schedules
        except ImportError:
            return
        Replacement(schedules, "custom_backward", self._seen).apply()
        kinds = [megatron_optimizers.MegatronOptimizer]
        for kind in kinds:
            kinds += kind.__subclasses__()
            if "step" in vars(kind):
                Replacement(kind, "step", self._stepping).apply()

    def _seen(self, backward: Any) -> Any:
        def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._backwards += 1
            self._unclipped.clear()
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if grad_tensors is None and len(roots) == 1 and roots[0].numel() == 1:
                self._losses.append(roots[0].detach().clone())
            return backward(tensors, grad_tensors, *args, **kwargs)

        return run

    def _clipping(self, clip: Any) -> Any:
        @functools.wraps(clip)
        def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            for one in parameters:
                if one.grad is not None and one not in self._unclipped:
                    self._unclipped[one] = _norm(one.grad)
            return clip(parameters, *args, **kwargs)

        return run

    def _stepping(self, step: Any) -> Any:
        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                found = step(optimizer, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                # Megatron's norm is 0 if it does not clip; then it is unknown.
                self._norm = found[1] or None if isinstance(found, tuple) and len(found) > 1 else None
                self._ended()
            return found

        return run

    def _norm_of(self, optimizer: Any, *_: Any) -> None:
        if self._depth:
            return
        owned = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = [self._unclipped[p] if p in self._unclipped else _norm(p.grad) for p in owned]
        self._norm = torch.stack([x.cpu() for x in norms]).norm() if norms else None

    def _after_torch(self, *_: Any) -> None:
        if not self._depth:
            self._ended()

    def _ended(self) -> None:
        if not self._backwards:  # no backward since the last step: a second optimizer in the same step
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        loss = sum(float(x) for x in self._losses) if self._losses else None
        norm = None if self._norm is None else float(self._norm)
        seconds = None if self._before is None else now - self._before
        with self.file.open("a") as file:
            step = RecordedStep(loss, norm, self._peak_mib(), seconds, _losses_fused())
            file.write(json.dumps(asdict(step)) + "\n")
        self._losses, self._norm, self._backwards = [], None, 0
        self._done, self._before = self._done + 1, time.perf_counter()
        if self._done == self.steps:
            raise SystemExit(0)

    def _peak_mib(self) -> float:
        """Return the allocator's peak since the last step on a GPU; on a CPU the process's peak so far."""
        if not self.on_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        peak: float = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
        return peak


def _norm(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach().float().norm()


def _losses_fused() -> int:
    """Return how many losses and read-outs of Megatron's models were fused in this process so far."""
    reports: Any = sys.modules.get("megatron_ext.megatron.fusion_report")
    return 0 if reports is None else sum(one.losses_fused + one.read_outs for one in reports.fusion_report().models)
