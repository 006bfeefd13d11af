"""The two elementwise passes of the head, one over logits to statistics, one to gradients. No autograd, no groups.

Every read-out of the head (cross entropy, log-prob, entropy, ...) is made of a few sums over each row of logits, and
the gradient of every read-out has one form. So these two functions are all that ever touches a logit. They take tensors
and plain numbers only and write into the tensors they are given.

Legend: T tokens of this chunk, V columns of this rank's shard (or of a block of it), K statistics.

What a logit goes through before anything else, in the accumulation dtype (fp32; fp64 for fp64 input):
    z = softcap * tanh((z + bias) / softcap) / temperature, and columns from `counted` on do not exist.
"""

import torch
from torch import Tensor

# Rows of the statistics tensor. The first three are always there; the others follow in this order where asked for.
MAX, SUM_EXP, TARGET = 0, 1, 2

# exp(-1e4) is 0 in every dtype, and 0 * -1e4 is 0 where 0 * -inf would be NaN.
_FAR = -1e4

# Elements that a pass works on at a time on CPU: small enough to stay in a core's L2 cache between its steps.
_CPU_BLOCK = 1 << 18


def statistics_rows(with_mean: bool, with_entropy: bool, with_hits: bool) -> int:
    """Number of rows K that `row_statistics` writes."""
    return 3 + 2 * with_mean + with_entropy + with_hits


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None,
    bias_V: Tensor | None,
    counted: int,
    softcap: float | None,
    temperature: float,
    with_mean: bool,
    with_entropy: bool,
    with_hits: bool,
) -> None:
    """One pass over logits: writes each row's statistics and, where `exp_TV` is given, its exponentials.

    Args:
        z_TV: logits, any floating dtype, any strides. Only read, unless `exp_TV` is the same tensor.
        target_T: int64, the label's column in this shard, -1 where the shard does not own it.
        stats_KT: written; fp32 (fp64 for fp64). Rows, with m the row's maximum over the columns that count:
            m (-inf if there are none), sum exp(z - m), z of the target (-inf if not owned);
            with_mean: sum (z - m) and count, both over the columns that are not -inf;
            with_entropy: sum exp(z - m) (z - m);
            with_hits: 1 where the first column that reaches m is the target, else 0.
        exp_TV: written, any floating dtype: exp(z - m), 0 at the target and in the columns that do not count.
        bias_V: added to every row, or None.
        counted: number of leading columns that exist.
    """
    dtype = stats_KT.dtype
    for rows in _blocks(z_TV):
        z = transformed(z_TV[rows, :counted], bias_V, softcap, temperature, dtype)
        target, stats = target_T[rows], stats_KT[:, rows]
        owned, column = target >= 0, target.clamp(min=0).unsqueeze(1)
        if counted == 0:
            stats.zero_()
            stats[MAX], stats[TARGET] = -torch.inf, -torch.inf
            if exp_TV is not None:
                exp_TV[rows] = 0
            continue
        if with_hits:
            peak, index = z.max(1)
        else:
            peak = z.amax(1)
        stats[MAX] = peak
        stats[TARGET] = z.gather(1, column).squeeze(1).where(owned, -torch.inf)
        far = z.sub(peak.where(peak > -torch.inf, 0.0).unsqueeze(1))  # a row of -inf keeps them, it has no maximum
        extra = 3
        if with_mean:
            finite = far > -torch.inf
            stats[extra], stats[extra + 1] = far.where(finite, 0.0).sum(1), finite.sum(1)
            extra += 2
        exp = far.exp() if with_entropy else far.exp_()
        stats[SUM_EXP] = exp.sum(1)
        if with_entropy:
            stats[extra] = far.clamp_(min=_FAR).mul_(exp).sum(1)
            extra += 1
        if with_hits:
            stats[extra] = owned & (index == target)
        if exp_TV is not None:
            exp.scatter_(1, column, exp.gather(1, column).masked_fill_(owned.unsqueeze(1), 0.0))
            exp_TV[rows, :counted] = exp
            exp_TV[rows, counted:] = 0


def row_gradient(
    source_TV: Tensor,
    source_is_exp: bool,
    target_T: Tensor,
    shift_T: Tensor,
    scale_T: Tensor | None,
    slope_T: Tensor | None,
    offset_T: Tensor | None,
    value_T: Tensor | None,
    out_TV: Tensor,
    bias_V: Tensor | None,
    counted: int,
    softcap: float | None,
    temperature: float,
) -> None:
    """One pass from logits, or from the exponentials that `row_statistics` kept, to gradients.

    With u = z - shift, each column that counts becomes
        (exp(u) * (scale + slope * u) + offset) * (1 - tanh((z0 + bias) / softcap)^2)
    where the last factor is 1 without a softcap and `offset` reaches only columns that are not -inf. The target's
    column becomes `value` (0 if None) instead, columns that do not count become 0. The temperature's own factor is the
    caller's, inside the coefficients.

    Args:
        source_TV: logits, or exp(z - shift) if `source_is_exp`. Only read, unless `out_TV` is the same tensor.
        target_T: int64, the label's column, -1 where this shard does not own it.
        shift_T, scale_T, slope_T, offset_T, value_T: fp32 (fp64 for fp64) per-token coefficients; shift must be
            finite. None: scale 1, slope, offset and value 0.
        out_TV: written, any floating dtype.
        bias_V, counted, softcap, temperature: as in `row_statistics`.
    """
    dtype = shift_T.dtype
    for rows in _blocks(source_TV):
        shift, target = shift_T[rows].unsqueeze(1), target_T[rows]
        source = source_TV[rows, :counted]
        finite = None
        if source_is_exp:
            exp = source.to(dtype, copy=True)
            u = exp.clamp(min=torch.finfo(dtype).tiny).log_() if slope_T is not None or softcap is not None else exp
        else:
            u = transformed(source, bias_V, softcap, temperature, dtype).sub(shift)
            if offset_T is not None:
                finite = u > -torch.inf
            exp = u.exp() if slope_T is not None or softcap is not None else u.exp_()
        grad = exp
        if slope_T is not None:
            assert scale_T is not None
            inner = u.clamp(min=_FAR).mul_(slope_T[rows].unsqueeze(1)).add_(scale_T[rows].unsqueeze(1))
            grad = exp.mul_(inner)
        elif scale_T is not None:
            grad = exp.mul_(scale_T[rows].unsqueeze(1))
        if offset_T is not None:
            offset = offset_T[rows].unsqueeze(1)
            grad = grad.add_(offset if finite is None else offset * finite)
        if softcap is not None:
            bent = u.add_(shift).mul_(temperature / softcap)  # tanh(z0 / softcap)
            grad = grad.mul_(bent.square_().neg_().add_(1.0))
        if counted:
            owned, column = (target >= 0).unsqueeze(1), target.clamp(min=0).unsqueeze(1)
            value = torch.zeros_like(shift) if value_T is None else value_T[rows].unsqueeze(1)
            grad.scatter_(1, column, value.where(owned, grad.gather(1, column)))
        out_TV[rows, :counted] = grad
        out_TV[rows, counted:] = 0


def transformed(z_TV: Tensor, bias_V: Tensor | None, softcap: float | None, temperature: float, dtype) -> Tensor:
    """The logits that count, in `dtype`; `z_TV` itself where nothing changes. Never written to by the callers."""
    z = z_TV.to(dtype)
    if bias_V is not None:
        z = z + bias_V[: z.shape[1]]
    if softcap is not None:
        z = torch.tanh(z / softcap).mul_(softcap)
    if temperature != 1.0:
        z = z / temperature
    return z


def _blocks(z_TV: Tensor) -> list[slice]:
    """Rows to work on at a time: all of them, on CPU a few."""
    tokens, columns = z_TV.shape
    step = tokens if z_TV.device.type != "cpu" else _CPU_BLOCK // max(columns, 1)
    return [slice(at, min(at + max(step, 1), tokens)) for at in range(0, tokens, max(step, 1))]
