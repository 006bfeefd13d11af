"""Cases of the tensor-parallel layers: column- and row-parallel linear layers and the embedding, made as users do.

A layer is called one to three times, as for micro-batches, before one backward pass; for an expert's layer mappings do
the communication of the dispatcher. Tolerances are a few roundings of the largest number in a tensor.
"""

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.tensor_parallel import layers, mappings
from tests.fuzz.case import START, Case, Cut, eps, whole
from tests.fuzz.cross_entropy import results_dtype
from tests.fuzz.draw import Draw
from tests.tensor_parallel.sharded import Config

ROUNDINGS = 16


def _pieces(draw: Draw, dim: int, stride: int = 1) -> Cut:
    """Return the cut of a rank's part along `dim`, which has `stride` equal blocks, each sharded over the ranks."""
    return lambda x, rank: torch.cat(x.chunk(stride * draw.ranks, dim)[rank :: draw.ranks], dim)


def _all_pieces(draw: Draw, dim: int, stride: int) -> Cut:
    """Return the cut that has every rank's part, in the order of ranks."""
    of_rank = _pieces(draw, dim, stride)
    return lambda x, rank: torch.cat([of_rank(x, each) for each in range(draw.ranks)], dim)


@dataclass
class _Drawn:
    """Drawn parts of a case of a linear layer.

    Attributes:
        weight, cuts: the whole weight, and the functions that cut a rank's parts of weight and bias.
        weight_is_given: whether each call passes the weight.
        main_grad: dtype of the buffer to which weight gradients are added; None: there is none.
        drains: "layer" or "function", which computes deferred weight gradients; None: none are deferred.
        loaded: whether the layer is a copy of another, or has loaded its state.
        made: the layer of this rank, once it is made.
        dispatched: whether other code communicates for the layer, as the dispatcher of tokens to experts does.
        sequence: whether each rank has its slice of dim 0.
    """

    column: bool
    config: Config
    named: dict[str, Any]
    stride: int
    dtype: torch.dtype
    autocast: torch.dtype | None
    weight: Tensor
    cuts: dict[str, Cut]
    ranks: int
    weight_is_given: bool
    gathers: bool
    main_grad: torch.dtype | None
    drains: str | None
    loaded: str | None
    wants: dict[str, bool]
    made: Any = field(default=None)

    @property
    def dispatched(self) -> bool:
        return self.ranks > 1 and bool(self.named.get("is_expert"))

    @property
    def sequence(self) -> bool:
        return self.config.sequence_parallel

    @property
    def output_dtype(self) -> torch.dtype:
        return self.named.get("output_dtype") or self.autocast or self.dtype

    def new(self, rank: int) -> Any:
        def init(weight: Tensor) -> None:
            weight.copy_(self.weight if weight.shape == self.weight.shape else self.cuts["weight"](self.weight, rank))

        outputs, inputs = self.weight.shape
        cls = layers.ColumnParallelLinear if self.column else layers.RowParallelLinear
        shared = {"config": self.config, "init_method": init, "tp_group": dist.group.WORLD, "stride": self.stride}
        return cls(inputs, outputs, **shared, **self.named)

    def make(self, weight: Tensor, bias: Tensor | None, rank: int) -> Any:
        layer = self.new(rank)
        if layer.weight is not None:
            if self.config.perform_initialization:
                assert torch.equal(layer.weight, weight), "other first values"
            with torch.no_grad():
                layer.weight.copy_(weight)
        if bias is not None:
            assert not self.config.perform_initialization or not layer.bias.any(), "a bias that is not 0 at first"
            with torch.no_grad():
                layer.bias.copy_(bias)
        kept = self.named.get("keep_master_weight_for_test") and self.config.perform_initialization
        if kept and self.config.use_cpu_initialization and layer.weight is not None:
            assert torch.equal(layer.master_weight, self.weight), "another master weight"
        else:
            assert layer.master_weight is None, "a master weight"
        if self.loaded == "copied":
            layer = copy.deepcopy(layer)
        elif self.loaded == "loaded":
            state, layer = layer.state_dict(), self.new(rank)
            layer.load_state_dict(state)
        layer.used_weight = torch.nn.Parameter(weight.detach().clone()) if self.weight_is_given else layer.weight
        layer.used_weight.requires_grad_(self.wants["weight"])
        if self.main_grad is not None:
            layer.used_weight.main_grad = torch.full(weight.shape, START, dtype=self.main_grad)
        return layer

    def call(self, x: Tensor) -> Tensor:
        """Call the layer on whole tokens or slices, with all communication beside it; return the output with bias."""
        layer = self.made
        if self.dispatched and self.column:
            x = (
                mappings.gather_from_sequence_parallel_region(x, group=dist.group.WORLD)
                if self.sequence
                else mappings.copy_to_tensor_model_parallel_region(x, group=dist.group.WORLD)
            )
        elif self.named.get("disable_grad_reduce") and self.ranks > 1 and not self.sequence:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=dist.group.WORLD)
        on = contextlib.nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)
        with on:
            more: dict[str, Any] = {"weight": layer.used_weight} if self.weight_is_given else {}
            if self.gathers != bool(self.named.get("gather_output", False)):
                more["runtime_gather_output"] = self.gathers
            y, bias = layer(x, **more)
        assert y.dtype == self.output_dtype, f"output is {y.dtype}, wanted {self.output_dtype}"
        assert (bias is not None) == (self.named["skip_bias_add"] and self.named["bias"]), "what is returned as bias"
        if self.dispatched and not self.column:
            y = (
                mappings.reduce_scatter_to_sequence_parallel_region(y, group=dist.group.WORLD)
                if self.sequence
                else mappings.reduce_from_tensor_model_parallel_region(y, group=dist.group.WORLD)
            )
        return y if bias is None or self.gathers else y + bias

    def finish(self) -> None:
        """Complete gradients as Megatron does after backward: compute deferred ones, and sum those of slices."""
        layer, weight = self.made, self.made.used_weight
        if self.drains == "layer":
            layer.backward_dw()
        elif self.drains == "function":
            buffers = layer.embedding_activation_buffer, layer.grad_output_buffer
            layers.drain_embedding_wgrad_compute(self.config, *buffers, weight, dist.group.WORLD)
        if self.drains is not None:
            waiting = *layer.embedding_activation_buffer, *layer.grad_output_buffer
            assert not waiting, "gradients that still wait"
        if layer.bias is not None and getattr(layer.bias, "sequence_parallel", False) and layer.bias.grad is not None:
            dist.all_reduce(layer.bias.grad)
        if not self.wants["weight"]:
            assert weight.grad is None, "a frozen weight has a gradient"
            assert self.main_grad is None or (weight.main_grad == START).all(), "a frozen weight has a main_grad"

    def gradient_of(self, leaf: Tensor) -> Tensor | None:
        own = getattr(leaf, "stands_for", leaf)
        assert torch.equal(own, leaf), "the layer's parameter was written"
        if own is self.made.used_weight and self.main_grad is not None:
            return own.main_grad - START
        return own.grad


def _drawn(draw: Draw) -> _Drawn:
    column = draw.one_of("of", "column", "row") == "column"
    dtype = draw.dtype()
    autocast = draw.one_of("autocast", None, None, torch.bfloat16, torch.float16) if dtype == torch.float32 else None
    options = draw.options(
        sequence_parallel=(False, True),
        gradient_accumulation_fusion=(False, True),
        use_cpu_initialization=(True, False),
        perform_initialization=(True, False),
    )
    if draw.chance(0.08):  # of each shape it measures this processor's products, which takes its time
        options["batch_invariant_mode"] = True
    named = {
        "bias": draw.one_of("bias", True, False),
        "skip_bias_add": draw.one_of("skip_bias_add", False, True),
        **draw.options(is_expert=(False, False, True), keep_master_weight_for_test=(False, True)),
    }
    if column:
        named |= draw.options(
            gather_output=(False, True),
            skip_weight_param_allocation=(False, True),
            disable_grad_reduce=(False, True),
            output_dtype=(None, torch.float32, torch.float64, torch.bfloat16),
        )
    else:
        named["input_is_parallel"] = draw.one_of("input_is_parallel", True, True, False)
    drains = None
    if column and not named.get("is_expert") and draw.chance(0.3):
        options |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": draw.one_of("limit", 0, 1, 2)}
        named |= {"embedding_activation_buffer": [], "grad_output_buffer": []}
        drains = draw.one_of("drains", "layer", "function")
    weight_is_given = column and (bool(named.get("skip_weight_param_allocation")) or draw.chance(0.1))
    if weight_is_given and drains is not None:
        drains = "function"
    main_grad = None
    if options.get("gradient_accumulation_fusion"):
        main_grad = draw.one_of("main_grad", results_dtype(dtype), dtype)
    stride = draw.one_of("stride", 1, 1, 2, 3)
    sizes = [draw.integer(1, 6) * (draw.ranks * stride if cut else 1) for cut in (column, not column)]
    draw.record["weight"] = sizes
    # Drawn in no more than fp32, in which the first values on a CPU are made.
    weight = draw.normal(*sizes, dtype=torch.float32 if dtype == torch.float64 else dtype).to(dtype)
    gathers = bool(named.get("gather_output"))
    if column and draw.chance(0.1):
        gathers = not gathers
    wants = {"input": draw.chance(0.85), "weight": draw.chance(0.85)}
    if not any(wants.values()):
        wants["input"] = True
    draw.record |= {"gathers": gathers, "weight is given": weight_is_given, "wants": wants}
    cuts = {"weight": _pieces(draw, 0 if column else 1, stride), "bias": _pieces(draw, 0, stride) if column else whole}
    return _Drawn(
        column,
        Config(params_dtype=dtype, **options),
        named,
        stride,
        dtype,
        autocast,
        weight,
        cuts,
        draw.ranks,
        weight_is_given,
        gathers,
        main_grad,
        drains,
        draw.one_of("loaded", None, None, None, "copied", "loaded"),
        wants,
    )


def linear(draw: Draw) -> Case:
    it = _drawn(draw)
    column, named, stride = it.column, it.named, it.stride
    lead = draw.leading(it.sequence, least_dims=int(it.sequence))
    outputs, width = it.weight.shape
    calls = draw.one_of("calls", 1, 1, 2, 3)
    inputs = [draw.strided(draw.normal(*lead, width, dtype=it.dtype)) for _ in range(calls)]
    bias = draw.normal(outputs, dtype=it.dtype) if named["bias"] else None
    tokens: Cut = _pieces(draw, 0) if it.sequence and lead[0] else whole
    features = _pieces(draw, -1, stride)
    if column:
        of_input, of_output = tokens, _all_pieces(draw, -1, stride) if it.gathers else features
    else:
        of_input, of_output = features if named["input_is_parallel"] else _all_pieces(draw, -1, stride), tokens
    apart = column and it.gathers and named["skip_bias_add"]  # the bias of this rank's outputs, which are all there

    def truth(*given: Tensor) -> list[Tensor]:
        w, b = given[calls], given[calls + 1] if bias is not None and not apart else None
        return [F.linear(x, w, b) for x in given[:calls]]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        it.made = it.make(mine[calls], mine[calls + 1] if bias is not None else None, rank)
        mine[calls].stands_for = it.made.used_weight  # type: ignore[attr-defined]
        if bias is not None:
            mine[calls + 1].stands_for = it.made.bias  # type: ignore[attr-defined]
        return [it.call(x) for x in mine[:calls]]

    rounding = max(map(eps, (it.dtype, it.autocast or it.dtype, it.output_dtype)))
    refused = "input_is_parallel is False" if not column and it.sequence and not named["input_is_parallel"] else None
    return Case(
        f"{'column' if column else 'row'}-parallel linear",
        [*((x, of_input) for x in inputs), (it.weight, it.cuts["weight"])]
        + ([] if bias is None else [(bias, it.cuts["bias"])]),
        truth,
        ours,
        [draw.upstream(*lead, outputs) for _ in range(calls)],
        outputs=[of_output] * calls,
        logit_size=0.0,
        value_dtype=max((it.output_dtype, it.autocast or it.output_dtype), key=eps),
        wanted=[it.wants["input"]] * calls + [it.wants["weight"]] + [True] * (bias is not None),
        gradient_of=it.gradient_of,
        # Of sums over so many tokens, on their way; those of 16 bits are rounded once.
        grad_size=max(1.0, math.sqrt(calls * math.prod(lead))) if rounding < 1e-6 else 1.0,
        refused=refused,
        finish=it.finish,
        grad_rounding=rounding,
        roundings=ROUNDINGS,
    )


def embedding(draw: Draw) -> Case:
    dtype, width, size = draw.dtype(), draw.integer(1, 6), draw.integer(1, 12) * draw.ranks
    table = draw.normal(size, width, dtype=torch.float32 if dtype == torch.float64 else dtype).to(dtype)
    scattered = draw.one_of("reduce_scatter_embeddings", False, True)
    lead = (draw.integer(0, 3), draw.integer(1, 4) * draw.ranks) if scattered else draw.leading()
    ids = torch.randint(size, lead, generator=draw.generator).to(draw.one_of("ids", torch.int64, torch.int32))
    ids = draw.strided(ids)
    config = Config(
        params_dtype=dtype,
        **draw.options(
            use_cpu_initialization=(True, False), perform_initialization=(True, False), deterministic_mode=(False, True)
        ),
    )
    rows, made = _pieces(draw, 0), []
    copied, frozen = draw.chance(0.2), draw.chance(0.1)

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        layer: Any = layers.VocabParallelEmbedding(
            size,
            width,
            init_method=lambda w: w.copy_(table if w.shape == table.shape else rows(table, rank)),
            reduce_scatter_embeddings=scattered,
            config=config,
            tp_group=dist.group.WORLD,
        )
        if config.perform_initialization:
            assert torch.equal(layer.weight, mine[0]), "other first values"
        with torch.no_grad():
            layer.weight.copy_(mine[0])
        layer = copy.deepcopy(layer) if copied else layer
        made.append(layer.weight.requires_grad_(not frozen))
        return [layer(ids)]

    def gradient_of(leaf: Tensor) -> Tensor | None:
        assert torch.equal(made[0], leaf), "the layer's table was written"
        return made[0].grad

    def truth(table: Tensor) -> list[Tensor]:
        found = F.embedding(ids.long(), table)
        return [found.transpose(0, 1) if scattered else found]

    lead = (lead[1], lead[0]) if scattered else lead
    return Case(
        "VocabParallelEmbedding",
        [(table, rows)],
        truth,
        ours,
        [draw.upstream(*lead, width)],
        outputs=[_pieces(draw, 0) if scattered else whole],
        logit_size=0.0,
        value_dtype=dtype,
        wanted=[not frozen],
        gradient_of=gradient_of,
        roundings=ROUNDINGS,
    )
