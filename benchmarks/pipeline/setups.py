"""Models, stages and links that the schedules are compared on."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.pipeline.costs import LINKS, Model, Setup

LLAMA_8B = Model("Llama-3 8B", 32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = Model("Llama-3 70B", 80, 8192, 28672, 64, 8, 128256)
WORDS_256K = replace(LLAMA_8B, name="8B with 256k words", vocab=262144)
CASES = [  # model, stages, tensor-parallel size, chunks of a stage where schedules are interleaved
    (LLAMA_8B, 4, 1, 2),
    (LLAMA_8B, 8, 1, 2),
    (LLAMA_70B, 8, 8, 2),
    (LLAMA_70B, 16, 8, 5),
    (WORDS_256K, 4, 1, 2),
    (WORDS_256K, 8, 1, 2),
]


def setups(batches_per_stage: int = 4, **options) -> Iterator[Setup]:
    for model, stages, tensor_parallel, chunks in CASES:
        for link in LINKS.values():
            yield Setup(model, stages, tensor_parallel, chunks, batches_per_stage * stages, link, **options)
