"""A GPT over four pipeline stages, stock and with embedding and lm head shared by all stages: losses and timelines.

    torchrun --nproc-per-node 4 examples/pipeline_vocabulary.py

Prints both losses of each step and each stage's parameters, and draws what every stage did in the last step, stock
above and shared below, in runs/pipeline_vocabulary/timeline.png. Runs on GPUs over NCCL, or on the CPU over gloo, where
times say little: four processes share what cores there are. The order of the passes is that of a GPU.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from job import adam, gpt_stage, mean_loss, megatron_job, print_steps, run_schedule, small_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from program import ranks, take_no_arguments
from torch import Tensor

from megatron_ext.experimental import pipeline_vocabulary

LAYERS, WIDTH, VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, STEPS = 4, 64, 4096, 64, 2, 8, 5
PICTURE = Path("runs/pipeline_vocabulary/timeline.png")
COLOURS = {
    "forward": "#9aa5b1",
    "backward": "#52606d",
    "head": "#0b6e4f",
    "head result": "#f7c59f",
    "head weight gradient": "#7cc4a4",
    "embedding": "#d97706",
    "embedding gradient": "#f5c97b",
    "loss": "#b91c1c",
    "tokens": "#fde68a",
}
Span = tuple[str, float, float]  # kind of pass, start and end in seconds


def build() -> DistributedDataParallel:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = small_config(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        use_cpu_initialization=False,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
    )
    gpt = gpt_stage(config, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=False)
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)


def forward_step(micro_batches: Iterator[Tensor], model: torch.nn.Module):
    tokens = next(micro_batches).to(torch.cuda.current_device())
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, SEQUENCE)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), mean_loss


@contextmanager
def passes_of_stock() -> Iterator[list[Span]]:
    """Record the times at which Megatron's own schedule runs its passes."""
    spans: list[Span] = []

    def timed(kind, function):
        def run(*args, **kwargs):
            start = time.perf_counter()
            found = function(*args, **kwargs)
            spans.append((kind, start, time.perf_counter()))
            return found

        return run

    steps = {f"{kind}_step": timed(kind, getattr(schedules, f"{kind}_step")) for kind in ("forward", "backward")}
    with mock.patch.multiple(schedules, **steps):
        yield spans


def train(shared: bool) -> tuple[list[float], list[list[Span]], list[int]]:
    """Train; return the loss of each step, each stage's passes in the last step, and its number of parameters."""
    if shared:
        pipeline_vocabulary.share_vocabulary()
    model = build()
    optimizer = adam(model, distributed=False)
    shape = (STEPS, MICRO_BATCHES, MICRO_BATCH, SEQUENCE + 1)
    batches = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    group = parallel_state.get_pipeline_model_parallel_group()
    losses = []
    for batch in batches:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with pipeline_vocabulary.recorded() if shared else passes_of_stock() as found:
            mean = run_schedule(model, forward_step, batch, (SEQUENCE, MICRO_BATCH))
        optimizer.step()
        losses.append(mean.item())
    own = [(run.what.kind.value, run.start, run.end) for run in found] if shared else found
    spans: list = [None] * group.size()
    dist.all_gather_object(spans, own, group=group)
    sizes: list = [None] * group.size()
    dist.all_gather_object(sizes, sum(p.numel() for p in model.parameters()), group=group)
    if shared:
        pipeline_vocabulary.restore()
    return losses, spans, sizes


def draw(runs: dict[str, list[list[Span]]], path: Path) -> None:
    """Draw one row for each stage of each run, with a bar for each pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    picture = Figure(figsize=(11, 5.5), layout="constrained")
    for axes, (title, stages) in zip(picture.subplots(len(runs), 1), runs.items(), strict=True):
        begin = min(start for spans in stages for _, start, _ in spans)
        for stage, spans in enumerate(stages):
            for kind, start, end in spans:
                axes.barh(stage, 1e3 * (end - start), left=1e3 * (start - begin), color=COLOURS[kind], height=0.8)
        axes.set(title=title, yticks=range(len(stages)), ylabel="stage", xlabel="ms")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    picture.legend(handles=[Patch(color=c, label=k) for k, c in COLOURS.items()], loc="outside lower center", ncols=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=130)


def main() -> None:
    with megatron_job(pipeline=ranks(2, 4)):  # layers divide by the stages
        stock, stock_spans, stock_sizes = train(shared=False)
        shared, shared_spans, shared_sizes = train(shared=True)
        print_steps(digits=6, stock=stock, shared=shared)
        if dist.get_rank() == 0:
            print(f"parameters of each stage: {stock_sizes} stock, {shared_sizes} shared")
            draw({"Megatron-Core": stock_spans, "vocabulary shared by all stages": shared_spans}, PICTURE)
            print(f"what every stage did in the last step: {PICTURE}")


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
