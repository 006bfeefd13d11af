"""`python -m benchmarks.head_memory`: GiB that the lm head of Llama 3 8B takes in a training step, before and after.

Computed, on any machine: the code of each head runs on tensors without memory, on its CUDA path, and the bytes that it
allocates beyond hidden states and weight are added up. Both gradients are among them. bf16.
"""

import argparse

import torch

from benchmarks import record
from benchmarks.cases import Case
from benchmarks.implementations import UNFUSED, ours
from benchmarks.plan import plan

HEADS = {"Megatron-Core": UNFUSED, "megatron_ext": ours(None), "megatron_ext, `cache=0`": ours(0)}
# By heading of the column: (tokens, tensor-parallel ranks).
SIZES = {"8192 tokens": (8192, 1), "32768 tokens": (32768, 1), "8192 tokens, a rank of TP 8": (8192, 8)}


def case(name: str) -> Case:
    tokens, ranks = SIZES[name]
    return Case(f"Llama 3 8B, {name}", tokens, 4096, 128256, ranks, torch.bfloat16)


def table() -> str:
    """Return a table in Markdown: a row for each head, a column for each of `SIZES`."""
    lines = []
    for name, head in HEADS.items():
        gib = [plan(case(size), head)[1] / 2**30 for size in SIZES]
        lines.append([name, *(f"{x:.2f}" if x < 1 else f"{x:.1f}" for x in gib)])
    return record.markdown(["GiB at", *SIZES], lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    print(table())
