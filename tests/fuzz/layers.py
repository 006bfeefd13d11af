"""Cases of the tensor-parallel layers: column- and row-parallel linear, the embedding, and Megatron's cross entropy."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.tensor_parallel._layers.linear_autograd import Plan, parallel_linear
from megatron_ext.tensor_parallel.layers import VocabParallelEmbedding
from tests.fuzz.case import Case, whole
from tests.fuzz.draw import Draw


def _rows(draw: Draw):
    return lambda x, rank: x.chunk(draw.ranks)[rank]


def _last(draw: Draw):
    return lambda x, rank: x.chunk(draw.ranks, -1)[rank]


def linear(draw: Draw) -> Case:
    kind = draw.one_of("of", "column", "row")
    sequence = draw.one_of("sequence", False, True)
    lead, dtype = draw.leading(sequence, least_dims=int(sequence)), draw.dtype()
    width, outputs = (draw.integer(1, 6) * (draw.ranks if cut else 1) for cut in (kind == "row", kind == "column"))
    tokens = _rows(draw) if sequence and lead[0] else whole
    x, w = draw.strided(draw.normal(*lead, width, dtype=dtype)), draw.normal(outputs, width, dtype=dtype)
    bias = draw.normal(outputs, dtype=dtype) if draw.chance(0.5) else None
    if kind == "column":
        cuts, out = [tokens, _rows(draw), _rows(draw)], _last(draw)
        plan = ("sequence" if sequence else "replicated", "sharded")
    else:
        cuts, out = [_last(draw), _last(draw), whole], tokens
        plan = ("sharded", "sequence" if sequence else "replicated")

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        world = dist.group.WORLD if draw.ranks > 1 else None
        return [parallel_linear(mine[0], mine[1], mine[2] if bias is not None else None, Plan(world, *plan))]

    inputs = [x, w] if bias is None else [x, w, bias]
    count = max(1, torch.Size(lead).numel())
    return Case(
        f"{kind}-parallel linear",
        list(zip(inputs, cuts, strict=False)),
        lambda x, w, b=None: [F.linear(x, w, b)],
        ours,
        [draw.upstream(*lead, outputs)],
        outputs=[out],
        logit_size=4.0 * width,
        value_dtype=dtype,
        # A bias that is added on every rank of a slice has a part of the gradient there.
        wanted=[True, True] + [not (kind == "row" and sequence)] * (bias is not None),
        grad_size=8.0 * max(count, outputs),
    )


def embedding(draw: Draw) -> Case:
    dtype, width, size = draw.dtype(), draw.integer(1, 6), draw.integer(1, 12) * draw.ranks
    table = draw.normal(size, width, dtype=dtype)
    lead = draw.leading()
    ids = torch.randint(size, lead, generator=draw.generator).to(draw.one_of("ids", torch.int64, torch.int32))
    config: Any = SimpleNamespace(
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        deterministic_mode=draw.one_of("deterministic", False, True),
    )

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        layer = VocabParallelEmbedding(
            size, width, init_method=lambda w: None, config=config, tp_group=dist.group.WORLD
        )
        layer.weight = None
        del layer._parameters["weight"]
        layer.weight = mine[0]
        return [layer(ids)]

    return Case(
        "VocabParallelEmbedding",
        [(table, _rows(draw))],
        lambda table: [F.embedding(ids.long(), table)],
        ours,
        [draw.upstream(*lead, width)],
        value_dtype=dtype,
        grad_size=4.0 * max(1, torch.Size(lead).numel()),
    )
