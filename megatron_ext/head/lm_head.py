"""`LmHead`: the facts of an lm head, checked once, and any set of read-outs of hidden states through it.

`Logits` is the same for logits that exist. Shapes: `[...]` are the leading dims of the tokens, D the hidden size, V the
vocabulary, R the ranks of `group`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once, and that Triton

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, group_rank, group_size, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.adapters.lora import LoRA, adapters_of, low_rank, options_of, rows_fault, widened
from megatron_ext.head.engine.autograd import Read
from megatron_ext.head.engine.call import Call
from megatron_ext.head.engine.chunked.sources import Rule, gather_tokens, of_each
from megatron_ext.head.engine.chunked.ways import OfChunks, OfLogits
from megatron_ext.head.engine.flatten import Flat
from megatron_ext.head.engine.linear import OfSoftmax
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits.linear import OfSoftmaxFixed
from megatron_ext.head.layer_facts import head_facts
from megatron_ext.head.options_by_mode import bits_or_mode
from megatron_ext.head.readouts.divergences.teacher import Teacher
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.row_passes.side_by_side import numbers
from megatron_ext.head.tokens_that_count import Left, left_in
from megatron_ext.head.validation import argument_checks, option_checks
from megatron_ext.head.validation.argument_checks import computed_dtype
from megatron_ext.head.validation.bits_checks import bits_fault
from megatron_ext.head.validation.option_checks import Bits, Cache, HiddenLayout
from megatron_ext.numerics.matrices import accumulation_dtype


@dataclass(frozen=True, eq=False)
class LmHead:
    """An lm head: logits are `softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature`.

    A value: nothing in it changes, and what every rank can see wrong with it is raised when it is made. What only one
    rank may see (its shard of the weight) is told to the other ranks by the first `read`, and raised on all of them.

    Attributes:
        weight: `[V/R, D]`, this rank's vocabulary shard, of the hidden states' dtype (any under autocast). In fp32 over
            hidden states of 16 bits: logits and gradients are computed in fp32, and dx is rounded once. A quantised one
            that has `dequantize()` (torchao, quanto), frozen: it is dequantised in each pass, and not held between.
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
            initialised, else no sharding.
        hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each its equal slice of dim 0.
        bias: `[V/R]`. Columns with a bias of -inf do not count.
        vocab: this rank's columns; None: equal shards in rank order, all columns count.
        logit_scale: the model multiplies its logits by it (muP), before a softcap.
        softcap: None: logits are not capped.
        temperature: logits are divided by it.
        cache: fraction in [0, 1] of the logits whose exponentials are kept for backward: `(8 - 2 * cache)` T V D / R
            FLOPs and `cache * T * V / R` elements of memory; from 1024 on: that many bytes at most. "bounded": as many
            eighths as take no more than the weight and its fp32 gradient, `min(1, 3 D / T)` in 16 bits; "auto": what
            fits into half of the memory that is free at the first call of a shape. For read-outs of the softmax alone,
            and for a divergence from a teacher by itself on one rank, which keeps its gradient for such a fraction of
            the tokens: `(12 - 4 * cache)` T V D with a teacher of the same D; "bounded" is at most 2^25 elements there,
            and none on CUDA or with `chunk_tokens`. Others keep none.
        chunk_tokens: tokens a chunk; None: chosen from the sizes. It changes memory and speed, not the result.
        gradient_accumulation_fusion: backward adds the weight gradient into `weight.main_grad`, by Megatron's protocol.
        bits: which bits are the same. "fast": in each run with the same shapes. "batch": a token's results and its row
            of dx also for any other tokens beside it, any chunk, cache, layout and packing; dW for any chunk, cache and
            layout. "tensor_parallel": all of these also for 1, 2, 4 and 8 ranks, each of which holds eighths of the
            vocabulary. The last two serve every read-out of the package, and one of your own that says `by_leaf`, on
            CPUs and on CUDA with Triton; on one machine, torch and number of threads: docs/exactness.md. None: "batch"
            where a batch-invariant mode is on, else "fast".
        logit_dtype: torch.bfloat16 or torch.float16, which the hidden states must have: the product is rounded to it
            before scale, softcap and temperature, which are taken in fp32 as the softmax is, as inference engines do.
            Gradients take the rounding for the identity. None or torch.float32: on CUDA the product's fp32 sums are
            used as they are; a CPU's products of 16-bit operands come rounded in any case.
        lora: `LoRA`, or several: low-rank parts of the logits, before scale, softcap and temperature. Given `bits`
            other than "fast", each pass makes one operand of weight and B.

    No gradient of a weight that wants none (`requires_grad` False) is computed, or has memory.
    """

    weight: Tensor
    tp_group: Group = None
    hidden_layout: HiddenLayout = "replicated"
    bias: Tensor | None = field(default=None, kw_only=True)
    vocab: VocabShard | None = field(default=None, kw_only=True)
    logit_scale: float = field(default=1.0, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    cache: Cache = field(default="bounded", kw_only=True)
    chunk_tokens: int | None = field(default=None, kw_only=True)
    gradient_accumulation_fusion: bool = field(default=False, kw_only=True)
    bits: Bits | None = field(default=None, kw_only=True)
    logit_dtype: torch.dtype | None = field(default=None, kw_only=True)
    lora: LoRA | Sequence[LoRA] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        option_checks.one_of("hidden_layout", self.hidden_layout, get_args(HiddenLayout))
        for name in ("softcap", "temperature", "logit_scale", "cache"):
            option_checks.check_option(name, getattr(self, name))
        option_checks.check_chunk_tokens(self.chunk_tokens)
        if self.bits is not None:  # else as the mode is when it is read
            option_checks.one_of("bits", self.bits, get_args(Bits))
        option_checks.check_logit_dtype(self.logit_dtype)
        argument_checks.check_one_piece(self.weight)
        group = tensor_parallel_group(self.tp_group)
        if group is None and self.tp_group is None and self.vocab is None:
            argument_checks.check_whole(self.weight)
        object.__setattr__(self, "tp_group", group)
        rows = self.weight.shape[0] if isinstance(self.weight, Tensor) and self.weight.dim() else 1
        object.__setattr__(self, "shard", argument_checks.shard_of(self.vocab, max(rows, 1), self.tp_group))
        in_slices = self.hidden_layout == "sequence"
        adapters = () if self.lora is None else adapters_of(self.lora, self.weight, self.tp_group, in_slices)
        object.__setattr__(self, "adapters", adapters)

    shard: VocabShard = field(init=False, repr=False)
    adapters: tuple[LoRA, ...] = field(init=False, repr=False)

    @classmethod
    def of(
        cls, layer: Any, tp_group: Group = None, hidden_layout: HiddenLayout | None = None, **facts: Any
    ) -> "LmHead":
        """The head of a layer that makes logits, or of its weight.

        Args:
            layer: a tensor or a `DTensor` `[V, D]` (sharded over a 1-D mesh: its group and shards are taken from it);
                an `nn.Linear`; what PEFT puts in its place, with the LoRA adapters that are active, or the copy that
                trains (`modules_to_save`); or Megatron-Core's output layer, of which bias, softcap, tensor-parallel
                group, sequence parallelism, gradient accumulation fusion and a `logit_dtype` of 16 bits are taken.
            tp_group, hidden_layout, facts: as for `LmHead`, `weight` too; they go before what the layer says.

        Raises:
            ValueError: the layer has no weight, or the weight is a DTensor that is not cut along the vocabulary; or it
                has adapters that are more than a low-rank product.
        """
        return cls(**head_facts(layer, {"tp_group": tp_group, "hidden_layout": hidden_layout, **facts}))

    def read(
        self,
        hidden: Tensor,
        *readouts: ReadOut,
        counts: Tensor | None = None,
        at_most: int | None = None,
        fault: ValueError | None = None,
    ) -> Any:
        """What `readouts` read out of the logits of `hidden`, which are made a chunk at a time.

        Args:
            hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0. fp32, bf16, fp16 or fp64.
            readouts: any, in one pass over the logits; those of labels take the same tensor of labels.
            counts: `[...]`, bool, of all ranks' tokens: others are left out before the first product, with results of
                0 and no gradient. One host sync, dynamic shapes.
            at_most: no more tokens than these count (with the sequence layout none of the ranks' slices has more): no
                host sync then, and shapes that do not change; products are of so many tokens. More are refused, on CUDA
                by a device-side assertion.
            fault: what the caller found wrong, and other ranks may not see: it is raised here, and on the others what
                the exchange says of a rank that refused.

        Returns:
            Of one read-out its result, of several a tuple of them; a result is a tensor of the tokens of all ranks,
            with the leading dims of the labels (or of the hidden states of all ranks), or a tuple of such. On every
            rank alike. Gradients of all of them are added in one backward pass.

        Communicates, at R > 1: forward 1 collective, backward 1; with the sequence layout 2 and 2; what a read-out
        needs besides is said there.

        Raises:
            ValueError: an argument breaks its rule; the message says which, and the fix.
        """
        argument_checks.check_floating("hidden", hidden)
        given, fault = fault, _checked(readouts, self)
        ranks, in_slices = group_size(self.tp_group), self.hidden_layout == "sequence"
        leading, fault = self._leading(hidden, readouts, ranks, in_slices, fault)
        fault = self.fault_beside(hidden, self.vocab, ranks) or fault
        call = self.call()
        if call.fixed:
            fault = bits_fault(call.bits, self, ranks, hidden, readouts) or fault
        if self.gradient_accumulation_fusion and torch.is_grad_enabled():
            fault = fault or argument_checks.main_grad_fault(self.weight)
        teachers = [r.teacher for r in readouts if r.teacher is not None]
        for teacher in teachers:
            fault = _teacher_fault(teacher, hidden, self) or fault
        fault, tokens = given or fault, leading.numel()
        sizes = [tokens // ranks] * ranks if in_slices and ranks > 1 else None

        left: Left | None = None
        if counts is None:
            option_checks.check_no_bound(at_most)
        else:
            argument_checks.check_counts(counts, leading)
            part = group_rank(self.tp_group) if sizes else 0
            left = left_in(counts.reshape(ranks if sizes else 1, -1), part, at_most)
            fault = fault or left.fault
            tokens, sizes = left.kept_T.shape[0], left.sizes if sizes else None

        def flat(x: Tensor) -> Tensor:
            x_T = x if len(leading) == 1 else x.reshape((leading.numel(), *x.shape[len(leading) :]))
            return x_T if left is None else left.of_all(x_T)

        adapters = (
            [*self.adapters, *(each for t in teachers for each in t.head.adapters)] if teachers else self.adapters
        )
        options = options_of(adapters) if adapters else None
        plan = Plan(readouts, call, flat, tokens, hidden.device, options)
        if left is not None and sizes is None:  # ranks that leave out others learn it then
            plan.places_T, plan.all_tokens = left.kept_T, leading.numel() + left.fills
        sides = [_computed(hidden, self.weight), *(_computed(t.hidden.detach(), t.head.weight) for t in teachers)]
        if sides[0].dtype != hidden.dtype and not self.adapters and not torch.is_autocast_enabled(hidden.device.type):
            plan.held = hidden.dtype
        if fault is not None:
            if sizes is not None and tokens:
                own = sizes[group_rank(self.tp_group)]
                shared = [left is None and t.hidden.dim() < hidden.dim() for t in teachers]
                rows = [own, *(own // hidden.shape[-2] if each else own for each in shared)]
                more = [sum(len(x.A) for x in head.adapters) for head in (self, *(t.head for t in teachers))]
                zeros = [
                    x.new_zeros(count, x.shape[1] + beside) for x, count, beside in zip(sides, rows, more, strict=True)
                ]
                gather_tokens(zeros, self.tp_group, sizes)
            plan.refuse(fault, accumulation_dtype(sides[0].dtype), hidden.device)
        plan.choose_columns()
        if left is not None:
            sides = [left.of_mine(of_each(x, len(sides[0]))) for x in sides]
        if self.gradient_accumulation_fusion:
            main_grad.promise(self.weight)
        return _shaped(plan, self._apply(sides, teachers, plan, sizes), leading, left)

    def _apply(
        self, sides: list[Tensor], teachers: Sequence[Teacher], plan: Plan, sizes: list[int] | None
    ) -> Sequence[Tensor]:
        fixed = plan.call.fixed
        x_TD, weight, bias, low = self.inputs(sides[0], fixed)
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, weight, bias, low))
        if plan.needs_logits:
            theirs = [x for side, t in zip(sides[1:], teachers, strict=True) for x in t.head.inputs(side, fixed)]
            inputs = [None if x is None else x.detach() for x in theirs]
            rules = [head.rule() for head in (self, *(t.head for t in teachers))]
            read = _apply_eagerly if fixed else Read.apply
            return read(OfChunks(rules, sizes, keep), plan, x_TD, weight, bias, low, *inputs)
        if weight.shape[0] == 0:  # one column that does not count is simpler than none
            nowhere = VocabShard(self.shard.size, self.shard.size + 1, self.shard.size)
            plan.call = replace(plan.call, vocab=nowhere, fuse_main_grad=False)
            weight, bias = F.pad(numbers(weight), (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
            low = None if low is None else F.pad(low, (0, 0, 0, 1))
        if fixed:
            return _apply_eagerly(OfSoftmaxFixed(sizes, keep), plan, x_TD, weight, bias, low)
        return Read.apply(OfSoftmax(sizes, keep), plan, x_TD, weight, bias, low)

    def _leading(
        self, hidden: Tensor, readouts: Sequence[ReadOut], ranks: int, in_slices: bool, fault: ValueError | None
    ) -> tuple[torch.Size, ValueError | None]:
        """The leading dims of all ranks' tokens, and whether hidden states fit them."""
        given = _per_token(readouts)
        if not given:
            lead = hidden.shape[:-1]
            if in_slices and ranks > 1:
                lead = torch.Size((lead[0] * ranks, *lead[1:]))
            return lead, fault
        name, first = given[0]
        found = argument_checks.layout_fault(hidden, first, in_slices, ranks, name)
        for other, x in given[1:]:
            argument_checks.check_same_shape(other, x, first)
        return first.shape, found or fault

    def fault_beside(self, hidden: Tensor, vocab: VocabShard | None, ranks: int, whose: str = "") -> ValueError | None:
        """What is wrong with this rank's weight, bias and adapters, seen from `hidden`; `whose` begins their names."""
        fault = argument_checks.linear_fault(hidden, self.weight, self.bias, vocab, ranks, whose)
        if self.adapters:
            fault = fault or rows_fault(self.adapters, self.weight)
        if fault is not None:
            return fault
        dtype = computed_dtype(hidden, self.weight)
        return option_checks.logit_dtype_fault(self.logit_dtype, dtype, f"{whose}hidden")

    def call(self) -> Call:
        """What the engine takes of it."""
        return Call(
            self.tp_group,
            self.shard,
            self.softcap,
            self.temperature,
            self.chunk_tokens,
            self.cache,
            self.gradient_accumulation_fusion,
            bits=bits_or_mode(self.bits),
            logit_scale=self.logit_scale,
            rounds=option_checks.rounds(self.logit_dtype),
        )

    def rule(self) -> tuple[float | None, float, bool]:
        """Softcap and scale of its logits, and whether they are rounded."""
        return self.softcap, self.logit_scale, option_checks.rounds(self.logit_dtype)

    def inputs(self, x_TD: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the engine takes: hidden states, with the columns of the low rank if there is one, weight, bias, it."""
        if self.adapters:
            x_TD = widened(x_TD, self.adapters, self.tp_group, self.hidden_layout == "sequence", fixed)
        return x_TD, self.weight, self.bias, low_rank(self.adapters)


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits that exist, `softcap * tanh(logits / softcap) / temperature` of them, for the same read-outs.

    Attributes:
        logits: `[..., V/R]`, this rank's columns, any floating dtype, in any memory order of the leading dims. -inf
            columns of a token do not count.
        tp_group, vocab, softcap, temperature, chunk_tokens: as for `LmHead`.
        gradient_into_logits: backward writes the gradient into the memory of `logits` instead of new memory; it runs
            once then, and who needs the logits afterwards gets an error from autograd. Of read-outs of the softmax, and
            not into a leaf's memory.
    """

    logits: Tensor
    tp_group: Group = None
    vocab: VocabShard | None = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    chunk_tokens: int | None = field(default=None, kw_only=True)
    gradient_into_logits: bool = field(default=False, kw_only=True)
    name: str = field(default="logits", kw_only=True)

    def __post_init__(self) -> None:
        argument_checks.check_floating(self.name, self.logits)
        for name in ("softcap", "temperature"):
            option_checks.check_option(name, getattr(self, name))
        option_checks.check_chunk_tokens(self.chunk_tokens)
        object.__setattr__(self, "tp_group", tensor_parallel_group(self.tp_group))
        columns = max(self.logits.shape[-1], 1)
        object.__setattr__(self, "shard", argument_checks.shard_of(self.vocab, columns, self.tp_group))

    shard: VocabShard = field(init=False, repr=False)

    def read(self, *readouts: ReadOut, fault: ValueError | None = None) -> Any:
        """What `readouts` read out; see `LmHead.read`. Nothing of vocabulary size is saved beside the logits, whose
        dtype their gradient has.

        Communicates: forward 1 collective at R > 1, backward none; what a read-out needs besides is said there.
        """
        logits = self.logits
        given, fault = fault, _checked(readouts, self)
        for name, x in _per_token(readouts):
            argument_checks.check_tokens_of(name, x, self.name, logits)
        ranks = group_size(self.tp_group)
        fault = argument_checks.shard_fault(self.shard, logits.shape[-1], self.name, ranks) or fault
        teachers = [r.teacher for r in readouts if r.teacher is not None]
        for teacher in teachers:
            fault = _teacher_logits_fault(teacher, self, ranks) or fault
        fault = given or fault
        in_step = any(r.in_step for r in readouts) and ranks > 1
        flat = Flat(logits, as_given=in_step)  # the ranks exchange rows of the same tokens, chunk by chunk
        plan = Plan(readouts, self.call(), flat, flat.shape.numel(), logits.device)
        if fault is not None:
            plan.refuse(fault, accumulation_dtype(logits.dtype), logits.device)
        z = flat.rows(logits)
        base = logits if logits._base is None else logits._base
        of_a_leaf = base.is_leaf and base.requires_grad  # whose values outlive backward
        in_place = all(stride or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True))
        own_memory = in_place and not of_a_leaf
        both = self, *teachers
        rules = [Rule(None, each.softcap) for each in both] if plan.needs_logits else [Rule()] * len(both)
        into_logits = self.gradient_into_logits and own_memory and not plan.needs_logits
        others = [flat.rows(teacher.logits.detach()) for teacher in teachers]
        plan.places_T = flat.places(z.device, ranks)
        found = Read.apply(OfLogits(rules, into_logits), plan, z, *others)
        return _given_back(plan, [flat.up(x) for x in found])

    def call(self) -> Call:
        """What the engine takes of it."""
        return Call(self.tp_group, self.shard, self.softcap, self.temperature, self.chunk_tokens)


@_disable_dynamo  # what holds of this processor's products is found out by running some
def _apply_eagerly(*arguments: Any) -> Sequence[Tensor]:
    return Read.apply(*arguments)


def _checked(readouts: Sequence[ReadOut], facts: LmHead | Logits) -> ValueError | None:
    """Raises what every rank sees wrong with the read-outs, returns what this rank alone may see."""
    fault, labels = None, None
    for r in readouts:
        if not isinstance(r, ReadOut):
            raise ValueError(f"readouts hold {r!r}: each must be a read-out, as LogProbs(labels) or Entropy()")
        fault = r.check(facts.shard.size, facts.vocab, facts.tp_group) or fault
        if r.reads_labels:
            labels = r if labels is None else labels
            if r.labels is not labels.labels or r.ignore_index != labels.ignore_index:
                raise ValueError(
                    f"{type(labels).__name__} and {type(r).__name__} do not have the same labels: a call reads one "
                    f"tensor of them, with one ignore_index; pass both the same tensor, or read the log-probabilities "
                    f"of the other labels with Gather(labels.clamp(min=0).unsqueeze(-1)) and set those of ignored "
                    f"tokens to 0"
                )
    if not readouts:
        raise ValueError("readouts are none: there is nothing to read; pass LogProbs(labels), Entropy() or another")
    return fault


def _teacher_fault(teacher: Any, hidden: Tensor, student: LmHead) -> ValueError | None:
    if not isinstance(teacher, Teacher):
        raise ValueError(
            f"teacher is {type(teacher).__name__}: beside hidden states it must be a Teacher(LmHead(weight), hidden)"
        )
    option_checks.check_teachers_temperature("teacher's head", teacher.head.temperature, student.temperature)
    argument_checks.check_floating("teacher_hidden", teacher.hidden)
    tokens = (hidden.shape[:-1], hidden.shape[:-2])  # the second: each of the teacher's is of n of the student's
    if teacher.hidden.shape[:-1] not in tokens or teacher.hidden.device != hidden.device:
        return ValueError(
            f"teacher_hidden has shape {tuple(teacher.hidden.shape)} on {teacher.hidden.device}, student_hidden "
            f"{tuple(hidden.shape)} on {hidden.device}: both must be hidden states of the same tokens, on one device; "
            f"or the student's [..., n, D] and the teacher's [..., D]"
        )
    return teacher.head.fault_beside(teacher.hidden, student.shard, group_size(student.tp_group), "teacher_")


def _teacher_logits_fault(teacher: Any, student: Logits, ranks: int) -> ValueError | None:
    if not isinstance(teacher, Logits):
        raise ValueError(f"teacher is {type(teacher).__name__}: beside Logits it must be Logits of the same tokens")
    option_checks.check_teachers_temperature("teacher", teacher.temperature, student.temperature)
    theirs, logits = teacher.logits, student.logits
    if theirs.shape[:-1] != logits.shape[:-1] or theirs.device != logits.device:
        raise ValueError(
            f"teacher_logits have shape {tuple(theirs.shape)} on {theirs.device}, student_logits "
            f"{tuple(logits.shape)} on {logits.device}: both must be logits of the same tokens, on one device"
        )
    return argument_checks.shard_fault(student.shard, theirs.shape[-1], "teacher_logits", ranks)


def _per_token(readouts: Sequence[ReadOut]) -> list[tuple[str, Tensor]]:
    """The arguments that have one entry for each token, with their names."""
    given = [r.per_token() for r in readouts]
    return [each for each in given if each is not None]


def _computed(hidden: Tensor, weight: Any) -> Tensor:
    """`[T, D]` in that dtype."""
    x = hidden.to(computed_dtype(hidden, weight))
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _shaped(plan: Plan, found: Sequence[Tensor], leading: torch.Size, left: Left | None) -> Any:
    """The results with the leading dims of the tokens, 0 where a token was left out."""
    if left is not None:
        found = [left.spread(x, leading.numel()) for x in found]
    if len(leading) != 1:
        found = [x.reshape((*leading, *x.shape[1:])) for x in found]
    return _given_back(plan, found)


def _given_back(plan: Plan, found: Sequence[Tensor]) -> Any:
    """The result of each read-out, a tuple where it gives several; alone where it is the only one."""
    rest = iter(found)
    each = [tuple(next(rest) for _ in range(r.count)) for r in plan.readouts]
    results = tuple(one[0] if len(one) == 1 else one for one in each)
    return results[0] if len(results) == 1 else results
