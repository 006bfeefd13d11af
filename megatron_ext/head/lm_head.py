"""`LmHead`: the properties of an lm head, as given, and `read`, which computes any set of read-outs of hidden states in
one call: check, bind, run, shape. `logits.py` does the same for logits that exist.

A fault that every rank sees is raised before anything is sent. A fault that maybe one rank alone sees is kept in `read`
as `fault`: the caller's first, else the last one found. `Plan.raise_on_all_ranks` tells the other ranks.

Shapes: `[...]` are the leading dims of the tokens, D the hidden size, V the vocabulary, R the ranks of `group`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once, and that Triton

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, VocabShard, group_rank, tensor_parallel_group
from megatron_ext.head import checks
from megatron_ext.head.call.matmul import numbers
from megatron_ext.head.call.resolved_head import ResolvedHead, bits_fault
from megatron_ext.head.checks import Bits, Cache, HiddenLayout, bits_or_mode, computed_dtype
from megatron_ext.head.counted_tokens import CountedTokens, left_in
from megatron_ext.head.engine.chunk_logits import LogitTransform, gather_tokens, of_each
from megatron_ext.head.engine.chunked import ChunkedHead
from megatron_ext.head.engine.linear import LinearHead
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.summed import SummedHead, chunks_in_forward
from megatron_ext.head.layer_facts import HeadFacts, check_forward, head_facts
from megatron_ext.head.lora import (
    LoRA,
    adapters_of,
    check_adapters,
    check_dropout,
    low_rank,
    options_of,
    rows_fault,
    widened,
)
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.readouts.teacher import Teacher, teacher_fault
from megatron_ext.head.row_passes.passes import has_triton, passes_of
from megatron_ext.numerics.fixed_order import products_fault
from megatron_ext.numerics.tensors import accumulation_dtype

_NUMBERS = {"softcap": None, "temperature": 1.0, "logit_scale": 1.0, "cache": "bounded"}


@dataclass(frozen=True, eq=False)
class LmHead:
    """An lm head: logits are `softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature`.

    The object holds what was given, and does not change. A wrong option raises an error when the object is made; a
    fault that depends on groups and ranks is raised by `read`. A fault that only one rank may see (its shard of the
    weight) travels in the exchange of `read`, and is raised on every rank.

    Attributes:
        weight: `[V/R, D]`, this rank's vocabulary shard, in the hidden states' dtype (any under autocast). An fp32
            weight with hidden states of 16 bits gives logits and gradients in fp32, and dx rounded once. A frozen
            weight with `dequantize()` (torchao, quanto) is dequantised anew in each pass.
        tp_group: the ranks that share the vocabulary. None: Megatron's tensor-parallel group if `parallel_state` is
            initialised when the head is read, else no sharding.
        hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each holds a slice of dim 0.
        bias: `[V/R]`. Columns with a bias of -inf do not count.
        vocab: this rank's columns; None: equal shards in rank order, all columns count.
        logit_scale: the number by which the model multiplies its logits (muP), before a softcap.
        softcap: the bound of the capped logits; None: logits are not capped.
        temperature: the number by which logits are divided.
        cache: the exponentials of logits that are kept for backward. From 0 to 1: this fraction, with
            `(8 - 2 * cache)` T V D / R FLOPs and `cache * T * V / R` elements of memory. From 1024 on: at most so many
            bytes. "bounded": as many eighths as take no more than the weight and its fp32 gradient, `min(1, 3 D / T)`
            in 16 bits. "auto": as many as fit into half of the memory that is free at the first call of a shape.
            Read-outs of the softmax alone keep exponentials. A divergence from a teacher, read alone on one rank, keeps
            its gradient for this fraction of the tokens: `(12 - 4 * cache)` T V D with a teacher of the same D; then
            "bounded" is at most 2^25 elements, and none on CUDA or with `chunk_tokens`. Others keep nothing.
        chunk_tokens: the tokens of a chunk; None: chosen from the sizes. The option changes memory and speed, not the
            result; with `weights` of `read` it must be the same on all ranks.
        gradient_accumulation_fusion: backward adds the weight gradient into `weight.main_grad`, by Megatron's protocol;
            the gradient of a weight of Megatron-FSDP is returned, since Megatron-FSDP copies it by itself.
        bits: which results have the same bits. "fast": runs with the same shapes. "batch": also a token's results and
            its row of dx beside any other tokens, with any chunk, cache, layout and packing, and dW with any chunk,
            cache and layout. "tensor_parallel": also all of these on 1, 2, 4 and 8 ranks, each of which holds eighths
            of the vocabulary. None: "batch" if a batch-invariant mode is on, else "fast". "batch" and "tensor_parallel"
            serve every read-out of the package, and your own that set `by_leaf`, on CPUs and on CUDA with Triton; the
            promise is for one machine, torch and number of threads: docs/exactness.md.
        logit_dtype: torch.bfloat16 or torch.float16, the dtype of the hidden states: the product is rounded to this
            dtype, as in inference engines; scale, softcap, temperature and softmax follow in fp32. Gradients treat the
            rounding as the identity. None or torch.float32: on CUDA the product's fp32 sums are used as they are; on a
            CPU products of 16-bit operands are rounded in any case.
        fused_epilogue: experimental, not measured yet. The kernels of the products (in Triton, for Hopper) take the
            exponentials, so logits take no memory without gradient, nor where backward recomputes them. For read-outs
            of the softmax with bf16 on CUDA; all else raises an error: docs/head.md#exponentials-in-the-product
        sm_margin: with `fused_epilogue`, the number of the GPU's multiprocessors that its kernels leave free, as many
            as NCCL may take (`NCCL_MAX_CTAS`): with none left free, a collective waits for the end of the kernel.
        lora: one `LoRA` or several: low-rank parts of the logits, before scale, softcap and temperature. With `bits`
            other than "fast", each pass makes one operand of weight and B.

    The gradient of a weight with `requires_grad` False is not computed, and takes no memory.
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
    fused_epilogue: bool = field(default=False, kw_only=True)
    sm_margin: int = field(default=0, kw_only=True)
    lora: LoRA | Sequence[LoRA] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        checks.check_options(self, _NUMBERS)
        if self.hidden_layout != "replicated":
            checks.one_of("hidden_layout", self.hidden_layout, get_args(HiddenLayout))
        if self.chunk_tokens is not None:
            checks.check_chunk_tokens(self.chunk_tokens)
        if self.bits is not None:  # else `read` looks up the mode
            checks.one_of("bits", self.bits, get_args(Bits))
        if self.logit_dtype is not None:
            checks.check_logit_dtype(self.logit_dtype)
        if self.sm_margin != 0:
            checks.check_sm_margin(self.sm_margin, self.fused_epilogue)
        if self.vocab is not None:
            checks.check_vocab(self.vocab)
        if self.lora is not None:
            check_adapters(adapters_of(self.lora))

    @classmethod
    def of(
        cls,
        layer: Any,
        tp_group: Group = None,
        hidden_layout: HiddenLayout | None = None,
        *,
        weight: Tensor | None = None,
        **facts: Unpack[HeadFacts],
    ) -> "LmHead":
        """Make the head of a layer that computes logits, or of such a layer's weight.

        Args:
            layer: a tensor `[V, D]`; a `DTensor` `[V, D]` over a 1-D mesh, whose group and shards are taken; an
                `nn.Linear`; PEFT's layer around one, with its active LoRA adapters or the copy that it trains
                (`modules_to_save`); or Megatron-Core's output layer, whose bias, softcap, tensor-parallel group,
                sequence parallelism, gradient accumulation fusion and 16-bit `logit_dtype` are taken. The layer is not
                called: its hooks do not run, also a hook that would change its input or its logits.
            tp_group, hidden_layout, weight, facts: as for `LmHead`; they take precedence over those of the layer.

        Raises:
            ValueError: the layer has no weight, or the weight is a DTensor that is not cut along the vocabulary; or it
                has adapters that are more than a low-rank product, or a forward of its own and no attribute `softcap`.
        """
        if isinstance(layer, nn.Module):
            check_forward(layer)
        return cls(
            **head_facts(layer, {"weight": weight, "tp_group": tp_group, "hidden_layout": hidden_layout, **facts})
        )

    def read(
        self,
        hidden: Tensor,
        *readouts: ReadOut,
        counts: Tensor | None = None,
        at_most: int | None = None,
        fault: ValueError | None = None,
        weights: Tensor | None = None,
    ) -> Any:
        """Return the results of `readouts`, computed from the logits of `hidden`, which are made a chunk at a time.

        Args:
            hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0. fp32, bf16, fp16 or fp64.
            readouts: any read-outs, in one pass over the logits; all that have labels take the same tensor of labels.
            counts: `[...]`, bool, of all ranks' tokens: which tokens count. The others are left out before the first
                product; their results are 0, without a gradient. The host waits once, and shapes are dynamic.
            at_most: the most tokens that may count (with the sequence layout, in a rank's slice). Then the host does
                not wait, and products have this many tokens. If more count, an error is raised, on CUDA by a
                device-side assertion.
            fault: an error that the caller found and other ranks may not see: it is raised on this rank, and the other
                ranks raise that a rank refused its arguments.
            weights: `[...]`, floating, of all ranks' tokens, the same on all ranks, without a gradient: for one
                read-out of one tensor, `read` returns the sum of its results times `weights`. Forward makes the
                gradients of this sum chunk by chunk, and backward scales them, if the read-out is of labels (cross
                entropy, log-probabilities), `cache` is "bounded" and would not keep all exponentials, and something
                requires a gradient. This takes 6 T V D / R FLOPs, of which 4 are in vain if no backward follows, no
                kept exponentials, and an fp32 gradient of the weight until backward. With fixed bits,
                `fused_epilogue`, fp16, or at R > 1 with `counts`, backward makes the gradients, as without `weights`.

        Returns:
            The result of one read-out, or a tuple of the results of several. A result is a tensor of the tokens of all
            ranks, with the leading dims of the labels (or of the hidden states of all ranks), or a tuple of such
            tensors; it is the same on every rank. One backward pass adds the gradients of all results.

        Communicates, at R > 1: forward 1 collective, backward 1; with the sequence layout 2 and 2; the read-outs say
        what they send beside these. If forward makes the gradients, forward has 1 for each chunk of tokens instead.

        Raises:
            ValueError: an argument breaks its rule; the message says which, and the fix.
        """
        head, callers = self.resolved(), fault
        checks.check_floating("hidden", hidden)
        ranks = 1 if head.group is None else head.group.size()
        asked, teachers, fault = checked(readouts, head)
        leading, found = _leading(hidden, asked, ranks, head.in_slices)
        if weights is not None:
            _check_weights(weights, asked, leading)
        fault = _tensors_fault(self, hidden, None if head.guessed else head.vocab, ranks) or found or fault
        if head.bits != "fast":
            fault = bits_fault(head, ranks, hidden, asked) or fault
        if head.fused_epilogue:
            fault = _fused_epilogue_fault(head, self, hidden, asked) or fault
        if head.fuse_main_grad and torch.is_grad_enabled():
            fault = fault or _main_grad_fault(self.weight)
        for teacher in teachers:
            found = teacher_fault(teacher, hidden, head)
            found = found or _tensors_fault(teacher.head, teacher.hidden, head.vocab, ranks, "teacher_")
            fault = found or fault
        fault, tokens = callers or fault, leading.numel()
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

        adapters = adapters_of(self.lora) if self.lora else ()
        for teacher in teachers:
            adapters = (*adapters, *adapters_of(teacher.head.lora))
        options, places, held = options_of(adapters) if adapters else None, None, None
        if left is not None and sizes is None:  # so that ranks find out if they leave out different tokens
            places = left.kept_T, leading.numel() + left.fills
        sides = [_computed(hidden, self.weight)]
        for t in teachers:
            sides.append(_computed(t.hidden.detach(), t.head.weight))
        if sides[0].dtype != hidden.dtype and not self.lora and not torch.is_autocast_enabled(hidden.device.type):
            held = hidden.dtype
        plan = Plan(asked, head, flat, tokens, hidden, options, places, held)
        if plan.fixed:
            for side in sides:
                fault = fault or products_fault(side)
        if fault is not None:
            if sizes is not None and tokens:
                shared = [left is None and t.hidden.dim() < hidden.dim() for t in teachers]
                repeats = [1, *(hidden.shape[-2] if each else 1 for each in shared)]
                _gather_zeros(sides, [self, *(t.head for t in teachers)], repeats, sizes, head.group)
            plan.raise_on_all_ranks(fault, accumulation_dtype(sides[0].dtype), hidden.device)
        if plan.needs_logits:
            plan.choose_columns()
        if left is not None:
            sides = [left.of_mine(of_each(x, len(sides[0]))) for x in sides]
        if head.fuse_main_grad:
            main_grad.promise(self.weight)
        weights_T = None
        # Not if tokens were left out under a bound, or at several ranks.
        if weights is not None and (left is None or (ranks == 1 and not left.fills)):
            weights_T = flat(weights).to(accumulation_dtype(sides[0].dtype))
        found_T = _run(self, sides, teachers, plan, sizes, weights_T)
        if isinstance(found_T, Tensor):
            return found_T
        if left is not None:
            found_T = [left.spread(x, leading.numel()) for x in found_T]
        if weights is not None:
            return (found_T[0] * weights.reshape(-1).to(found_T[0].dtype)).sum()
        if len(leading) != 1:
            found_T = [x.reshape((*leading, *x.shape[1:])) for x in found_T]
        return as_asked(plan, found_T)

    def resolved(self) -> ResolvedHead:
        """Resolve the head for one call: group, shard and bits as they are now.

        Raises:
            ValueError: an option breaks its rule, as every rank sees.
        """
        group = tensor_parallel_group(self.tp_group)
        guessed, in_slices = self.vocab is None, self.hidden_layout == "sequence"
        ranks, vocab = 1 if group is None else group.size(), self.vocab
        if vocab is None:
            rows = max(self.weight.shape[0] if isinstance(self.weight, Tensor) and self.weight.dim() else 1, 1)
            start = rows * group_rank(group) if ranks > 1 else 0
            vocab = VocabShard(start, start + rows, rows * ranks)
        checks.check_marks(self.weight, alone=group is None and self.tp_group is None and guessed)
        if self.lora is not None:
            check_dropout(adapters_of(self.lora), ranks, in_slices)
        return ResolvedHead(
            group,
            vocab,
            self.softcap,
            self.temperature,
            self.chunk_tokens,
            self.cache,
            # Megatron-FSDP lends an uninitialised buffer for one use, and copies autograd's gradient into it by itself.
            self.gradient_accumulation_fusion and not hasattr(self.weight, "get_main_grad"),
            bits=bits_or_mode(self.bits),
            logit_scale=self.logit_scale,
            rounds=self.logit_dtype is not None and self.logit_dtype.itemsize == 2,
            in_slices=in_slices,
            guessed=guessed,
            fused_epilogue=self.fused_epilogue,
            sm_margin=self.sm_margin,
        )


def _run(
    own: Any,
    sides: list[Tensor],
    teachers: Sequence[Teacher],
    plan: Plan,
    sizes: list[int] | None,
    weights_T: Tensor | None,
) -> Any:
    """Apply the autograd function that serves the read-outs, and return all results, one after the other; or the sum
    with `weights_T`, if forward makes its gradient."""
    head = plan.call
    chunks = None if weights_T is None else chunks_in_forward(plan, sides[0])
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
    if chunks is not None and keep:
        return SummedHead.apply(plan, chunks, sizes, weights_T, x_TD, weight, bias, low)
    if plan.fixed:
        return _apply_eagerly(LinearHead, plan, sizes, keep, x_TD, weight, bias, low)
    return LinearHead.apply(plan, sizes, keep, x_TD, weight, bias, low)


def _inputs(given: Any, x_TD: Tensor, head: ResolvedHead) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the hidden states, with more columns if there are adapters; weight; bias; low rank."""
    adapters = adapters_of(given.lora)
    if adapters:
        x_TD = widened(x_TD, adapters, head.group, head.in_slices, head.fixed)
    return x_TD, given.weight, given.bias, low_rank(adapters)


@_disable_dynamo  # properties of this processor's products are found by trials
def _apply_eagerly(function: Any, plan: Plan, *arguments: Any) -> Sequence[Tensor]:
    plan.passes = passes_of(plan.target_T)  # the plan may have been made while compiling
    return function.apply(plan, *arguments)


def _check_weights(weights: Any, readouts: Sequence[ReadOut], leading: torch.Size) -> None:
    """Raise ValueError unless `weights` fit a sum of one read-out; every rank sees the same."""
    if len(readouts) != 1 or readouts[0].count != 1 or not readouts[0].differentiable:
        names = ", ".join(type(r).__name__ for r in readouts)
        raise ValueError(
            f"weights are given and {names} is read: they weigh a sum of one read-out that gives one differentiable "
            f"tensor; read it alone, or sum its result without weights"
        )
    if not isinstance(weights, Tensor) or weights.shape != leading or not weights.is_floating_point():
        said = f"{tuple(weights.shape)} of {weights.dtype}" if isinstance(weights, Tensor) else f"{weights!r}"
        raise ValueError(
            f"weights is {said}: it must be a floating tensor with a number for each token of all ranks, "
            f"{tuple(leading)}; make it of the labels' shape"
        )
    if weights.requires_grad:
        raise ValueError(
            "weights requires a gradient, and a sum has none for its weights; pass weights.detach(), or sum the result "
            "of a call without weights"
        )


def checked(asked: Sequence[ReadOut], head: ResolvedHead) -> tuple[list[ReadOut], list[Any], ValueError | None]:
    """Return checked copies of the caller's read-outs for this call, their teachers, and a fault that maybe this rank
    alone sees."""
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
    """Return the leading dims of all ranks' tokens, and the fault of hidden states that do not fit them."""
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
    """Return the fault of this rank's weight, bias or adapters beside `hidden`; `whose` is a prefix of their names."""
    found = checks.linear_fault(hidden, given.weight, given.bias, vocab, ranks, whose)
    if found is None and given.lora:
        found = rows_fault(adapters_of(given.lora), given.weight)
    if found is not None or given.logit_dtype is None:
        return found
    dtype = computed_dtype(hidden, given.weight)
    return checks.logit_dtype_fault(given.logit_dtype, dtype, f"{whose}hidden")


def _fused_epilogue_fault(
    head: ResolvedHead, own: Any, hidden: Tensor, readouts: Sequence[ReadOut]
) -> ValueError | None:
    """Return the fault of an argument that kernels with a fused epilogue do not support, or of missing kernels."""
    dtype, width = computed_dtype(hidden, own.weight), hidden.shape[-1]
    others = [
        f"{type(r).__name__} with label_smoothing" if r.mean else type(r).__name__
        for r in readouts
        if r.needs_logits or r.mean
    ]
    found = {
        f"logits are computed in {dtype}, not bfloat16": dtype != torch.bfloat16,
        f"hidden has {width} columns, no multiple of 8": width % 8 or not width,
        f"softcap is {head.softcap}": head.softcap is not None,
        f'bits is "{head.bits}"': head.fixed,
        f"logit_dtype is {own.logit_dtype}": head.rounds,
        f"chunk_tokens is {head.chunk_tokens}": head.chunk_tokens is not None,
        "lora is given": bool(own.lora),
        f"{', '.join(others)} read more than sums of exponentials": others,
        f"hidden is on {hidden.device}, without Triton's kernels": not has_triton(hidden),
    }
    for reason, holds in found.items():
        if holds:
            return ValueError(
                f"fused_epilogue is True and {reason}: it is for bf16 hidden states of a multiple of 8 columns on CUDA "
                f"with Triton, for read-outs of the softmax without label smoothing, softcap, lora, logit_dtype and "
                f'chunk_tokens, and bits "fast"; leave fused_epilogue out of this head'
            )
    return None


def _main_grad_fault(weight: Tensor) -> ValueError | None:
    if not weight.requires_grad:
        return None
    try:
        main_grad.buffer_of(weight)
    except ValueError as fault:
        return fault
    return None


def _gather_zeros(
    sides: list[Tensor], heads: Sequence[Any], repeats: list[int], sizes: list[int], group: Group
) -> None:
    """Take part in the all-gather of hidden states with zeros, on a rank that refused its arguments. `repeats`: for
    each side the number of tokens that a row serves."""
    own = sizes[group_rank(group)]
    widths = [
        x.shape[1] + sum(len(each.A) for each in adapters_of(head.lora)) for x, head in zip(sides, heads, strict=True)
    ]
    zeros = [x.new_zeros(own // n, width) for x, n, width in zip(sides, repeats, widths, strict=True)]
    gather_tokens(zeros, group, sizes)


def _computed(hidden: Tensor, weight: Any) -> Tensor:
    """Return hidden states as `[T, D]`, in the dtype to compute in; in their own if the weight, refused, has none."""
    dtype = getattr(weight, "dtype", None)
    alike = dtype is None or (hidden.dtype == dtype and not torch.is_autocast_enabled(hidden.device.type))
    x = hidden if alike else hidden.to(computed_dtype(hidden, weight))
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def as_asked(plan: Plan, found: Sequence[Tensor]) -> Any:
    """Return the results by read-out, a tuple for each that gives several; of a single read-out its result alone."""
    results, at = [], 0
    for r in plan.readouts:
        results.append(found[at] if r.count == 1 else tuple(found[at : at + r.count]))
        at += r.count
    return results[0] if len(results) == 1 else tuple(results)
