"""Communication of the package by torch.distributed: four collectives on tensors, each also split into start and wait,
and for pipeline stages broadcasts, sums on one rank and messages from rank to rank.

`start_x(...)` begins a collective and returns a `Pending`; `.wait()` gives its result. `x(...)` is both at once. With a
group of one rank (or None) nothing is communicated and the result is the input itself (contiguous).

Every function is out of place unless it says otherwise: a caller's tensor is never written. Inputs may be
non-contiguous. `sizes` are the lengths of each rank's piece along `dim` for uneven splits; gloo and NCCL gather equal
pieces only, so uneven ones travel padded to the longest, still as one collective.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from megatron_ext.distributed.groups import Group, group_rank, group_size

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these two and warns at each call of the old names.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective or a message under way. `wait()` returns its result, and returns the same one when called again."""

    def __init__(self, result: Tensor, work: Any = None, finish: Callable[[Tensor], Tensor] | None = None):
        self._result, self._work, self._finish = result, work, finish

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


def contiguous(x: Tensor) -> Tensor:
    """Return `x.contiguous()`, while compiling always as a new tensor on that memory: torch before 2.13 compiles a
    function that returns a contiguous input itself with a gradient of zero."""
    x = x.contiguous()
    return x.view_as(x) if torch.compiler.is_compiling() else x


def start_all_reduce(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = False) -> Pending:
    """Begin the elementwise `op` ("sum", "max", "min") of every rank's `x`. `in_place` overwrites a contiguous `x`."""
    if group is None or group_size(group) == 1:
        return Pending(contiguous(x))
    if torch.compiler.is_compiling():
        return Pending(functional.all_reduce(x, op, group), finish=functional.wait_tensor)
    out = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return Pending(out, dist.all_reduce(out, op=_OPS[op], group=group, async_op=True))


def start_all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending:
    """Begin to join every rank's `x` along `dim`, in rank order."""
    size = group_size(group)
    if group is None or size == 1:
        return Pending(contiguous(x))
    piece = (x.movedim(dim, 0) if dim else x).contiguous()
    even = sizes is None or len(set(sizes)) == 1
    longest = piece.shape[0] if sizes is None else max(sizes)
    if not even and piece.shape[0] < longest:
        piece = torch.cat([piece, piece.new_zeros(longest - piece.shape[0], *piece.shape[1:])])

    def finish(out: Tensor) -> Tensor:
        if not even:
            assert sizes is not None
            out = torch.cat([rows[:n] for rows, n in zip(out.split(longest), sizes, strict=True)])
        return contiguous(out.movedim(0, dim)) if dim else out

    if torch.compiler.is_compiling():
        # Not `all_gather_tensor`: torch before 2.13 asks there for strides, which a compiled backward cannot tell.
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(piece, size, group.group_name)
        return Pending(gathered, finish=lambda out: finish(functional.wait_tensor(out)))
    out = piece.new_empty(size * longest, *piece.shape[1:])
    return Pending(out, _all_gather_single(out, piece, group=group, async_op=True), finish)


def start_reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending:
    """Begin to sum every rank's `x` and to keep this rank's piece of the sum along `dim`."""
    size = group_size(group)
    if group is None or size == 1:
        return Pending(contiguous(x))
    whole = x.movedim(dim, 0)
    even = sizes is None or len(set(sizes)) == 1
    own = whole.shape[0] // size if sizes is None else sizes[group_rank(group)]
    if not even:
        assert sizes is not None
        longest = max(sizes)
        padded = whole.new_zeros(size, longest, *whole.shape[1:])
        for row, piece in zip(padded, whole.split(list(sizes)), strict=True):
            row[: piece.shape[0]] = piece
        whole = padded.flatten(0, 1)
    whole = whole.contiguous()

    def finish(out: Tensor) -> Tensor:
        return contiguous(out[:own].movedim(0, dim))

    if torch.compiler.is_compiling():
        scattered = functional.reduce_scatter_tensor(whole, "sum", 0, group)
        return Pending(scattered, finish=lambda out: finish(functional.wait_tensor(out)))
    out = whole.new_empty(whole.shape[0] // size, *whole.shape[1:])
    return Pending(out, _reduce_scatter_single(out, whole, group=group, async_op=True), finish)


def start_all_to_all(
    x: Tensor,
    group: Group,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> Pending:
    """Begin to send piece i of `x`'s rows (`input_sizes`, equal if None) to rank i; the pieces received are joined."""
    if group is None or group_size(group) == 1:
        return Pending(contiguous(x))
    x = x.contiguous()
    received = [int(n) for n in output_sizes] if output_sizes is not None else None
    sent = [int(n) for n in input_sizes] if input_sizes is not None else None
    if torch.compiler.is_compiling():
        return Pending(functional.all_to_all_single(x, received, sent, group), finish=functional.wait_tensor)
    out = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
    return Pending(out, dist.all_to_all_single(out, x, received, sent, group=group, async_op=True))


def start_broadcast(x: Tensor, group: Group, source: int) -> Pending:
    """Begin to copy `x` of the group's rank `source` to every rank. In place: `x` is the buffer on the others."""
    if group is None or group_size(group) == 1:
        return Pending(x)
    return Pending(x, dist.broadcast(x, src=dist.get_global_rank(group, source), group=group, async_op=True))


def start_reduce(x: Tensor, group: Group, target: int) -> Pending:
    """Begin to sum every rank's contiguous `x` on the group's rank `target`. In place: the others' `x` is lost."""
    if group is None or group_size(group) == 1:
        return Pending(x)
    return Pending(x, dist.reduce(x, dst=dist.get_global_rank(group, target), group=group, async_op=True))


def start_send(x: Tensor, group: dist.ProcessGroup, target: int) -> Pending:
    """Begin to send a contiguous `x` to the group's rank `target`."""
    return Pending(x, dist.isend(x, dist.get_global_rank(group, target), group=group))


def start_receive(x: Tensor, group: dist.ProcessGroup, source: int) -> Pending:
    """Begin to receive a message of the group's rank `source` into a contiguous `x`."""
    return Pending(x, dist.irecv(x, dist.get_global_rank(group, source), group=group))


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = False) -> Tensor:
    """Reduce every rank's `x` elementwise by `op`."""
    return start_all_reduce(x, group, op, in_place=in_place).wait()


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Join every rank's `x` along `dim`."""
    return start_all_gather(x, group, dim, sizes).wait()


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's piece along `dim` of the sum of every rank's `x`."""
    return start_reduce_scatter(x, group, dim, sizes).wait()


def all_to_all(
    x: Tensor, group: Group, output_sizes: Sequence[int] | None = None, input_sizes: Sequence[int] | None = None
) -> Tensor:
    """Send piece i of the rows to rank i; join the pieces that all ranks sent here."""
    return start_all_to_all(x, group, output_sizes, input_sizes).wait()


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Return every rank's `value`, which is pickled, in rank order. Two collectives: not for every step."""
    found = [value] * group_size(group)
    if group is not None and len(found) > 1:
        dist.all_gather_object(found, value, group=group)
    return found


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy `x` of the group's rank `source` to every rank. In place: `x` is the buffer (contiguous) on the others."""
    return start_broadcast(x, group, source).wait()
