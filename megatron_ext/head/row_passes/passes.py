"""The passes over rows that the head is made of: `RowPasses`, which of its instances a tensor takes, and the two passes
over logits, row statistics and the gradient. No process groups, no autograd.

Every read-out of the head (cross entropy, log-prob, entropy, ...) is made of a few sums over each row of logits, and
the gradient of every read-out has one form. So these two functions are all that ever touches a logit. They take tensors
and plain numbers only and write into the tensors they are given.

PyTorch's instance is the definition; Triton's gives the same results on CUDA. With TRITON_INTERPRET=1 in the
environment, Triton's own switch for running kernels on CPU, CPU tensors take Triton's passes too: slow, and the same
code as on CUDA.

`torch.compile` sees each pass over logits, dx or dW as one operator, `torch.ops.megatron_ext.row_statistics` and so on,
and leaves it whole: what is compiled runs the same code as what is not. What is made of a few numbers per token it
compiles itself, from the plain functions, and so it does the passes of top-k and top-p, which are slower then.

Legend: T tokens of this chunk, V columns of this rank's shard (or of a block of it), K statistics.

What a logit goes through before anything else, in the accumulation dtype (fp32; fp64 for fp64 input):
    z = softcap * tanh((z0 + bias) / softcap) / temperature, and columns from `counted` on do not exist.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import logit_gradient, matmul, statistics
from megatron_ext.head.call.matmul import bend, transformed
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP, TARGET, Statistics
from megatron_ext.head.row_passes import fixed_order_sums, label_terms, nucleus, selection
from megatron_ext.numerics.tensors import has_values, ids_exist, part_of, sums_of_rows

# exp(-1e4) is 0 in every dtype, and 0 * -1e4 is 0 where 0 * -inf would be NaN.
_FAR = -1e4

# Elements that a pass works on at a time on CPU: few enough to stay in cache from step to step, and so many that the
# start of the threads is no part of the time.
_CPU_BLOCK = 1 << 19
# And on CUDA without Triton: their fp32 copies take half a gigabyte.
_CUDA_BLOCK = 1 << 27
# So few that cutting them takes longer than it saves memory.
_FEW = 1 << 12


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None = None,
    shift_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_mean: bool = False,
    with_entropy: bool = False,
    with_hits: bool = False,
    labelled: bool = False,
) -> None:
    """One pass over logits: writes each row's statistics and, where `exp_TV` is given, its exponentials.

    Args:
        z_TV: logits, any floating dtype, any strides. Only read, unless `exp_TV` is the same tensor.
        target_T: int64, the label's column in this shard, -1 where the shard does not own it.
        stats_KT: written; fp32 (fp64 for fp64). Rows, with m the row's maximum over the columns that count:
            m (-inf if there are none), sum exp(z - m), z of the target (-inf if not owned);
            with_mean: sum (z - m) and count, both over the columns that are not -inf;
            with_entropy: sum exp(z - m) (z - m);
            with_hits: 1 where the first column that reaches m is the target, else 0;
            with a softcap: its slope at the target, 0 if not owned.
        exp_TV: written, any floating dtype, for as many of the first columns as it has: exp(z - shift), 0 at the target
            and in the columns that do not count.
        shift_T: written, the statistics' dtype; None: not wanted, and no `exp_TV` either. m without `exp_TV`, else at
            most m; 0 where m is -inf.
        bias_V: fp32 (fp64 for fp64), added to every row, or None.
        counted: number of leading columns that exist.
        labelled: the caller knows that every target is owned.
    """
    dtype = stats_KT.dtype
    if counted == 0:
        stats_KT.zero_()
        stats_KT[MAX], stats_KT[TARGET] = -torch.inf, -torch.inf
        if exp_TV is not None:
            exp_TV.zero_()
        if shift_T is not None:
            shift_T.zero_()
        return
    elsewhere_T = None if labelled else target_T < 0
    column = (target_T if labelled else target_T.clamp(min=0)).unsqueeze(1)
    bias = None if bias_V is None else bias_V[column]
    at_target = transformed(z_TV.gather(1, column), bias, softcap, temperature, dtype)
    stats_KT[TARGET] = _at_owned(at_target, elsewhere_T, -torch.inf)
    if softcap is not None:
        slope_T = _at_owned(bend(z_TV.gather(1, column), bias, softcap, dtype), elsewhere_T, 0.0)
        stats_KT[3 + 2 * with_mean + with_entropy + with_hits] = slope_T
    bias_V = None if bias_V is None else bias_V[:counted]
    in_place = exp_TV is not None and exp_TV.dtype == dtype and exp_TV.shape == z_TV.shape
    blocks = _blocks(z_TV)
    scratch_TV = None if in_place or not blocks else z_TV.new_empty(blocks[0].stop, counted, dtype=dtype)
    for rows in blocks:
        whole = len(blocks) == 1 and counted == z_TV.shape[1]
        if scratch_TV is not None:
            work = scratch_TV if len(blocks) == 1 else scratch_TV[: rows.stop - rows.start]
        else:
            assert exp_TV is not None
            work = exp_TV if whole else part_of(exp_TV, rows, counted)
        z = z_TV if whole else part_of(z_TV, rows, counted)
        z = transformed(z, bias_V, softcap, temperature, dtype, work)
        peak = stats_KT[MAX] if len(blocks) == 1 else stats_KT[MAX, rows]
        if with_hits:
            largest, first = z.max(1)
            peak.copy_(largest)
            stats_KT[3 + 2 * with_mean + with_entropy, rows] = first == target_T[rows]
        else:
            torch.amax(z, 1, out=peak)
        if shift_T is not None:
            peak = torch.nan_to_num(peak, 0.0, torch.inf, 0.0, out=shift_T if len(blocks) == 1 else shift_T[rows])
        else:  # a row of -inf has no maximum to subtract; its exponentials are 0 with any
            peak = peak.clamp(min=torch.finfo(dtype).min)
        far = torch.sub(z, peak.unsqueeze(1), out=work)
        if with_mean:
            finite = far > -torch.inf
            stats_KT[3, rows], stats_KT[4, rows] = sums_of_rows(far.where(finite, 0.0)), finite.sum(1)
        exp = far.exp() if with_entropy else far.exp_()
        sums = stats_KT[SUM_EXP] if len(blocks) == 1 else stats_KT[SUM_EXP, rows]
        sums.copy_(sums_of_rows(exp))
        if with_entropy:
            stats_KT[3 + 2 * with_mean, rows] = sums_of_rows(far.clamp_(min=_FAR).mul_(exp))
        if exp_TV is not None and not (in_place and exp is far):
            exp_TV[rows, :counted] = exp[:, : exp_TV.shape[1]]
    if exp_TV is not None:
        if counted < exp_TV.shape[1]:
            exp_TV[:, counted:] = 0
        _write(exp_TV, target_T, 0.0, labelled and exp_TV.shape[1] == z_TV.shape[1])


def row_gradient(
    source_TV: Tensor,
    target_T: Tensor,
    shift_T: Tensor,
    out_TV: Tensor,
    scale_T: Tensor | None = None,
    slope_T: Tensor | None = None,
    offset_T: Tensor | None = None,
    value_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    source_is_exp: bool = False,
    labelled: bool = False,
) -> None:
    """One pass from logits, or from the exponentials that `row_statistics` kept, to gradients.

    With u = z - shift, each column that counts becomes
        (exp(u) * (scale + slope * u) + offset) * (1 - tanh((z0 + bias) / softcap)^2)
    where the last factor, the softcap's slope, is 1 without one (from exponentials it is as inexact as their rounding
    over the softcap) and `offset` reaches only columns that are not -inf. The target's
    column becomes `value` (0 if None) instead, columns that do not count become 0. The temperature's own factor is the
    caller's, inside the coefficients.

    Args:
        source_TV: logits, or exp(z - shift) if `source_is_exp`. Only read, unless `out_TV` is the same tensor.
        target_T: int64, the label's column; a number that no column has where it is another's.
        out_TV: written, any floating dtype.
        shift_T, scale_T, slope_T, offset_T, value_T: fp32 (fp64 for fp64) per-token coefficients; shift must be
            finite. None: scale 1 (0 beside a slope), slope, offset and value 0.
        bias_V, counted, softcap, temperature, labelled: as in `row_statistics`.
    """
    if counted < out_TV.shape[1]:
        out_TV[:, counted:] = 0
    if counted == 0:
        return
    dtype = shift_T.dtype
    bias_V = None if bias_V is None else bias_V[:counted]
    in_place = out_TV.dtype == dtype
    blocks = _blocks(source_TV)
    scratch_TV = None if in_place or not blocks else source_TV.new_empty(blocks[0].stop, counted, dtype=dtype)
    for rows in blocks:
        if scratch_TV is None:
            work = part_of(out_TV, rows, counted)
        else:
            work = part_of(scratch_TV, slice(0, rows.stop - rows.start))
        shift = part_of(shift_T, rows).unsqueeze(1)
        scale = None if scale_T is None else part_of(scale_T, rows).unsqueeze(1)
        slope = None if slope_T is None else part_of(slope_T, rows).unsqueeze(1)
        offset = None if offset_T is None else part_of(offset_T, rows).unsqueeze(1)
        if source_is_exp:
            grad = work.copy_(part_of(source_TV, rows, counted))
            bends = slope is not None or softcap is not None
            u = grad.clamp(min=torch.finfo(dtype).tiny).log_() if bends else grad
            factor = None if softcap is None else 1 - (u + shift).mul_(temperature / softcap).square_()
            finite = None  # the caller knows that all columns are
        else:
            z = part_of(source_TV, rows, counted)
            factor = None if softcap is None else bend(z, bias_V, softcap, dtype)
            z = transformed(z, bias_V, softcap, temperature, dtype, work)
            grad = torch.sub(z, shift, out=work)
            finite = None if offset is None else grad > -torch.inf
            u = grad.clone() if slope is not None else grad
            grad.exp_()
        if slope is not None:
            grad.mul_(u.clamp(min=_FAR).mul_(slope).add_(0.0 if scale is None else scale))
        elif scale is not None:
            grad.mul_(scale)
        if offset is not None:
            grad.add_(offset if finite is None else offset * finite)
        if factor is not None:
            grad.mul_(factor)
        if not in_place:
            out_TV[rows, :counted] = grad
    _write(out_TV, target_T, 0.0 if value_T is None else value_T.to(out_TV.dtype), labelled)


def columns_of(ids_T: Tensor, counts_T: Tensor | None, start: int, stop: int) -> Tensor:
    """Return the column of each id, int64, in the shard `[start, stop)`: -1 of others, and where `counts` is False."""
    own_T = (ids_T >= start) & (ids_T < stop)
    if counts_T is not None:
        own_T = own_T & counts_T
    column_T = ids_T - start if start else ids_T
    return column_T.masked_fill(~own_T, -1)


def _at_owned(x_T1: Tensor, elsewhere_T: Tensor | None, other: float) -> Tensor:
    """Return what was found at targets, `other` where they are another shard's."""
    return x_T1.squeeze(1) if elsewhere_T is None else x_T1.squeeze(1).masked_fill(elsewhere_T, other)


def _write(out_TV: Tensor, target_T: Tensor, value_T: Tensor | float, labelled: bool) -> None:
    """`value` in the column of each target that `out_TV` has; `labelled`: it has all.

    Not by `scatter_` in 16 bits, whose matrices it makes fp32 temporarily on a CPU.
    """
    if labelled and out_TV.element_size() > 2:
        out_TV.scatter_(1, target_T.unsqueeze(1), value_T.unsqueeze(1) if isinstance(value_T, Tensor) else value_T)
        return
    column_T = target_T.clamp(min=0, max=out_TV.shape[1] - 1)
    at = torch.arange(target_T.shape[0], device=target_T.device), column_T
    inside_T, before_T = column_T == target_T, out_TV[at]
    if isinstance(value_T, Tensor):
        after_T = torch.where(inside_T, value_T, before_T)
    else:
        after_T = before_T.masked_fill(inside_T, value_T)
    out_TV.index_put_(at, after_T)


def _blocks(z_TV: Tensor) -> list[slice]:
    """Rows to work on at a time: never all of them in fp32, on CPU a few; more where nothing is computed anyway."""
    tokens, columns = z_TV.shape
    if 0 < tokens * columns <= _FEW:
        return [slice(0, tokens)]
    step = _CUDA_BLOCK // max(columns, 1)
    if z_TV.device.type == "cpu":
        most = (_CPU_BLOCK if has_values(z_TV) else 8 * _CPU_BLOCK) // max(columns, 1)
        step = min(most, max(tokens // 4, _FEW // max(columns, 1)))
    step = max(1, step)
    if 0 < tokens <= step:
        return [slice(0, tokens)]
    return [slice(at, min(at + step, tokens)) for at in range(0, tokens, step)]


class RowPasses:
    """The passes over rows in plain PyTorch, which is their definition; another instance has other functions.

    `row_statistics` and `row_gradient` above, `label_terms`, `statistics`, `logit_gradient`, `nucleus`, `selection` and
    `fixed_order_sums` say what each of them takes.

    Args:
        functions: passes to take in place of those of the same name.
    """

    def __init__(self, *functions: Callable[..., Any]):
        self.__dict__.update({each.__name__: each for each in functions})

    row_statistics = staticmethod(row_statistics)
    row_gradient = staticmethod(row_gradient)

    @staticmethod
    def product_statistics(
        x_TD: Tensor,
        w_VD: Tensor,
        target_T: Tensor,
        stats_KT: Tensor,
        shift_T: Tensor,
        exp_TV: Tensor | None = None,
        bias_V: Tensor | None = None,
        *,
        counted: int,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_hits: bool = False,
        sm_margin: int = 0,
    ) -> None:
        """`row_statistics` of the logits `x @ W.T`, which Triton keeps in registers; there is no softcap.

        `sm_margin`: multiprocessors that Triton's kernel leaves free.
        """
        sums = {"with_entropy": with_entropy, "with_hits": with_hits}
        options: dict[str, Any] = {"bias_V": bias_V, "counted": counted, "temperature": temperature, **sums}
        RowPasses.row_statistics(matmul.logits(x_TD, w_VD), target_T, stats_KT, exp_TV, shift_T, **options)

    @staticmethod
    def product_gradient(
        x_TD: Tensor,
        w_VD: Tensor,
        target_T: Tensor,
        shift_T: Tensor,
        out_TV: Tensor,
        scale_T: Tensor | None = None,
        slope_T: Tensor | None = None,
        bias_V: Tensor | None = None,
        *,
        counted: int,
        temperature: float = 1.0,
        sm_margin: int = 0,
    ) -> None:
        """`row_gradient` of the logits `x @ W.T`, which Triton keeps in registers; there is no softcap."""
        parts = {"scale_T": scale_T, "slope_T": slope_T, "bias_V": bias_V}
        options: dict[str, Any] = {**parts, "counted": counted, "temperature": temperature}
        RowPasses.row_gradient(matmul.logits(x_TD, w_VD), target_T, shift_T, out_TV, **options)

    add_label_rows = staticmethod(label_terms.add_label_rows)
    finish_dx = staticmethod(label_terms.finish_dx)
    scale_rows = staticmethod(label_terms.scale_rows)
    ids_exist = staticmethod(ids_exist)
    columns_of = staticmethod(columns_of)
    labels_checksum = staticmethod(statistics.labels_checksum)
    check_exchange = staticmethod(statistics.check_exchange)
    combined = staticmethod(statistics.combine)
    token_gradient = staticmethod(logit_gradient.token_gradient)
    nucleus = staticmethod(nucleus.nucleus)
    group_maxima = staticmethod(selection.group_maxima)
    first_columns = staticmethod(selection.first_columns)
    equal_counts = staticmethod(selection.equal_counts)
    add_at_equals = staticmethod(selection.add_at_equals)
    row_sums = staticmethod(fixed_order_sums.row_sums)
    segment_sums = staticmethod(fixed_order_sums.segment_sums)


PYTORCH = RowPasses()


def passes_of(x: Tensor) -> RowPasses:
    """Triton's passes for real CUDA tensors, PyTorch's for others; while compiling the operators."""
    if not has_values(x):
        return _OPERATORS if torch.compiler.is_compiling() else PYTORCH
    return PYTORCH if x.is_cuda == _interpreted() else triton_passes() or _without_triton()


def has_triton(x: Tensor) -> bool:
    """Return whether the device of `x` has Triton's passes; a tensor without values may still take PyTorch's."""
    if torch.compiler.is_compiling():  # on CUDA torch's compiler needs Triton itself
        return x.is_cuda != (os.environ.get("TRITON_INTERPRET") == "1")
    return x.is_cuda != _interpreted() and triton_passes() is not None


@functools.cache
def _interpreted() -> bool:
    """Return whether Triton runs kernels on CPU tensors, as it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_passes() -> RowPasses | None:
    """The passes in Triton; None where it is not installed, or has no device."""
    if importlib.util.find_spec("triton") is None or (torch.version.cuda is None and not _interpreted()):
        return None
    found: RowPasses = importlib.import_module("megatron_ext.head.kernels").TRITON
    return found


@functools.cache
def _without_triton() -> RowPasses:
    """PyTorch's passes on a GPU; said once."""
    missing = "Triton is not installed" if importlib.util.find_spec("triton") is None else "this torch is not for CUDA"
    warnings.warn(
        f"{missing}: the head reads each row of logits in several passes of plain PyTorch instead of one kernel; the "
        f"results are the same",
        stacklevel=2,
    )
    return PYTORCH


def _operator(plain: Callable[..., None], *written: str) -> Any:
    """An operator of a pass, by its own annotations. Its fake does nothing: a pass returns nothing."""
    name, names = plain.__name__, [*inspect.signature(plain).parameters]

    @functools.wraps(plain)
    def run(x: Tensor, *arguments: Tensor, **options: Any) -> None:  # torch passes by place what it can
        getattr(passes_of(x), name)(x, **dict(zip(names[1:], arguments, strict=False)), **options)

    operator = torch.library.custom_op(f"megatron_ext::{name}", run, mutates_args=written)
    operator.register_fake(lambda *arguments, **options: None)
    return getattr(torch.ops.megatron_ext, name)


# The passes as torch's compiler sees them.
_OPERATORS = RowPasses(
    _operator(row_statistics, "stats_KT", "exp_TV", "shift_T"),
    _operator(row_gradient, "out_TV"),
    _operator(RowPasses.product_statistics, "stats_KT", "shift_T", "exp_TV"),
    _operator(RowPasses.product_gradient, "out_TV"),
    _operator(label_terms.add_label_rows, "out_VD"),
    _operator(label_terms.finish_dx, "out_TD"),
    _operator(label_terms.scale_rows, "out_TD"),
)


def in_engine_order(call: ResolvedHead, x_TD: Tensor) -> bool:
    """Return whether log-probabilities have the bits of inference engines' batch-invariant kernels, and of Megatron's.

    Logits have those bits already: both products sum in steps of the same size, one after the other. What is left is
    the softmax: the order of its sums, and that its logarithm and both differences are rounded to fp32. Over several
    ranks each shard has sums of its own, which are joined as always: an engine gathers its logits first.
    """
    return call.rounds and call.bits == "batch" and x_TD.is_cuda


def write_engine_sums(z_tV: Tensor, stats_Kt: Tensor, bias_V: Tensor | None, counted: int, call: ResolvedHead) -> None:
    """Sums of exponentials in an engine's order, over those in `stats_Kt`."""
    _kernels().write_sums(z_tV, stats_Kt, bias_V, counted, call.softcap, call.temperature)


def engine_combined(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead, like: Tensor) -> Statistics:
    """`statistics.combine`, of a whole vocabulary with an engine's roundings, in fp32, where they apply."""
    stats = statistics.combine(stats_RKT, own_KT, shift_T, call)
    if len(stats_RKT) > 1 or not in_engine_order(call, like):
        return stats
    total_T = stats_RKT[0, SUM_EXP, :-1].masked_fill(stats_RKT[0, MAX, :-1] == -torch.inf, 1.0)
    return stats._replace(log_sum=_kernels().log(total_T).double(), target=stats.target.float().double())


def _kernels() -> Any:
    return importlib.import_module("megatron_ext.head.kernels.fixed_order_sums")
