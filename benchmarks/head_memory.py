"""`python -m benchmarks.head_memory`: GiB that the lm head of Llama 3 8B takes in a training step, before and after.

Computed, on any machine: the code of each head runs on tensors without memory, on its CUDA path, and the bytes that it
allocates beyond hidden states and weight are added up. Both gradients are among them. bf16, one GPU.
"""

import argparse

import torch

from benchmarks.cases import Case
from benchmarks.implementations import UNFUSED
from benchmarks.plan import plan

HEADS = {"Megatron-Core": UNFUSED, "megatron_ext": None, "megatron_ext, `cache=0`": 0}


def case(tokens: int) -> Case:
    return Case(f"Llama 3 8B, {tokens} tokens", tokens, 4096, 128256, 1, torch.bfloat16)


def table(lengths: tuple[int, ...] = (8192, 32768)) -> str:
    """In Markdown: a row for each head, a column for each number of tokens."""
    lines = [
        "| GiB at | " + " | ".join(f"{tokens} tokens" for tokens in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for name, head in HEADS.items():
        gib = [plan(case(tokens), head)[1] / 2**30 for tokens in lengths]
        lines.append(f"| {name} | " + " | ".join(f"{x:.1f}" for x in gib) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    print(table())
