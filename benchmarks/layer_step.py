"""`python -m benchmarks.run cpu --only layers`: a step of a small GPT on one CPU rank, our layers beside Megatron's.

Our layers replace Megatron's in a whole process, so each side has its own process; the two take turns. The CPU times of
a step, forward and backward, are compared, which other processes disturb less than wall-clock times.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import ratios
from benchmarks.record import Found, Rows
from benchmarks.worlds import start_rank

STOCK, OURS = "megatron layers", "our layers"
SIZES = {"num_layers": 4, "num_attention_heads": 8}
SEQUENCE, VOCAB = 128, 1024
BATCHES = {256: 4, 1024: 1}  # by hidden size


def _side(ours: bool, width: int, store: str, pipe) -> None:
    """Build one side's model and send the first step's loss; then run a step at each message, and send its time."""
    from megatron_ext import substitute_tensor_parallel
    from tests.gpt import causal_mask, model_parallel, tiny_batches, tiny_gpt

    start_rank(0, 1, store)
    torch.set_num_threads(1)
    with model_parallel():
        spec = None
        if ours:
            substitute_tensor_parallel()
            from megatron_ext.megatron.layer_specs import gpt_block_spec as spec
        sizes = SIZES | {"hidden_size": width, "ffn_hidden_size": 4 * width}
        (model,) = tiny_gpt(spec, vocab_size=VOCAB, model={"max_sequence_length": SEQUENCE}, **sizes)
        (tokens_BS,) = tiny_batches(batch=BATCHES[width], seq=SEQUENCE, vocab_size=VOCAB)
        inputs, labels = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
        positions, mask = torch.arange(SEQUENCE).expand_as(inputs), causal_mask(SEQUENCE)

        def step() -> float:
            model.zero_grad()
            loss = model(inputs, positions, mask, labels=labels).mean()
            loss.backward()
            return loss.item()

        pipe.send(step())
        while pipe.recv():
            start = time.process_time()
            step()
            pipe.send((time.process_time() - start) * 1e3)
    dist.destroy_process_group()


def measure(seconds: float = 5.0) -> Iterator[Found]:
    for width in BATCHES:
        yield f"layers, GPT of {SIZES['num_layers']}, width {width}", measure_layers(seconds, width), []


def measure_layers(budget_s: float, width: int) -> Rows:
    """Return rows (impl, metric, unit, values): milliseconds, and the ratio of the two sides in each round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in (STOCK, OURS):
            pipes[name], theirs = context.Pipe()
            store = str(Path(folder) / name.replace(" ", "_"))
            processes.append(context.Process(target=_side, args=(name == OURS, width, store, theirs), daemon=True))
            processes[-1].start()
            theirs.close()  # else `recv` would wait forever for a side that has died
        stock_loss, our_loss = (pipes[name].recv() for name in (STOCK, OURS))
        if not abs(our_loss - stock_loss) <= 1e-5 * abs(stock_loss):
            raise ValueError(f"our layers' loss is {our_loss}, Megatron's {stock_loss}: no time of a wrong step counts")
        times: dict[str, list[float]] = {name: [] for name in pipes}
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end or len(times[OURS]) < 5:
            for name, pipe in pipes.items():
                pipe.send(True)
                times[name].append(pipe.recv())
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(False)
            process.join()
    return [(name, "CPU time", "ms", found) for name, found in times.items()] + [
        (name, "CPU time / stock", "1", found) for name, found in ratios(times, to=STOCK).items()
    ]
