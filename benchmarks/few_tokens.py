"""Small calls, where Python takes the time, ours beside Megatron's: `benchmarks.run cpu --only few-tokens`.

Head, loss of logits, embedding and linear layers run on 8 tokens, forward and backward, in one process for each rank. A
turn times 10 calls of one side and then of the other, so that a disturbance of the machine affects both; ratios are
taken in each turn. CPU time is less disturbed than wall-clock time, and leaves out the waits of a rank.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import ratios
from benchmarks.record import Found, Rows
from benchmarks.worlds import run_world
from megatron_ext import linear_cross_entropy, tensor_parallel, vocab_parallel_cross_entropy
from megatron_ext.memory.heads import megatrons_group
from megatron_on_cpu import megatron_on_cpu

Step = Callable[[], object]
TOKENS, WIDTH, VOCAB = 8, 16, 64
TURNS, CALLS = 100, 10  # calls of a side in a turn
STOCK, OURS = "megatron", "ours"


def pairs() -> dict[str, dict[str, Step]]:
    """Return forward and backward of Megatron's and of our function, by the name of what they compute."""
    from megatron.core import tensor_parallel as stock
    from megatron.core.model_parallel_config import ModelParallelConfig

    group, ranks = dist.group.WORLD, dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    config = ModelParallelConfig(tensor_model_parallel_size=ranks, use_cpu_initialization=True)
    options = {"config": config, "tp_group": group, "init_method": lambda x: x.normal_(generator=generator)}
    labels_T1 = torch.randint(VOCAB, (TOKENS, 1), generator=generator)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    def shard(*shape: int, dim: int) -> torch.Tensor:
        return leaf(*shape).detach().chunk(ranks, dim)[dist.get_rank()].clone().requires_grad_()

    hidden, logits = leaf(TOKENS, 1, WIDTH), shard(TOKENS, 1, VOCAB, dim=2)
    weight, ones = shard(VOCAB, WIDTH, dim=0), torch.ones(TOKENS, 1)
    output = stock.ColumnParallelLinear(WIDTH, VOCAB, bias=False, skip_weight_param_allocation=True, **options)

    def backward(forward: Callable[[], Any], *leaves: torch.Tensor) -> Step:
        def step() -> None:
            for x in leaves:
                x.grad = None
            found = forward()
            found = found[0] if isinstance(found, tuple) else found
            found.backward(ones if found.shape == ones.shape else torch.ones_like(found))

        return step

    def layer(kind: str, x: torch.Tensor, *sizes: int, **more: Any) -> dict[str, Step]:
        made = {STOCK: getattr(stock, kind), OURS: getattr(tensor_parallel, kind)}
        built = {name: make(*sizes, **more, **options) for name, make in made.items()}
        wants = [x] if x.requires_grad else []
        return {name: backward(lambda one=one: one(x), *wants, *one.parameters()) for name, one in built.items()}

    def stock_head() -> torch.Tensor:
        return stock.vocab_parallel_cross_entropy(output(hidden, weight=weight)[0], labels_T1)

    return {
        "head": {
            STOCK: backward(stock_head, hidden, weight),
            OURS: backward(lambda: linear_cross_entropy(hidden, weight, labels_T1, group), hidden, weight),
        },
        "loss of logits": {
            # Megatron's function overwrites its logits, hence the copies.
            STOCK: backward(lambda: stock.vocab_parallel_cross_entropy(logits * 1, labels_T1), logits),
            OURS: backward(lambda: vocab_parallel_cross_entropy(logits * 1, labels_T1, group), logits),
        },
        "embedding": layer("VocabParallelEmbedding", labels_T1, VOCAB, WIDTH),
        "column-parallel linear": layer("ColumnParallelLinear", leaf(TOKENS, 1, WIDTH), WIDTH, VOCAB, bias=True),
        "row-parallel linear": layer(
            "RowParallelLinear",
            leaf(TOKENS, 1, VOCAB // ranks),
            VOCAB,
            WIDTH,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        ),
    }


def measured() -> Rows:
    """Return rows of the microseconds of a call, and of the ratio to Megatron's in each turn."""
    torch.set_num_threads(1)
    rows: Rows = []
    with megatron_on_cpu(), megatrons_group(dist.group.WORLD):
        for what, steps in pairs().items():
            clocks = {"time": time.perf_counter, "CPU time": time.process_time}
            times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in steps} for clock in clocks}
            for turn in range(-2, TURNS):
                for name, step in steps.items() if turn % 2 else reversed(steps.items()):
                    starts = [now() for now in clocks.values()]
                    for _ in range(CALLS):
                        step()
                    for (clock, now), start in zip(clocks.items(), starts, strict=True):
                        if turn >= 0:
                            times[clock][name].append((now() - start) / CALLS * 1e6)
            for clock, found in times.items():
                rows += [(what, f"{clock}, {side}", "µs", found[side]) for side in (STOCK, OURS)]
                rows.append((what, f"{clock}, ours / {STOCK}", "1", ratios(found, to=STOCK)[OURS]))
    return rows


def measure(seconds: float = 0.0) -> Iterator[Found]:
    for ranks in (1, 2):
        yield f"few tokens R{ranks}", run_world(ranks, measured), []
