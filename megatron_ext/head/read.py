"""A call of `LmHead.read` or `Logits.read`, in its order: check, bind, run, shape.

What every rank sees wrong is raised before anything is sent. What one rank alone may see is collected here, as `fault`:
the one that was found last counts, and before all of them the caller's. `Plan.raise_on_all_ranks` tells the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once, and that Triton

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, group_rank
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import checks
from megatron_ext.head.call.matmul import numbers
from megatron_ext.head.call.resolved_head import ResolvedHead, bits_fault
from megatron_ext.head.checks import check_at_most, computed_dtype
from megatron_ext.head.engine.chunked import ChunkedHead, StoredLogitsHead
from megatron_ext.head.engine.linear import LinearHead
from megatron_ext.head.engine.logit_sources import Flat, LogitTransform, gather_tokens, of_each
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.lora import adapters_of, low_rank, options_of, rows_fault, widened
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.readouts.teacher import Teacher, teacher_fault, teacher_logits_fault
from megatron_ext.head.row_passes.dispatch import PYTORCH, passes_of
from megatron_ext.numerics.fixed_order import products_fault
from megatron_ext.numerics.matrices import accumulation_dtype
from megatron_ext.numerics.readable_values import has_values, raise_if


class CountedTokens(NamedTuple):
    """The tokens that are left.

    Attributes:
        kept_T: their places among all tokens, part after part; past the end what fills up.
        mine_T: of this rank's part, the places in it; past its end what fills up.
        sizes: how many each part has; None where there is one part and its size was not read for it.
        fills: whether something may fill up.
        fault: that more tokens count than a bound says, for the caller to raise where other ranks learn of it.
    """

    kept_T: Tensor
    mine_T: Tensor
    sizes: list[int] | None
    fills: bool
    fault: ValueError | None = None

    def of_all(self, x_T: Tensor) -> Tensor:
        """Select the tokens that are left from a tensor of all tokens; what fills up has the last token's values."""
        return x_T[self.kept_T.clamp(max=x_T.shape[0] - 1) if self.fills else self.kept_T]

    def of_mine(self, x_TD: Tensor) -> Tensor:
        """Select the hidden states of this rank that are left, and 0 for what fills up."""
        if not self.fills:
            return x_TD.index_select(0, self.mine_T)
        there_T1 = (self.mine_T < x_TD.shape[0]).unsqueeze(1)
        return x_TD.index_select(0, self.mine_T.clamp(max=x_TD.shape[0] - 1)).where(there_T1, 0.0)

    def spread(self, x_T: Tensor, tokens: int) -> Tensor:
        """Results of all tokens, 0 where one was left out."""
        room_T = x_T.new_zeros(tokens + self.fills, *x_T.shape[1:])
        return room_T.index_copy(0, self.kept_T, x_T)[:tokens]


def left_in(counts_RP: Tensor, part: int, at_most: int | None) -> CountedTokens:
    """Choose the tokens of each part that count, `part` being this rank's. `at_most`: no more than so many of each;
    None: as many as there are, which waits for the device.

    Raises:
        ValueError: `at_most` is no positive int.

    More tokens that count than `at_most` are the result's `fault`; on CUDA they stop the device.
    """
    check_at_most(at_most)
    parts, width = counts_RP.shape
    if at_most is None or not width:
        sizes = counts_RP.sum(1).tolist() if parts > 1 else None
        of_all_T, own_T = (counts.nonzero().squeeze(1) for counts in (counts_RP.reshape(-1), counts_RP[part]))
        return CountedTokens(of_all_T, own_T, sizes, False)
    size, fault = min(at_most, width), None
    if has_values(counts_RP):
        try:
            raise_if(
                (counts_RP.sum(1) > at_most).any(),
                f"at_most, or skip_ignored, is {at_most}, and more tokens count: it must bound them, with the sequence "
                f"layout in each rank's slice; pass a larger one, or none",
            )
        except ValueError as found:
            fault = found
    places_T = [counts_P.nonzero_static(size=size, fill_value=width).squeeze(1) for counts_P in counts_RP]
    whole_T = [(x + i * width).masked_fill(x == width, parts * width) for i, x in enumerate(places_T)]
    return CountedTokens(torch.cat(whole_T), places_T[part], [size] * parts, True, fault)


def read_hidden(
    head: ResolvedHead,
    own: Any,
    hidden: Tensor,
    asked: Sequence[ReadOut],
    counts: Tensor | None,
    at_most: int | None,
    given: ValueError | None,
) -> Any:
    """See `LmHead.read`. `own`: the `LmHead`; `given`: the caller's fault."""
    checks.check_floating("hidden", hidden)
    ranks = 1 if head.group is None else head.group.size()
    readouts, teachers, fault = checked(asked, head)
    leading, found = _leading(hidden, readouts, ranks, head.in_slices)
    fault = _tensors_fault(own, hidden, None if head.guessed else head.vocab, ranks) or found or fault
    if head.bits != "fast":
        fault = bits_fault(head, ranks, hidden, readouts) or fault
    if head.fused_epilogue:
        _check_fused_epilogue(head, own, hidden, readouts)
    if head.fuse_main_grad and torch.is_grad_enabled():
        fault = fault or _main_grad_fault(own.weight)
    for teacher in teachers:
        found = teacher_fault(teacher, hidden, head)
        found = found or _tensors_fault(teacher.head, teacher.hidden, head.vocab, ranks, "teacher_")
        fault = found or fault
    fault, tokens = given or fault, leading.numel()
    sizes = [tokens // ranks] * ranks if head.in_slices and ranks > 1 else None

    left: CountedTokens | None = None
    if counts is not None:
        checks.check_counts(counts, leading)
        part = group_rank(head.group) if sizes else 0
        left = left_in(counts.reshape(ranks if sizes else 1, -1), part, at_most)
        fault = fault or left.fault
        tokens, sizes = left.kept_T.shape[0], left.sizes if sizes else None
    elif at_most is not None:
        checks.check_no_bound(at_most)

    def flat(x: Tensor) -> Tensor:
        x_T = x if len(leading) == 1 else x.reshape((leading.numel(), *x.shape[len(leading) :]))
        return x_T if left is None else left.of_all(x_T)

    adapters = adapters_of(own.lora) if own.lora else ()
    for teacher in teachers:
        adapters = (*adapters, *adapters_of(teacher.head.lora))
    options, places, held = options_of(adapters) if adapters else None, None, None
    if left is not None and sizes is None:  # ranks that leave out others learn it then
        places = left.kept_T, leading.numel() + left.fills
    sides = [_computed(hidden, own.weight)]
    for t in teachers:
        sides.append(_computed(t.hidden.detach(), t.head.weight))
    if sides[0].dtype != hidden.dtype and not own.lora and not torch.is_autocast_enabled(hidden.device.type):
        held = hidden.dtype
    plan = Plan(readouts, head, flat, tokens, hidden, options, places, held)
    if plan.fixed:
        for side in sides:
            fault = fault or products_fault(side)
    if fault is not None:
        if sizes is not None and tokens:
            shared = [left is None and t.hidden.dim() < hidden.dim() for t in teachers]
            repeats = [1, *(hidden.shape[-2] if each else 1 for each in shared)]
            _gather_zeros(sides, [own, *(t.head for t in teachers)], repeats, sizes, head.group)
        plan.raise_on_all_ranks(fault, accumulation_dtype(sides[0].dtype), hidden.device)
    if plan.needs_logits:
        plan.choose_columns()
    if left is not None:
        sides = [left.of_mine(of_each(x, len(sides[0]))) for x in sides]
    if head.fuse_main_grad:
        main_grad.promise(own.weight)
    found_T = _run(own, sides, teachers, plan, sizes)
    if left is not None:
        found_T = [left.spread(x, leading.numel()) for x in found_T]
    if len(leading) != 1:
        found_T = [x.reshape((*leading, *x.shape[1:])) for x in found_T]
    return _as_asked(plan, found_T)


def _run(
    own: Any, sides: list[Tensor], teachers: Sequence[Teacher], plan: Plan, sizes: list[int] | None
) -> Sequence[Tensor]:
    """The results of all read-outs, one after the other, by the autograd function that serves them."""
    head = plan.call
    x_TD, weight, bias, low = _inputs(own, sides[0], head) if own.lora else (sides[0], own.weight, own.bias, None)
    keep = torch.is_grad_enabled() and (
        x_TD.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (low is not None and low.requires_grad)
    )
    if plan.needs_logits:
        inputs: list[Tensor | None] = []
        transforms = [LogitTransform(None, own.softcap, own.logit_scale, head.rounds)]
        for side, t in zip(sides[1:], teachers, strict=True):
            rounds = checks.rounds(t.head.logit_dtype)
            transforms.append(LogitTransform(None, t.head.softcap, t.head.logit_scale, rounds))
            inputs += [None if x is None else x.detach() for x in _inputs(t.head, side, head)]
        given = transforms, sizes, keep, x_TD, weight, bias, low, *inputs
        return _apply_eagerly(ChunkedHead, plan, *given) if plan.fixed else ChunkedHead.apply(plan, *given)
    if weight.shape[0] == 0:
        plan.take_a_column()
        weight, bias = F.pad(numbers(weight), (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
        low = None if low is None else F.pad(low, (0, 0, 0, 1))
    if plan.fixed:
        return _apply_eagerly(LinearHead, plan, sizes, keep, x_TD, weight, bias, low)
    return LinearHead.apply(plan, sizes, keep, x_TD, weight, bias, low)


def _inputs(given: Any, x_TD: Tensor, head: ResolvedHead) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Hidden states, with the columns of the low rank if there is one, weight, bias and low rank."""
    adapters = adapters_of(given.lora)
    if adapters:
        x_TD = widened(x_TD, adapters, head.group, head.in_slices, head.fixed)
    return x_TD, given.weight, given.bias, low_rank(adapters)


@_disable_dynamo  # what holds of this processor's products is found out by running some
def _apply_eagerly(function: Any, plan: Plan, *arguments: Any) -> Sequence[Tensor]:
    plan.passes = passes_of(plan.target_T)  # the plan may have been made while compiling
    return function.apply(plan, *arguments)


def read_logits(head: ResolvedHead, given: Any, asked: Sequence[ReadOut], callers: ValueError | None) -> Any:
    """See `Logits.read`. `given`: the `Logits`; `callers`: the caller's fault."""
    logits, ranks = given.logits, head.ranks
    readouts, teachers, fault = checked(asked, head)
    for r in readouts:
        each = r.per_token()
        if each is not None:
            checks.check_tokens_of(each[0], each[1], given.name, logits)
    fault = checks.shard_fault(head.vocab, logits.shape[-1], given.name, ranks) or fault
    for teacher in teachers:
        fault = teacher_logits_fault(teacher, given, head.vocab, ranks) or fault
    fault = callers or fault
    in_step = any(r.in_step for r in readouts) and ranks > 1
    flat = Flat(logits, as_given=in_step)  # the ranks exchange rows of the same tokens, chunk by chunk
    tokens = flat.shape.numel()
    plan = Plan(readouts, head, flat, tokens, logits, places=(flat.places(logits.device, ranks), tokens))
    if fault is not None:
        plan.raise_on_all_ranks(fault, accumulation_dtype(logits.dtype), logits.device)
    z = flat.rows(logits)
    base = logits if logits._base is None else logits._base
    of_a_leaf = base.is_leaf and base.requires_grad  # whose values outlive backward
    in_place = all(stride or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True))
    own_memory = in_place and not of_a_leaf
    both = given, *teachers
    transforms = [LogitTransform(softcap=each.softcap if plan.needs_logits else None) for each in both]
    into_logits = given.gradient_into_logits and own_memory and not plan.needs_logits
    others = [flat.rows(teacher.logits.detach()) for teacher in teachers]
    found = StoredLogitsHead.apply(plan, transforms, into_logits, z, *others)
    return _as_asked(plan, [flat.up(x) for x in found])


def checked(asked: Sequence[ReadOut], head: ResolvedHead) -> tuple[list[ReadOut], list[Any], ValueError | None]:
    """Copies of the caller's read-outs for this call, which were checked, their teachers, and what this rank alone may
    see wrong."""
    fault, labels, vocab = None, None, None if head.guessed else head.vocab
    found: list[ReadOut] = []
    teachers: list[Any] = []
    for given in asked:
        if not isinstance(given, ReadOut):
            raise ValueError(f"readouts hold {given!r}: each must be a read-out, as LogProbs(labels) or Entropy()")
        r = given.copied()
        found.append(r)
        if r.teacher is not None:
            teachers.append(r.teacher)
        fault = r.check(head.vocab.size, vocab, head.group) or fault
        if r.reads_labels:
            labels = r if labels is None else labels
            if r.labels is not labels.labels or r.ignore_index != labels.ignore_index:
                raise ValueError(
                    f"{type(labels).__name__} and {type(r).__name__} do not have the same labels: a call reads one "
                    f"tensor of them, with one ignore_index; pass both the same tensor, or read the log-probabilities "
                    f"of the other labels with Gather(labels.clamp(min=0).unsqueeze(-1)) and set those of ignored "
                    f"tokens to 0"
                )
    if not found:
        raise ValueError("readouts are none: there is nothing to read; pass LogProbs(labels), Entropy() or another")
    return found, teachers, fault


def _leading(
    hidden: Tensor, readouts: Sequence[ReadOut], ranks: int, in_slices: bool
) -> tuple[torch.Size, ValueError | None]:
    """The leading dims of all ranks' tokens, and whether hidden states fit them."""
    first: Any = None
    fault = None
    for r in readouts:
        given = r.per_token()
        if given is None:
            continue
        if first is None:
            first = given[1]
            fault = checks.layout_fault(hidden, first, in_slices, ranks, given[0])
        elif given[1] is not first:
            checks.check_same_shape(*given, first)
    if first is not None:
        return first.shape, fault
    lead = hidden.shape[:-1]
    return torch.Size((lead[0] * ranks, *lead[1:])) if in_slices and ranks > 1 else lead, None


def _tensors_fault(
    given: Any, hidden: Tensor, vocab: VocabShard | None, ranks: int, whose: str = ""
) -> ValueError | None:
    """Return the fault of this rank's weight, bias and adapters, seen from `hidden`; `whose` begins their names."""
    found = checks.linear_fault(hidden, given.weight, given.bias, vocab, ranks, whose)
    if found is None and given.lora:
        found = rows_fault(adapters_of(given.lora), given.weight)
    if found is not None or given.logit_dtype is None:
        return found
    dtype = computed_dtype(hidden, given.weight)
    return checks.logit_dtype_fault(given.logit_dtype, dtype, f"{whose}hidden")


def _check_fused_epilogue(head: ResolvedHead, own: Any, hidden: Tensor, readouts: Sequence[ReadOut]) -> None:
    """Refuses what kernels with a fused epilogue do not have; every rank sees it.

    Raises:
        ValueError: an argument is not theirs, or there are no such kernels here.
    """
    dtype, width = computed_dtype(hidden, own.weight), hidden.shape[-1]
    others = [type(r).__name__ for r in readouts if r.needs_logits or r.mean]
    found = {
        f"logits are computed in {dtype}, not bfloat16": dtype != torch.bfloat16,
        f"hidden has {width} columns, no multiple of 8": width % 8 or not width,
        f"softcap is {head.softcap}": head.softcap is not None,
        f'bits is "{head.bits}"': head.fixed,
        f"logit_dtype is {own.logit_dtype}": head.rounds,
        f"chunk_tokens is {head.chunk_tokens}": head.chunk_tokens is not None,
        "lora is given": bool(own.lora),
        f"{', '.join(others)} read more than sums of exponentials": others,
        f"hidden is on {hidden.device}, without Triton's kernels": passes_of(hidden) is PYTORCH,
    }
    for reason, holds in found.items():
        if holds:
            raise ValueError(
                f"fused_epilogue is True and {reason}: it is for bf16 hidden states of a multiple of 8 columns on CUDA "
                f"with Triton, for read-outs of the softmax without label smoothing, softcap, lora, logit_dtype and "
                f'chunk_tokens, and bits "fast"; leave fused_epilogue out of this head'
            )


def _main_grad_fault(weight: Tensor) -> ValueError | None:
    if not weight.requires_grad or hasattr(weight, "get_main_grad"):
        return None
    try:
        main_grad.buffer_of(weight)
    except ValueError as fault:
        return fault
    return None


def _gather_zeros(
    sides: list[Tensor], heads: Sequence[Any], repeats: list[int], sizes: list[int], group: Group
) -> None:
    """Take part in the gather of hidden states, on a rank that refused its arguments. `repeats`: how many tokens a row
    of each side is of."""
    own = sizes[group_rank(group)]
    widths = [
        x.shape[1] + sum(len(each.A) for each in adapters_of(head.lora)) for x, head in zip(sides, heads, strict=True)
    ]
    zeros = [x.new_zeros(own // n, width) for x, n, width in zip(sides, repeats, widths, strict=True)]
    gather_tokens(zeros, group, sizes)


def _computed(hidden: Tensor, weight: Any) -> Tensor:
    """Hidden states `[T, D]` in the dtype to compute in; as they are where the weight, refused, has no dtype."""
    dtype = getattr(weight, "dtype", None)
    alike = dtype is None or (hidden.dtype == dtype and not torch.is_autocast_enabled(hidden.device.type))
    x = hidden if alike else hidden.to(computed_dtype(hidden, weight))
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _as_asked(plan: Plan, found: Sequence[Tensor]) -> Any:
    """The result of each read-out, a tuple where it gives several; alone where it is the only one."""
    results, at = [], 0
    for r in plan.readouts:
        results.append(found[at] if r.count == 1 else tuple(found[at : at + r.count]))
        at += r.count
    return results[0] if len(results) == 1 else tuple(results)
