"""Every launch of a piece of code on the CUDA path, in order, from running it on fake tensors: the bytes that it reads
and writes, its FLOPs, and an estimate of its time.

A dispatch mode sees PyTorch's operators; Triton kernels are seen where they would be launched. An operator reads its
inputs and writes its results once; `KERNELS` has the traffic of each kernel, and an unknown kernel is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_ext.head.call.gpu_properties import TILE_M, TILE_N, Device, epilogue_seconds, product_seconds, waves
from megatron_ext.memory import step_time
from megatron_ext.memory.fake_cuda import cuda_rank_of
from megatron_ext.memory.step_time import NO_LAUNCH, PICKING, PLACING, PRODUCTS, WRITING_ONLY

aten = torch.ops.aten
# The least time of a launch: after a shorter one the next launch waits for the host or the start of its blocks.
LEAST_SECONDS = 2e-6
# A step of a program that adds up tokens: two loads from memory, the second at an address that the first returns.
_STEP_SECONDS = 1.5e-6
# (bytes that a kernel reads, bytes that it writes, steps of the program that takes the most).
Traffic = tuple[int, int, int]

# Compiled instructions of an epilogue for each logit (tests/head/test_fused_epilogue.py); the lanes of a multiprocessor
# and its clock under load.
EPILOGUE_INSTRUCTIONS = {"product_statistics_kernel": 11, "product_gradient_kernel": 8}
_LANES, _CLOCK = 128, 1.7e9

_SEVERAL = {aten.sort: 8}  # the number of an operator's launches, if it is not 1


@dataclass(frozen=True)
class Launch:
    """One launch: the bytes that it reads and writes, its FLOPs, and an estimate of its time."""

    phase: str  # forward or backward
    name: str
    shapes: str
    read: int
    written: int
    flops: int = 0
    waves: float = 0.0
    seconds: float = 0.0
    epilogue: float = 0.0  # the part of `seconds` that the epilogue takes
    is_collective: bool = False

    @property
    def joules(self) -> float:
        """Return the joules of the FLOPs and the traffic, without those of the card at rest."""
        return step_time.joules(self.flops, self.read + self.written)


@dataclass
class Plan:
    """The launches of a run, in order."""

    device: Device
    launches: list[Launch] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the sum of the estimates, without collectives, which run beside the products."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def sustained_seconds(self) -> float:
        """Return the seconds at the limit of the card's power: an H200 is held to 700 W, which repeated products reach.
        A launch takes the longer of its time and the time in which its joules can be spent."""
        watts = step_time.WATTS - step_time.AT_REST
        return sum(max(one.seconds, one.joules / watts) for one in self.launches if not one.is_collective)

    @property
    def joules(self) -> float:
        """Return the joules of a step of `sustained_seconds`, with those of the card at rest."""
        spent = sum(launch.joules for launch in self.launches if not launch.is_collective)
        return spent + step_time.AT_REST * self.sustained_seconds

    @property
    def elementwise_bytes(self) -> int:
        """Return the bytes read and written by all launches but matrix products and collectives."""
        return sum(
            launch.read + launch.written for launch in self.launches if not launch.flops and not launch.is_collective
        )


class Recorder(TorchDispatchMode):
    """A dispatch mode that records launches into `plan`, as part of `phase`.

    `worst_labels`: see `planned`.
    """

    def __init__(self, plan: Plan, ranks: int, worst_labels: bool):
        super().__init__()
        self.plan, self.ranks, self.phase, self.worst_labels = plan, ranks, "forward", worst_labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.namespace in ("c10d", "_c10d_functional"):
            sent = [x for x in tree_iter(args) if isinstance(x, Tensor)]
            self._add(packet.__name__, sent, sum(map(_bytes, sent)), 0, is_collective=True)
        elif func.namespace == "aten" and packet not in NO_LAUNCH:
            self._operator(func, packet, args, kwargs, out)
        return out

    def _operator(self, func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        read = written = 0
        results = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        changed: set[int] = set()
        for one, value in given:
            for x in (x for x in tree_iter(value) if isinstance(x, Tensor)):
                writes = one.alias_info is not None and one.alias_info.is_write
                changed |= {id(x)} if writes else set()
                if packet in PLACING and writes:
                    continue
                written += _bytes(x) if writes else 0
                if not (writes and (one.is_out or packet in WRITING_ONLY)):
                    read += _bytes(x)
        if not changed and func.is_view:
            return
        alias = {id(x.untyped_storage()) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        new = [x for x in results if id(x) not in changed]
        if not changed and new and all(id(x.untyped_storage()) in alias for x in new):
            return  # a view, or an input returned unchanged
        written += sum(map(_bytes, new))
        if packet in PICKING:
            read = 2 * written  # the elements, and at most as many bytes of indices
        if packet in PLACING:
            values = sum(_bytes(x) for x in tree_iter(args[2:]) if isinstance(x, Tensor))
            read, written = read + values, values
        tensors = [x for _, x in given if isinstance(x, Tensor)]
        if packet in PRODUCTS:
            name, (left, right) = packet.__name__, [x for x in args if isinstance(x, Tensor)][-2:]
            result_bytes = _bytes(results[0]) * (2 if name.startswith("addmm") else 1)
            self._multiplied(name, left, right, results[0], (read, written), result_bytes)
        else:
            tensors += [x for x in new if not tensors]
            self._add(packet.__name__, tensors, read, written, _SEVERAL.get(packet, 1))

    def _multiplied(
        self, name: str, left: Tensor, right: Tensor, out: Tensor, traffic: tuple[int, int], result_bytes: int
    ) -> None:
        (m, k), n = left.shape, right.shape[1]
        self.plan.launches.append(
            Launch(
                self.phase,
                name,
                f"{_shape(left)} @ {_shape(right)} -> {_dtype(out)}",
                *traffic,
                2 * m * n * k,
                waves(self.plan.device, m, n),
                max(product_seconds(self.plan.device, m, n, k, result_bytes), LEAST_SECONDS),
                epilogue_seconds(self.plan.device, m, n, k, result_bytes),
            )
        )

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        name = kernel.__name__
        if name not in KERNELS:
            raise ValueError(f"the plan does not know what the kernel {name} reads and writes: add it to KERNELS")
        told = {"ranks": self.ranks, "worst_labels": self.worst_labels}
        read, written, steps = KERNELS[name](arguments | told)
        tensors = [x for x in arguments.values() if isinstance(x, Tensor) and x.dim() == 2][:2]
        if name in EPILOGUE_INSTRUCTIONS and written:
            self._fused_product(name, arguments["x"].base, arguments["w"].base, (read, written))
            return
        if name == "fixed_product_kernel":
            a_MK, b_KN, out_MN = (arguments[each] for each in ("a_ptr", "b_ptr", "out_ptr"))
            again = 2 if arguments["GOES_ON"] or arguments["ADDS"] else 1
            self._multiplied(name, a_MK, b_KN, out_MN, (read, written), again * _bytes(out_MN))
            return
        waves = grid[0] / self.plan.device.multiprocessors
        self._add(name.strip("_"), tensors, read, written, least=steps * _STEP_SECONDS, waves=waves)

    def _fused_product(self, name: str, x_TD: Tensor, w_VD: Tensor, traffic: tuple[int, int]) -> None:
        """Add the launch of a product with an epilogue: after a tile's sums its instructions run, with no overlap."""
        (m, k), n, device = x_TD.shape, w_VD.shape[0], self.plan.device
        full = waves(device, m, n)
        epilogue = -(-full // 1) * TILE_M * TILE_N / _LANES * EPILOGUE_INSTRUCTIONS[name] / _CLOCK
        seconds = product_seconds(device, m, n, k, 0) + epilogue
        seconds = max(seconds, sum(traffic) / device.bytes_per_s, LEAST_SECONDS)
        shapes = f"{_shape(x_TD)} @ {_shape(w_VD.t())}"
        launch = Launch(self.phase, name.strip("_"), shapes, *traffic, 2 * m * n * k, full, seconds, epilogue)
        self.plan.launches.append(launch)

    def _add(
        self,
        name: str,
        tensors: list[Tensor],
        read: int,
        written: int,
        launches: int = 1,
        least: float = 0.0,
        **more: Any,
    ) -> None:
        seconds = 0.0
        if not more.get("is_collective"):
            seconds = max((read + written) / self.plan.device.bytes_per_s, launches * LEAST_SECONDS, least)
        shapes = ", ".join(map(_shape, tensors))
        self.plan.launches.append(Launch(self.phase, name, shapes, read, written, seconds=seconds, **more))


@contextmanager
def planned(
    device: Device, ranks: int, worst_labels: bool = False
) -> Iterator[tuple[Recorder, dist.ProcessGroup | None]]:
    """Yield a recorder, and the group of one rank of `ranks`; tensors made inside are fake and claim to be on CUDA.

    Labels are taken as different and spread over the ranks. `worst_labels`: all are in this rank's shard; passes over
    labels take as many bytes as for different labels, and as many steps as for a single label.
    """
    recorder = Recorder(Plan(device), ranks, worst_labels)
    with cuda_rank_of(ranks, recorder.kernel) as group:
        yield recorder, group


def _total(given: dict[str, Any], names: str) -> int:
    """Return the bytes of the arguments `names`, each as often as it is named; a descriptor counts as its tensor."""
    found = [given[name] for name in names.split()]
    return sum(_bytes(x if isinstance(x, Tensor) else x.base) for x in found if x is not None)


def _once(read: str, written: str) -> Callable[[dict[str, Any]], Traffic]:
    """Return the traffic function of a kernel that reads and writes these arguments once for each mention."""
    return lambda given: (_total(given, read), _total(given, written), 0)


def _long_rows(given: dict[str, Any]) -> Traffic:
    """Return the traffic: logits whose exponentials are cached are read twice, or once if these refer to a sample."""
    z_TV, again = given["z_ptr"], 0 if given["SAMPLED"] else given["kept_columns"]
    return _bytes(z_TV) + _bytes(z_TV[:, :again]), _total(given, "exp_ptr stats_ptr"), 0


def _owned(given: dict[str, Any], tokens: int) -> int:
    """Return the number of tokens whose label is in this rank's shard."""
    return tokens if given["worst_labels"] else -(-tokens // given["ranks"])


def _label_parts(given: dict[str, Any]) -> Traffic:
    """Return the traffic: different labels have no partial sums; of one label each program adds a window of tokens."""
    x_TD, parts, window = given["x_ptr"], given["parts_ptr"], given["WINDOW"]
    if not given["worst_labels"]:
        return _bytes(given["sorted_ptr"]), 0, 0
    return _bytes(x_TD), _bytes(parts), -(-min(window, x_TD.shape[0]) // given["AHEAD"])


def _label_rows(given: dict[str, Any]) -> Traffic:
    """Return the traffic: a row of dW for each label, or all rows with label smoothing; of a single label one program
    adds the sums of all windows."""
    out_VD, x_TD = given["out_ptr"], given["x_ptr"]
    tokens = _owned(given, x_TD.shape[0])
    rows = out_VD[:tokens] if given["common_ptr"] is None else out_VD
    longest = max(given["WINDOW"], -(-tokens // given["WINDOW"])) if given["worst_labels"] else 1
    return _bytes(rows) + _bytes(x_TD[:tokens]), _bytes(rows), -(-min(longest, tokens) // given["AHEAD"])


def _fixed_product(given: dict[str, Any]) -> Traffic:
    """Return the traffic of a product, with operands read once, as for an operator."""
    out = _bytes(given["out_ptr"])
    again = out if given["GOES_ON"] or given["ADDS"] else 0
    return _total(given, "a_ptr b_ptr") + again, out, 0


def _product_gradient(given: dict[str, Any]) -> Traffic:
    """Return the traffic of operands and result, or, with a sample, of the shifts: no row is taken to be far off."""
    if given["sample_ptr"] is not None:
        return 2 * _bytes(given["shift_ptr"]), 0, 0
    return _total(given, "x w"), _total(given, "out"), 0


def _finish_dx(given: dict[str, Any]) -> Traffic:
    """Return the traffic: the product, and a row of the weight for each token whose label is in this rank's shard."""
    product_TD, w_VD = given["product_ptr"], given["w_ptr"]
    rows = _owned(given, product_TD.shape[0]) * w_VD.shape[1] * w_VD.element_size()
    return _bytes(product_TD) + rows, _bytes(given["out_ptr"]), 0


def _of_tokens(given: dict[str, Any]) -> Traffic:
    """Return the traffic of a kernel with a few numbers per token, which reads or writes all its arguments."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    written = sum(_bytes(x) for name, x in tensors.items() if name in ("facts_ptr", "loss_ptr", "out_ptr"))
    return sum(map(_bytes, tensors.values())) - written, written, 0


def _exchange_checks(given: dict[str, Any]) -> Traffic:
    """Return the traffic: maxima and sums of all ranks for the first 256 tokens, which are taken to differ."""
    stats_RKT = given["stats_ptr"]
    return _bytes(stats_RKT[:, :2, :256]), _bytes(given["fine_ptr"]), 0


def _first_columns(given: dict[str, Any]) -> Traffic:
    """Return the traffic: of each row the columns of its groups and those behind the last group, or all columns."""
    z_TV, groups_TN = given["z_ptr"], given["groups_ptr"]
    if groups_TN is None:
        return _bytes(z_TV), _bytes(given["out_ptr"]), 0
    columns = groups_TN.shape[1] * given["WIDTH"] + z_TV.shape[1] % given["WIDTH"]
    return _bytes(z_TV[:, :columns]) + _bytes(groups_TN), _bytes(given["out_ptr"]), 0


KERNELS: dict[str, Callable[[dict[str, Any]], Traffic]] = {
    "whole_row_kernel": _once("z_ptr", "exp_ptr stats_ptr"),
    "long_row_kernel": _long_rows,
    "_row_gradient_kernel": _once("source_ptr", "out_ptr"),
    "product_statistics_kernel": _once("x w", "kept parts_ptr"),
    "product_gradient_kernel": _product_gradient,
    "joined_parts_kernel": _once("parts_ptr parts_ptr", "stats_ptr"),
    "_label_parts_kernel": _label_parts,
    "_label_rows_kernel": _label_rows,
    "_finish_dx_kernel": _finish_dx,
    "_scale_rows_kernel": _once("x_ptr", "out_ptr"),
    "fixed_product_kernel": _fixed_product,
    "_combined_kernel": _of_tokens,
    "exchange_checks_kernel": _exchange_checks,
    "ids_exist_kernel": _once("ids_ptr", "fine_ptr"),
    "columns_kernel": _once("ids_ptr", "out_ptr"),
    "ids_checksum_kernel": _once("ids_ptr", "out_ptr"),
    "_token_gradient_kernel": _of_tokens,
    # Normally distributed logits are read four times: for the maximum, twice for sums, and for a short list.
    "nucleus_kernel": _once("z_ptr z_ptr z_ptr z_ptr", "cut_ptr peak_ptr sum_ptr"),
    "group_maxima_kernel": _once("z_ptr", "out_ptr"),
    "first_columns_kernel": _first_columns,
    # Only the candidates are read: no row is taken to have further logits equal to its k-th.
    "equal_counts_kernel": _once("found_ptr", "count_ptr"),
}


def _bytes(x: Tensor) -> int:
    """Return the bytes of elements in memory; an expanded dimension counts as one element."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * x.element_size()


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _shape(x: Tensor) -> str:
    return f"{_dtype(x)}[{'x'.join(map(str, x.shape))}]"
