"""The base class of read-outs, and the two functions that run any of them over chunks of tokens.

A read-out says what it takes from a chunk of logits, what the shards' statistics together mean, and what its gradient
is. `FromLogits` runs it over logits that exist; `FromHidden` over those that a matmul makes, a chunk at a time, forward
and backward. Cross entropy and its kin, which need no logits in backward, have `linear.py` instead.

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.engine import agreement, statistics
from megatron_ext.head.engine.chunk_sizes import chunks
from megatron_ext.head.engine.flatten import in_runs, new_gradient, rows_of, tokens_of
from megatron_ext.head.engine.once_differentiable import differentiable_once
from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.head.row_passes import matmul
from megatron_ext.head.row_passes.dispatch import row_statistics
from megatron_ext.head.row_passes.logit_passes import MAX, SUM_EXP, accumulation_dtype
from megatron_ext.head.validation.argument_checks import check_exchange

# Logits of a chunk, and where there is a teacher its logits of it.
Logits = Sequence[Tensor]

OWN = 3  # statistics that every read-out has: those of `row_statistics`


@dataclass(frozen=True)
class ReadOut(ABC):
    """What one call reads out of logits.

    Attributes:
        options: of the call.
    """

    options: HeadOptions

    in_step: ClassVar[bool] = False  # whether `scan` communicates: then all ranks must cut the tokens alike

    @property
    @abstractmethod
    def more(self) -> int:
        """Statistics beside the three of `row_statistics`."""

    @abstractmethod
    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        """Write the statistics of this rank's columns, `[OWN + more, t]`, for the tokens `rows`."""

    @abstractmethod
    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Per-token results, and what `pull` wants of forward: nothing of vocabulary size in either."""

    @abstractmethod
    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        """Write the gradient of the chunk's logits, given that of the first result for all tokens."""

    def begin(self, tokens: int, device: torch.device) -> None:  # noqa: B027
        """What the ranks must agree on before the first chunk. Nothing, for most: the exchange shows it in the end."""

    @property
    def width(self) -> int:
        """Columns by which chunks are measured."""
        return self.options.vocab.columns

    def chunks(self, tokens: int, device: torch.device) -> list[slice]:
        """All tokens, by chunks."""
        return chunks(slice(0, tokens), self.options.chunk_tokens, self.width)

    def exchange(self, stats_KT: Tensor, places_T: Tensor | None) -> Tensor:
        """Every rank's statistics, `[R, K, T + 1]`. Communicates: 1 all-gather. See `statistics.exchange`."""
        return statistics.exchange(stats_KT, self.options, places_T)

    def labels(self, tokens: Tensor) -> Tensor:
        """Ids that the call asks for, `[T]` or `[T, N]`, or none: all ranks must ask for the same ones, and one past a
        rank's columns shows that it has a shard, not the whole vocabulary."""
        return tokens.new_empty(0, dtype=torch.int64)

    def refuse(self, like: Tensor, tokens: int) -> None:
        """Take part in the exchange that the other ranks wait in, telling them that this one refused its arguments."""
        statistics.refuse(tokens, self.options, accumulation_dtype(like.dtype), like.device, OWN + self.more)

    def own_statistics(self, z_tV: Tensor, stats_Kt: Tensor, with_sum: bool = True) -> None:
        """The first statistics, of `row_statistics`; without a sum, for which all logits are read, a fingerprint."""
        o = self.options
        if not with_sum:
            stats_Kt.zero_()
            stats_Kt[MAX : SUM_EXP + 1] = fingerprint(z_tV, o.vocab.counted)
            return
        nowhere = torch.full((z_tV.shape[0],), -1, device=z_tV.device)
        last = (o.vocab.counted, None, o.temperature, False, o.entropy, False)
        row_statistics(z_tV, nowhere, stats_Kt, None, None, None, *last)


def fingerprint(z_tV: Tensor, counted: int) -> Tensor:
    """`[2, t]`: a logit and the sum of a few, by which the same logits on every rank show, instead of all of them."""
    if not counted:
        return z_tV.new_zeros(2, z_tV.shape[0], dtype=accumulation_dtype(z_tV.dtype))
    few_tn = z_tV[:, : counted : max(1, counted // 16)].to(accumulation_dtype(z_tV.dtype))
    return torch.stack([few_tn[:, 0], few_tn.sum(1)])


class FromLogits(torch.autograd.Function):
    """The results of `read_out` from logits `[T, V]`, or as `Flat.rows` has them, and a teacher's, which get no
    gradient. Saves the logits. `places_T`: of their tokens, see `Flat.places`.

    Communicates: forward what the read-out's exchange does, backward nothing.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, teacher: Tensor | None, read_out: ReadOut, places_T: Tensor | None):
        logits = [z] if teacher is None else [z, teacher]
        tokens = tokens_of(z)
        read_out.begin(tokens, z.device)
        stats_KT = _room(z, tokens, read_out)
        chunks = read_out.chunks(tokens, z.device)
        for rows in chunks if read_out.in_step else _in_runs(logits, chunks):
            read_out.scan([rows_of(each, rows) for each in logits], rows, stats_KT[:, rows])
        results, saved = _combined(stats_KT, read_out, places_T)
        _prepare(ctx, read_out, results, [*logits, *saved], len(logits))
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        if grads[0] is None:
            return None, None, None, None
        logits, saved = _saved(ctx)
        dz = new_gradient(logits[0])
        for rows in _in_runs(logits, ctx.read_out.chunks(tokens_of(dz), dz.device)):
            ctx.read_out.pull(
                lambda rows=rows: [rows_of(z, rows) for z in logits], rows, saved, grads[0], rows_of(dz, rows)
            )
        return dz.view(logits[0].shape), None, None, None


def _in_runs(logits: Logits, chunks: Iterable[slice]) -> Iterable[slice]:
    for z in logits:
        chunks = in_runs(z, chunks)
    return chunks


class FromHidden(torch.autograd.Function):
    """The results of `read_out` from hidden states `[T, D]` and weight `[V, D]`, and a teacher's two.

    Never holds more than a chunk of logits: backward makes them again, 8 T V D FLOPs in all (6 where the read-out's
    gradient needs none). Weight gradients add up in fp32. `sizes`: with the sequence layout, where hidden states are
    this rank's slice, the number of each rank's tokens; else None.

    Communicates, at several ranks: forward what the exchange does, backward one all-reduce of dx. With the sequence
    layout each also gathers the hidden states, with the teacher's in the same collective, and dx is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_VD: Tensor,
        teacher_x_TD: Tensor | None,
        teacher_w_VD: Tensor | None,
        read_out: ReadOut,
        sizes: list[int] | None,
    ):
        inputs = [x_TD, w_VD]
        if teacher_x_TD is not None and teacher_w_VD is not None:
            inputs += [teacher_x_TD, teacher_w_VD]
        with torch.autocast(x_TD.device.type, enabled=False):
            makers = _makers(inputs, read_out.options, sizes)
            tokens = makers[0].tokens
            read_out.begin(tokens, x_TD.device)
            stats_KT = _room(x_TD, tokens, read_out)
            for rows in read_out.chunks(tokens, w_VD.device):
                read_out.scan([make(rows) for make in makers], rows, stats_KT[:, rows])
            results, saved = _combined(stats_KT, read_out)
        _prepare(ctx, read_out, results, [*inputs, *saved], len(inputs))
        ctx.sizes = sizes
        # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
        ctx.parameter = w_VD if read_out.options.fuse_main_grad else None
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        if grads[0] is None:
            return (None,) * 6
        inputs, saved = _saved(ctx)
        with torch.autocast(inputs[0].device.type, enabled=False):
            dx_TD, dw_VD = _hidden_gradients(ctx, inputs, saved, grads[0])
        return dx_TD, dw_VD, None, None, None, None


def _hidden_gradients(ctx: Any, inputs: Sequence[Tensor], saved: list[Tensor], grad: Tensor):
    read_out, sizes, weight_VD = ctx.read_out, ctx.sizes, inputs[1]
    group = read_out.options.group
    makers = _makers(inputs, read_out.options, sizes)
    x_TD, w_VD = makers[0].x_TD, makers[0].w_VD
    tokens = makers[0].tokens
    need_dx, need_dw = ctx.needs_input_grad[:2]
    dx_TD = torch.empty_like(x_TD) if need_dx else None
    fused = main_grad.buffer_of(ctx.parameter) if need_dw and read_out.options.fuse_main_grad else None
    total_VD = None
    if need_dw:
        total_VD = (
            weight_VD.new_zeros(weight_VD.shape, dtype=accumulation_dtype(w_VD.dtype)) if fused is None else fused
        )
    for rows in read_out.chunks(tokens, w_VD.device):
        dz_tV = x_TD.new_empty(rows.stop - rows.start, w_VD.shape[0])
        read_out.pull(lambda rows=rows: [make(rows) for make in makers], rows, saved, grad, dz_tV)
        if dx_TD is not None:
            dx_TD[rows] = matmul.add_product(None, dz_tV, w_VD)
        if total_VD is not None:
            main_grad.add_product(total_VD, dz_tV, x_TD[rows])
        del dz_tV  # before the next one is made
    if dx_TD is not None and tokens:
        if sizes is not None:
            dx_TD = collectives.reduce_scatter(dx_TD, group, sizes=sizes)
        else:
            dx_TD = collectives.all_reduce(dx_TD, group, in_place=True)
    if fused is not None:
        return dx_TD, main_grad.finish(ctx.parameter, weight_VD.dtype)
    return dx_TD, None if total_VD is None else total_VD.to(weight_VD.dtype)


class _Maker:
    """Makes the logits of a chunk of tokens, in forward and in backward by the same matmul."""

    def __init__(self, x_TD: Tensor, w_VD: Tensor):
        self.x_TD, self.w_VD, self.tokens = x_TD, w_VD, x_TD.shape[0]

    def __call__(self, rows: slice) -> Tensor:
        return matmul.logits(self.x_TD[rows], self.w_VD)


def _makers(inputs: Sequence[Tensor], options: HeadOptions, sizes: list[int] | None) -> list[_Maker]:
    """The student's, and the teacher's where there is one, with all tokens' hidden states."""
    hidden = [*inputs[::2]]
    if sizes and any(sizes):
        hidden = gather_tokens(hidden, options.group, sizes)
    return [_Maker(x_TD, w_VD.to(x_TD.dtype)) for x_TD, w_VD in zip(hidden, inputs[1::2], strict=True)]


def gather_tokens(hidden: list[Tensor], group: Group, sizes: list[int]) -> list[Tensor]:
    """All ranks' tokens of each `[t, D]`, whose D and dtypes may differ. Communicates: 1 all-gather."""
    if len(hidden) == 1:
        return [collectives.all_gather(hidden[0], group, sizes=sizes)]
    dtypes = [x.dtype for x in hidden]
    alike = len(set(dtypes)) == 1
    sides = hidden if alike else [x.contiguous().view(torch.uint8) for x in hidden]
    whole = collectives.all_gather(torch.cat(sides, 1), group, sizes=sizes)
    found = whole.split([x.shape[1] for x in sides], 1)
    return [x if alike else x.contiguous().view(dtype) for x, dtype in zip(found, dtypes, strict=True)]


def _room(like: Tensor, tokens: int, read_out: ReadOut) -> Tensor:
    dtype = accumulation_dtype(like.dtype)
    return statistics.new_statistics(tokens, read_out.options, dtype, like.device, OWN + read_out.more)


def _combined(stats_KT: Tensor, read_out: ReadOut, places_T: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    labels = read_out.labels(stats_KT)
    statistics.sign(stats_KT, read_out.options, labels, places_T, **agreement.scalars(read_out))
    stats_RKT = read_out.exchange(stats_KT, places_T)
    check_exchange(stats_RKT, labels, read_out.options)
    return read_out.combine(stats_RKT, stats_KT)


def _prepare(ctx: Any, read_out: ReadOut, results: list[Tensor], tensors: list[Tensor], inputs: int) -> None:
    ctx.set_materialize_grads(False)
    ctx.read_out, ctx.inputs = read_out, inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*results[1:])


def _saved(ctx: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs, and the rest of what `_prepare` kept. Asked for once: recomputation hands out each tensor once."""
    tensors = list(ctx.saved_tensors)
    return tensors[: ctx.inputs], tensors[ctx.inputs :]
