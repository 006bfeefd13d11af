"""The same GPT pretrained twice, by stock Megatron-Core and with our layers and head: a table and runs/demo/report.png.

Tensor-parallel over two GPUs, or else two CPU processes; on one GPU by a single rank.
"""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from uuid import uuid4

import report
import torch
from program import check_writable
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

MODEL = {
    "num-layers": 4,
    "hidden-size": 192,
    "num-attention-heads": 6,
    "seq-length": 256,
    "vocab-size": 16384,
    "micro-batch-size": 4,
    "global-batch-size": 8,
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "lr": 6e-4,
    "min-lr": 6e-5,
    "lr-decay-style": "cosine",
}
RUNS = {"Megatron-Core": ("stock", "stock"), "megatron_ext": ("fused", "ext")}  # name: head, layers


def pretrain(ranks: int, arguments: dict) -> None:
    """Run pretrain_gpt.py as `torchrun` would; return when all ranks have ended."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=0,
    )
    script = Path(__file__).with_name("pretrain_gpt.py")
    flags = ["--use-cpu-initialization"]  # so that both runs start from the same weights
    for name, value in arguments.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    elastic_launch(config, sys.executable)("-u", str(script), *flags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", metavar="FILE", help="text to learn; default: Python's own documentation")
    parser.add_argument("--train-iters", type=int, default=30, metavar="N")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    args = parser.parse_args()

    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    ranks = 1 if gpus == 1 else 2
    where = f"{ranks} GPU{'s' * (ranks > 1)} (NCCL)" if gpus else f"{ranks} CPU processes (gloo)"
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.disable(logging.WARNING)  # of the launcher; its errors and the ranks' output are shown
    try:
        check_writable(out=args.out)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"A GPT of {MODEL['num-layers']} layers, width {MODEL['hidden-size']}, vocabulary {MODEL['vocab-size']}, "
        f"tensor parallel {ranks} on {where}.\nTwo runs of {args.train_iters} steps from the same seed:",
        flush=True,
    )
    start = time.perf_counter()
    results = []
    for title, (head, layers) in RUNS.items():
        metrics = args.out / f"{layers}.json"
        own = {"head": head, "layers": layers, "metrics": metrics, "title": title}
        common = {"tensor-model-parallel-size": ranks, "train-iters": args.train_iters, "device": args.device}
        common["lr-warmup-iters"] = args.train_iters // 12
        files = {"data": args.data} if args.data else {}
        try:
            pretrain(ranks, MODEL | common | own | files)
        except (SignalException, KeyboardInterrupt):
            sys.exit("\ninterrupted: all ranks have ended")
        except ChildFailedError:
            sys.exit("a rank failed; its own message stands above")
        results.append(json.loads(metrics.read_text()))

    stock, ours = results
    tokens = MODEL["micro-batch-size"] * MODEL["seq-length"]
    columns = MODEL["vocab-size"] // ranks
    sizes = f"{tokens} tokens, width {MODEL['hidden-size']}, {columns} vocabulary columns per rank"
    figure = args.out / "report.png"
    report.figure(stock, ours, f"GPT on {where}, tensor parallel {ranks}.  Head at {sizes}.", figure)
    print(f"\n{report.table(stock, ours)}\n")
    print(f"Head step: forward and backward from hidden states to loss; {sizes}; what one rank allocates for it.")
    print("Least memory: cache=0, chunk_tokens=128. The run itself had cache=1, the fastest.")
    print(f"{report.gained(stock, ours)}\n{time.perf_counter() - start:.0f} s.  Look at {figure}")
    if not gpus and report.largest_difference(stock, ours) > 1e-5:  # on a CPU both runs round alike
        sys.exit("the losses of the two runs differ by more than rounding")


if __name__ == "__main__":
    main()
