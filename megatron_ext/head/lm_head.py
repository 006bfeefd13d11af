"""`LmHead`: the properties of an lm head, as given, and any set of read-outs of hidden states through it.

`Logits` is the same for logits that exist. Shapes: `[...]` are the leading dims of the tokens, D the hidden size, V the
vocabulary, R the ranks of `group`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_rank, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import checks
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.checks import Bits, Cache, HiddenLayout, bits_or_mode
from megatron_ext.head.layer_facts import HeadFacts, head_facts
from megatron_ext.head.lora import LoRA, adapters_of, check_adapters, check_dropout
from megatron_ext.head.read import read_hidden, read_logits
from megatron_ext.head.readouts.read_out import ReadOut

_NUMBERS = {"softcap": None, "temperature": 1.0, "logit_scale": 1.0, "cache": "bounded"}
_NUMBERS_OF_LOGITS = {"softcap": None, "temperature": 1.0}


@dataclass(frozen=True, eq=False)
class LmHead:
    """An lm head: logits are `softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature`.

    A value: it holds what was given, and nothing in it changes. What is wrong with an option is raised when it is made;
    what depends on groups and ranks by `read`. What only one rank may see (its shard of the weight) is told to the
    other ranks by `read`, and raised on all of them.

    Attributes:
        weight: `[V/R, D]`, this rank's vocabulary shard, of the hidden states' dtype (any under autocast). In fp32 over
            hidden states of 16 bits: logits and gradients are computed in fp32, and dx is rounded once. A quantised one
            that has `dequantize()` (torchao, quanto), frozen: it is dequantised in each pass, and not held between.
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
            initialised when it is read, else no sharding.
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
        fused_epilogue: experimental, not measured yet: logits are not written, the products themselves take their
            exponentials (kernels in Triton for Hopper): without gradient no memory for logits, and in backward none for
            those that are recomputed. For read-outs of the softmax with bf16 on CUDA; other options and read-outs that
            these kernels do not have are refused. docs/head.md#exponentials-in-the-product
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
    fused_epilogue: bool = field(default=False, kw_only=True)
    lora: LoRA | Sequence[LoRA] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        checks.check_options(self, _NUMBERS)
        if self.hidden_layout != "replicated":
            checks.one_of("hidden_layout", self.hidden_layout, get_args(HiddenLayout))
        if self.chunk_tokens is not None:
            checks.check_chunk_tokens(self.chunk_tokens)
        if self.bits is not None:  # else as the mode is when it is read
            checks.one_of("bits", self.bits, get_args(Bits))
        if self.logit_dtype is not None:
            checks.check_logit_dtype(self.logit_dtype)
        if self.vocab is not None:
            checks.check_vocab(self.vocab)
        if self.lora is not None:
            check_adapters(adapters_of(self.lora), self.weight)

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
        """The head of a layer that makes logits, or of its weight.

        Args:
            layer: a tensor or a `DTensor` `[V, D]` (sharded over a 1-D mesh: its group and shards are taken from it);
                an `nn.Linear`; what PEFT puts in its place, with the LoRA adapters that are active, or the copy that
                trains (`modules_to_save`); or Megatron-Core's output layer, of which bias, softcap, tensor-parallel
                group, sequence parallelism, gradient accumulation fusion and a `logit_dtype` of 16 bits are taken.
            tp_group, hidden_layout, weight, facts: as for `LmHead`; they go before what the layer says.

        Raises:
            ValueError: the layer has no weight, or the weight is a DTensor that is not cut along the vocabulary; or it
                has adapters that are more than a low-rank product.
        """
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
    ) -> Any:
        """Return what `readouts` read out of the logits of `hidden`, which are made a chunk at a time.

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
        return read_hidden(self.resolved(), self, hidden, readouts, counts, at_most, fault)

    def resolved(self) -> ResolvedHead:
        """Resolve the head for one call: group, shard and bits as they are now.

        Raises:
            ValueError: every rank sees that one of them breaks its rule.
        """
        group = tensor_parallel_group(self.tp_group)
        guessed, in_slices = self.vocab is None, self.hidden_layout == "sequence"
        checks.check_marks(self.weight, alone=group is None and self.tp_group is None and guessed)
        ranks, vocab = 1 if group is None else group.size(), self.vocab
        if self.lora is not None:
            check_dropout(adapters_of(self.lora), ranks, in_slices)
        if vocab is None:
            rows = max(self.weight.shape[0] if isinstance(self.weight, Tensor) and self.weight.dim() else 1, 1)
            start = rows * group_rank(group) if ranks > 1 else 0
            vocab = VocabShard(start, start + rows, rows * ranks)
        return ResolvedHead(
            group,
            vocab,
            self.softcap,
            self.temperature,
            self.chunk_tokens,
            self.cache,
            self.gradient_accumulation_fusion,
            bits=bits_or_mode(self.bits),
            logit_scale=self.logit_scale,
            rounds=self.logit_dtype is not None and self.logit_dtype.itemsize == 2,
            in_slices=in_slices,
            guessed=guessed,
            fused_epilogue=self.fused_epilogue,
        )


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
        checks.check_floating(self.name, self.logits)
        checks.check_options(self, _NUMBERS_OF_LOGITS)
        if self.chunk_tokens is not None:
            checks.check_chunk_tokens(self.chunk_tokens)
        if self.vocab is not None:
            checks.check_vocab(self.vocab)

    def read(self, *readouts: ReadOut, fault: ValueError | None = None) -> Any:
        """Return what `readouts` read out; see `LmHead.read`. Nothing of vocabulary size is saved beside the logits,
        whose dtype their gradient has.

        Communicates: forward 1 collective at R > 1, backward none; what a read-out needs besides is said there.
        """
        return read_logits(self.resolved(), self, readouts, fault)

    def resolved(self) -> ResolvedHead:
        """Resolve the logits for one call: group and shard as they are now."""
        group, vocab = tensor_parallel_group(self.tp_group), self.vocab
        if vocab is None:
            columns = max(self.logits.shape[-1], 1)
            ranks, rank = (1, 0) if group is None else (group.size(), group_rank(group))
            vocab = VocabShard(rank * columns, (rank + 1) * columns, columns * ranks)
        return ResolvedHead(group, vocab, self.softcap, self.temperature, self.chunk_tokens, guessed=self.vocab is None)
