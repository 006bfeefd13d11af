"""The collectives of a group over NCCL: the checks of each, what ranks send to each other, and the use of what arrives.

Every rank sends its share to every other rank directly. Where torch has renamed a method, both names are defined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.nccl_rules.buffers import content, fill, reduce, size_bytes, values
from megatron_on_cpu.nccl_rules.checks import (
    check_all,
    check_count,
    check_shapes,
    check_splits,
    check_times,
    reduction,
)

Pieces = dict[int, memoryview]  # by rank of the group
_NOTHING = memoryview(b"")
FLAT = torch.contiguous_format


@dataclass
class Exchange:
    """One collective, in ranks of the group; `sends` and `expects` have an entry for each rank, this one included."""

    what: str  # its name in reports
    agree: str  # what must be the same on every rank
    outputs: list[Tensor]
    sends: list[memoryview]
    expects: list[int]  # bytes
    finish: Callable[[Pieces], None]  # called with what each rank sent to this one
    meets: list[int] | None = None  # ranks with which this one exchanges messages, None: all
    needs: list[int] | None = None  # ranks that must have come before this one is complete, None: all in `meets`
    empty: bool = False  # no rank has an element: NCCL discards the collective


class Collectives:
    """The collectives of a process group; `_run(name, *exchanges)` makes one launch of them, under c10d's name."""

    _rank: int
    _ranks: list[int]  # the world's
    _run: Callable[..., Any]
    _buffered: Callable[[int], bool]  # whether so many bytes fit into NCCL's buffers

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        return self._run("allreduce", self._all_reduce("all_reduce", x, opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        check_all("all_reduce_coalesced", tensors)
        return self._run("allreduce_coalesced", *(self._all_reduce("all_reduce_coalesced", x, opts) for x in tensors))

    def _all_reduce(self, name: str, x: Tensor, opts: Any) -> Exchange:
        check_all(name, [x])
        op, data, size = reduction(name, opts.reduceOp, x.dtype), content(x), self._size
        finish, agree = partial(_reduce_into, x, *op), f"{name} {op} {x.dtype}"
        sizes = [len(data)] * size
        return Exchange(describe(name, x, op[0]), agree, [x], [data] * size, sizes, finish, empty=not data)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        check_all("reduce", [x])
        op, root, data = reduction("reduce", opts.reduceOp, x.dtype), opts.rootRank, content(x)
        is_root = self._rank == root
        exchange = Exchange(
            describe(f"reduce to rank {self._ranks[root]}", x, op[0]),
            f"reduce {op} {root} {x.dtype}",
            [x],
            *self._to_root(root, data),
            partial(_reduce_into, x, *op) if is_root else _ignore,
            needs=None if is_root or not self._buffered(len(data)) else [],
            empty=not data,
        )
        return self._run("reduce", exchange)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        check_all("broadcast", [x])
        root, data = opts.rootRank, content(x)
        needs = [root] if self._buffered(len(data)) else None
        exchange = self._from_root("broadcast", x, root, [data] * self._size, needs=needs, empty=not data)
        return self._run("broadcast", exchange)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Any:
        """Gather tensors that may differ in shape: torch's NCCL group then makes one broadcast for each rank."""
        (outputs,), (x,) = output_tensors, input_tensors
        check_count("all_gather", "the output list", len(outputs), self._size)
        equal = len({y.shape for y in outputs}) == 1
        check_all("all_gather", [x, *outputs], strided=outputs if equal else ())
        check_shapes("all_gather", "this rank's own output", [outputs[self._rank]], x)
        flat = [y if y.is_contiguous() or not equal else torch.empty_like(x, memory_format=FLAT) for y in outputs]
        exchange = self._gather_into("all_gather", [content(y) for y in flat], x, outputs)
        if any(y is not z for y, z in zip(flat, outputs, strict=True)):
            exchange.finish = partial(_fill_strided, outputs, flat, exchange.finish)
        return self._run("allgather", exchange)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run("allgather_base", self._all_gather_single("all_gather_single", output, input))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        name = "all_gather_single_coalesced"
        check_count(name, "the output list", len(outputs), len(inputs))
        return self._run(
            "allgather_into_tensor_coalesced",
            *(self._all_gather_single(name, y, x) for y, x in zip(outputs, inputs, strict=True)),
        )

    def _all_gather_single(self, name: str, output: Tensor, x: Tensor) -> Exchange:
        check_all(name, [output, x])
        check_times(name, output, x, self._size)
        return self._gather_into(name, self._equal_pieces(output), x, [output])

    def _gather_into(self, name: str, places: list[memoryview], x: Tensor, outputs: list[Tensor]) -> Exchange:
        sends, expects = [content(x)] * self._size, [len(place) for place in places]
        finish = partial(_fill_all, places)
        return Exchange(describe(name, x), name, outputs, sends, expects, finish, empty=not any(expects))

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        """Reduce and scatter tensors that may differ in shape: torch's NCCL group then makes a reduce for each rank."""
        (output,), (inputs,) = output_tensors, input_tensors
        check_count("reduce_scatter", "the input list", len(inputs), self._size)
        equal = len({x.shape for x in inputs}) == 1
        check_all("reduce_scatter", [output, *inputs], strided=inputs if equal else ())
        check_shapes("reduce_scatter", "this rank's own input", [inputs[self._rank]], output)
        sends = [content(x.contiguous() if equal else x) for x in inputs]
        return self._run("reduce_scatter", self._reduce_scatter("reduce_scatter", output, sends, opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        exchange = self._reduce_scatter_single("reduce_scatter_single", output, input, opts)
        return self._run("reduce_scatter_base", exchange)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        name = "reduce_scatter_single_coalesced"
        check_count(name, "the output list", len(outputs), len(inputs))
        return self._run(
            "reduce_scatter_tensor_coalesced",
            *(self._reduce_scatter_single(name, y, x, opts) for y, x in zip(outputs, inputs, strict=True)),
        )

    def _reduce_scatter_single(self, name: str, output: Tensor, x: Tensor, opts: Any) -> Exchange:
        check_all(name, [output, x])
        check_times(name, x, output, self._size)
        return self._reduce_scatter(name, output, self._equal_pieces(x), opts)

    def _reduce_scatter(self, name: str, output: Tensor, sends: list[memoryview], opts: Any) -> Exchange:
        op = reduction(name, opts.reduceOp, output.dtype)
        agree, expects = f"{name} {op} {output.dtype}", [size_bytes(output)] * self._size
        finish = partial(_reduce_into, output, *op)
        empty = not (any(sends) or any(expects))
        return Exchange(describe(name, output, op[0]), agree, [output], sends, expects, finish, empty=empty)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        name = "all_to_all_single"
        check_all(name, [output, input])
        check_splits(name, "output_split_sizes", output_splits, output, self._size)
        check_splits(name, "input_split_sizes", input_splits, input, self._size)
        places, sends = self._rows(output, output_splits), self._rows(input, input_splits)
        return self._run("alltoall_base", self._all_to_all(name, [output], input, sends, places))

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Any:
        name, x = "all_to_all", input_tensors[self._rank]
        check_count(name, "the output list", len(output_tensors), self._size)
        check_count(name, "the input list", len(input_tensors), self._size)
        check_all(name, [*output_tensors, *input_tensors])
        sends, places = [content(x) for x in input_tensors], [content(y) for y in output_tensors]
        return self._run("alltoall", self._all_to_all(name, output_tensors, x, sends, places))

    def _all_to_all(
        self, name: str, outputs: list[Tensor], x: Tensor, sends: list[memoryview], places: list[memoryview]
    ) -> Exchange:
        sent, expected = len(sends[self._rank]), len(places[self._rank])
        if sent != expected:
            raise ValueError(
                f"{name}: this rank sends itself {sent} bytes, and expects {expected}: both must be one size; give its "
                f"own input and output the same split"
            )
        return Exchange(describe(name, x), name, outputs, sends, [len(y) for y in places], partial(_fill_all, places))

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:
        (x,), root = input_tensors, opts.rootRank
        is_root = self._rank == root
        outputs = output_tensors[0] if is_root else []
        check_all("gather", [x, *outputs])
        if is_root:
            check_count("gather", "the output list", len(outputs), self._size)
            check_shapes("gather", "each output", outputs, x)
        exchange = Exchange(
            describe(f"gather to rank {self._ranks[root]}", x),
            f"gather {root}",
            outputs,
            *self._to_root(root, content(x)),
            partial(_fill_all, [content(y) for y in outputs]) if is_root else _ignore,
            meets=None if is_root else [root],
        )
        return self._run("gather", exchange)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        (x,), root = output_tensors, opts.rootRank
        is_root = self._rank == root
        inputs = input_tensors[0] if is_root else []
        check_all("scatter", [x, *inputs])
        if is_root:
            check_count("scatter", "the input list", len(inputs), self._size)
            check_shapes("scatter", "each input", inputs, x)
        sends = [content(y) for y in inputs]
        return self._run("scatter", self._from_root("scatter", x, root, sends, meets=None if is_root else [root]))

    def _to_root(self, root: int, data: memoryview) -> tuple[list[memoryview], list[int]]:
        """Return what this rank sends to each rank, and how many bytes it expects from each."""
        sends = [data if r == root else _NOTHING for r in range(self._size)]
        return sends, [len(data) if self._rank == root else 0] * self._size

    def _from_root(self, name: str, x: Tensor, root: int, sends: list[memoryview], **whom: Any) -> Exchange:
        return Exchange(
            describe(f"{name} from rank {self._ranks[root]}", x),
            f"{name} {root}",
            [x],
            sends if self._rank == root else [_NOTHING] * self._size,
            [size_bytes(x) if r == root else 0 for r in range(self._size)],
            lambda pieces: fill(x, pieces[root]),
            **whom,
        )

    def barrier(self, opts: Any = None) -> Any:
        size = self._size
        return self._run("barrier", Exchange("barrier", "barrier", [], [_NOTHING] * size, [0] * size, _ignore))

    # The same methods under their names before torch 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Collectives that NCCL does not have.

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("recv without a source: NCCL receives only from a named rank; pass `src`")

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("all_gather_coalesced: NCCL's group does not have it; use all_gather")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("monitored_barrier: NCCL's group does not have it; use barrier")

    # Division into pieces.

    @property
    def _size(self) -> int:
        return len(self._ranks)

    def _equal_pieces(self, x: Tensor) -> list[memoryview]:
        whole, n = content(x), size_bytes(x) // self._size
        return [whole[r * n : (r + 1) * n] for r in range(self._size)]

    def _rows(self, x: Tensor, splits: Sequence[int]) -> list[memoryview]:
        """Return the bytes of the rows for each rank; an empty `splits` divides the rows equally."""
        rows = x.shape[0] if x.dim() else 1
        row, whole = (size_bytes(x) // rows if rows else 0), content(x)
        found, start = [], 0
        for n in splits or [rows // self._size] * self._size:
            found.append(whole[start * row : (start + n) * row])
            start += n
        return found


def describe(name: str, x: Tensor, op: str = "") -> str:
    kind = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return f"{name} ({op}) of {kind}" if op else f"{name} of {kind}"


def _ignore(pieces: Pieces) -> None:
    pass


def _reduce_into(x: Tensor, op: str, factor: float, pieces: Pieces) -> None:
    fill(x, content(reduce([values(pieces[r], x.dtype) for r in sorted(pieces)], op, factor)))


def _fill_strided(outputs: list[Tensor], flat: list[Tensor], finish: Callable[[Pieces], None], pieces: Pieces) -> None:
    finish(pieces)
    for y, z in zip(outputs, flat, strict=True):
        if y is not z:
            y.copy_(z)


def _fill_all(places: list[memoryview], pieces: Pieces) -> None:
    for r, piece in pieces.items():
        if len(piece):
            places[r][:] = piece
