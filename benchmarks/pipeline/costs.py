"""Costs of a language model's passes, messages and memory in a pipeline, by FLOPs, bytes and the head's launch plan.

Legend: T tokens of a micro-batch, D hidden size, V vocabulary, p pipeline stages, t tensor-parallel size.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from benchmarks.cases import Case
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import Shape, Times
from megatron_ext.head.call.gpu_properties import DEVICES, Device

WIDTH = 2  # bytes of activations, of their gradients and of weights: bf16
STATISTICS = 3  # fp32 numbers for each token that the head exchanges


@dataclass(frozen=True)
class Model:
    """A decoder with grouped queries and a gated MLP; embedding and lm head are two matrices."""

    name: str
    layers: int
    width: int
    mlp_width: int
    heads: int
    query_groups: int
    vocab: int

    @property
    def key_value_width(self) -> int:
        return self.width // self.heads * self.query_groups

    @property
    def layer_weights(self) -> int:
        """Return the number of elements of one layer's matrices."""
        return self.width * (2 * self.width + 2 * self.key_value_width + 3 * self.mlp_width)

    def layer_flops(self, tokens: int) -> int:
        """Return the FLOPs of forward for one sequence: the matrices, and the causal half of the attention scores."""
        return 2 * tokens * (self.layer_weights + tokens * self.width)

    def layer_activation_bytes(self, tokens: int) -> int:
        """Return the bytes saved for backward with flash attention and no recomputation, in bf16.

        These are both norms' inputs and outputs, queries, keys, values, attention's output, gate and up projection, and
        their product.
        """
        return WIDTH * tokens * (6 * self.width + 2 * self.key_value_width + 3 * self.mlp_width)


class Link(NamedTuple):
    """The link between neighbouring stages, for each GPU and direction."""

    name: str
    bytes_per_s: float
    latency_s: float


LINKS = {
    "NVLink": Link("NVLink", 450e9, 5e-6),
    "400 Gb/s": Link("400 Gb/s", 50e9, 10e-6),
}


class HeadSeconds(NamedTuple):
    """Seconds of one rank: logits and exponentials (2 NVH), their product with the weight (2), dW (2)."""

    statistics: float
    product: float
    weight: float


@cache
def head_seconds(tokens: int, width: int, vocab: int, ranks: int, device: Device) -> HeadSeconds:
    """Estimate the head's times by its launch plan (`benchmarks/plan.py`); without Triton by FLOPs and device rate."""
    case = Case("simulated", tokens, width, vocab, ranks, torch.bfloat16)
    if importlib.util.find_spec("triton") is None:
        return HeadSeconds(*(2 * case.nvh / device.flops,) * 3)
    from benchmarks.plan import WHOLE, plan

    launches = plan(case, WHOLE, device)[0].launches
    names = [launch.name for launch in launches]
    backward = next(at for at, launch in enumerate(launches) if launch.phase == "backward")
    last_of_dx = names.index("finish_dx_kernel")
    parts = launches[:backward], launches[backward : last_of_dx + 1], launches[last_of_dx + 1 :]
    return HeadSeconds(*(sum(launch.seconds for launch in part) for part in parts))


@dataclass(frozen=True)
class Setup:
    """One case, with sequence parallelism; layers run at the fraction `layer_rate` of the rate of large products."""

    model: Model
    stages: int
    tensor_parallel: int
    chunks: int  # of the interleaved schedules
    micro_batches: int
    link: Link
    tokens: int = 8192
    layer_rate: float = 0.7
    device: Device = DEVICES["H200"]
    data_parallel: int = 0  # ranks that share the optimizer's state; 0: none does

    @property
    def name(self) -> str:
        tensor = f" TP{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.model.name} PP{self.stages}{tensor}, {self.link.name}"

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the vocabulary."""
        return self.stages * self.tensor_parallel

    def shape(self, chunks: int) -> Shape:
        return Shape(self.stages, chunks, self.micro_batches, self.stages)

    # --- time

    @cached_property
    def layer_seconds(self) -> float:
        """Return the seconds of one layer's forward; backward takes twice as long."""
        rate = self.layer_rate * self.device.flops * self.tensor_parallel
        return self.model.layer_flops(self.tokens) / rate

    def head_seconds(self, ranks: int) -> HeadSeconds:
        return head_seconds(self.tokens, self.model.width, self.model.vocab, ranks, self.device)

    @property
    def lookup_seconds(self) -> float:
        """Return the seconds in which the embedding's rows are read and written."""
        return 2 * WIDTH * self.tokens * self.model.width / self.device.bytes_per_s

    def rows_seconds(self, ranks: int) -> float:
        """Return the seconds of the embedding's gradient: a rank reads all gradients, and adds to its rows in fp32."""
        return (WIDTH + 8 / ranks) * self.tokens * self.model.width / self.device.bytes_per_s

    @property
    def slice_bytes(self) -> int:
        """Return the bytes of a micro-batch's hidden states on one rank, or of their gradient."""
        return WIDTH * self.tokens * self.model.width // self.tensor_parallel

    def message(self, nbytes: float) -> float:
        return self.link.latency_s + nbytes / self.link.bytes_per_s

    def collective(self, nbytes: float) -> float:
        """Return the seconds of a broadcast or reduction that passes through all stages in pieces."""
        return (self.stages - 1) * self.link.latency_s + nbytes / self.link.bytes_per_s

    def times(self, chunks: int) -> Times:
        """Return the times of our passes and messages, with layers spread evenly."""
        of_chunk = self.model.layers // (self.stages * chunks) * self.layer_seconds
        head = self.head_seconds(self.ranks)
        return Times(
            forward=((of_chunk,) * chunks,) * self.stages,
            backward=((2 * of_chunk,) * chunks,) * self.stages,
            lookup=self.lookup_seconds,
            products=head.statistics + head.product,
            weight=head.weight,
            rows=self.rows_seconds(self.ranks),
            send=self.message(self.slice_bytes),
            tokens=self.collective(8 * self.tokens),
            embedding=self.collective(self.slice_bytes),
            hidden=self.collective(self.slice_bytes + 8 * self.tokens),
            statistics=self.collective(self.statistics_bytes),
            sum=self.collective(self.slice_bytes),
            grad_loss=self.collective(4 * self.tokens),
            grad_embedding=self.collective(self.slice_bytes),
        )

    # --- bytes

    @property
    def statistics_bytes(self) -> int:
        """Return the bytes that each rank sends in the all-gather of statistics."""
        return (self.ranks - 1) * STATISTICS * 4 * self.tokens

    @property
    def stock_sent_bytes(self) -> int:
        """Return the bytes that one rank sends for a micro-batch and chunk: hidden states, and their gradient."""
        return 2 * self.slice_bytes

    @property
    def our_extra_sent_bytes(self) -> int:
        """Return the bytes that one rank sends for a micro-batch beyond Megatron's: hidden states, dx, embedding and
        its gradient; statistics; token ids, labels and the losses' gradients."""
        return 4 * self.slice_bytes + self.statistics_bytes + (8 + 8 + 4) * self.tokens

    def state_bytes(self, parameters: float) -> float:
        """Return the bytes of bf16 weights, fp32 main gradients, fp32 weights and Adam's two moments: 18 for each
        parameter; the last 12 are shared by the data-parallel ranks."""
        return parameters * (6 + 12 / max(1, self.data_parallel))

    def parameters(self, layers: int, vocabulary_shares: float) -> float:
        """Return the parameters of one rank: `layers`, and `vocabulary_shares` of [V/t, D] matrices, without norms."""
        return (layers * self.model.layer_weights + vocabulary_shares * self.model.vocab * self.model.width) / (
            self.tensor_parallel
        )

    @property
    def layer_activation_bytes(self) -> float:
        """Return the bytes saved for backward by one layer for a micro-batch on one rank."""
        return self.model.layer_activation_bytes(self.tokens) / self.tensor_parallel

    def head_activation_bytes(self, ranks: int) -> float:
        """Return the bytes of a micro-batch's cached exponentials on a rank, and of all its hidden states if stages
        share the head."""
        shared = WIDTH * self.tokens * self.model.width if ranks > self.tensor_parallel else 0
        return WIDTH * self.tokens * self.model.vocab / ranks + shared


# Models, stages and links that the schedules are compared on.
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
