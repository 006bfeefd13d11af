"""`Logits`: logits that exist, and `read`, which computes any set of read-outs of them, like that of `LmHead`."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard, tensor_parallel_group
from megatron_ext.head import checks
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.engine.chunk_logits import LogitTransform
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.stored_logits import Flat, StoredLogitsHead
from megatron_ext.head.lm_head import as_asked, checked
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.readouts.teacher import teacher_logits_fault
from megatron_ext.head.row_passes.passes import has_triton
from megatron_ext.numerics.tensors import OutsideVocabulary, accumulation_dtype

_NUMBERS = {"softcap": None, "temperature": 1.0}


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits that exist, taken as `softcap * tanh(logits / softcap) / temperature`, for the read-outs of `LmHead`.

    Attributes:
        logits: `[..., V/R]`, this rank's columns, any floating dtype, in any memory order of the leading dims. Columns
            of -inf do not count for their token.
        tp_group, vocab, softcap, temperature, chunk_tokens: as for `LmHead`.
        gradient_into_logits: backward writes the gradient into the memory of `logits` instead of new memory. Backward
            then runs once, and autograd raises an error for code that needs the logits afterwards. It has no effect
            with read-outs that need logits in backward, for logits that are a leaf, or on CUDA with Triton for logits
            whose columns are not adjacent in memory.
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
        checks.check_options(self, _NUMBERS)
        if self.chunk_tokens is not None:
            checks.check_chunk_tokens(self.chunk_tokens)
        if self.vocab is not None:
            checks.check_vocab(self.vocab)

    def read(self, *readouts: ReadOut, fault: ValueError | None = None) -> Any:
        """Return the results of `readouts`; see `LmHead.read`. Nothing of vocabulary size is saved beside the logits,
        whose gradient has their dtype.

        Communicates: forward 1 collective at R > 1, backward none; the read-outs say what they send beside this one.
        """
        head, logits, callers = self.resolved(), self.logits, fault
        ranks = head.ranks
        asked, teachers, fault = checked(readouts, head)
        if isinstance(fault, OutsideVocabulary):
            fix = "pass them with the weight to linear_log_probs or linear_cross_entropy"
            fault = ValueError(f"{fault}; if {self.name} {tuple(logits.shape)} are hidden states, {fix}")
        for r in asked:
            each = r.per_token()
            if each is not None:
                checks.check_tokens_of(each[0], each[1], self.name, logits)
        fault = checks.shard_fault(head.vocab, logits.shape[-1], self.name, ranks) or fault
        for teacher in teachers:
            fault = teacher_logits_fault(teacher, self, head.vocab, ranks) or fault
        fault = callers or fault
        in_step = any(r.in_step for r in asked) and ranks > 1
        flat = Flat(logits, as_given=in_step)  # the ranks exchange rows of the same tokens, chunk by chunk
        tokens = flat.shape.numel()
        plan = Plan(asked, head, flat, tokens, logits, places=(flat.places(logits.device, ranks), tokens))
        if fault is not None:
            plan.raise_on_all_ranks(fault, accumulation_dtype(logits.dtype), logits.device)
        z = flat.rows(logits)
        base = logits if logits._base is None else logits._base
        of_a_leaf = base.is_leaf and base.requires_grad  # a leaf's values are used after backward
        in_place = all(stride or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True))
        in_place = in_place and (z.stride(-1) == 1 or not has_triton(z))  # kernels write adjacent columns
        own_memory = in_place and not of_a_leaf
        both = self, *teachers
        transforms = [LogitTransform(softcap=each.softcap if plan.needs_logits else None) for each in both]
        into_logits = self.gradient_into_logits and own_memory and not plan.needs_logits
        others = [flat.rows(teacher.logits.detach()) for teacher in teachers]
        found = StoredLogitsHead.apply(plan, transforms, into_logits, z, *others)
        return as_asked(plan, [flat.up(x) for x in found])

    def resolved(self) -> ResolvedHead:
        """Resolve the logits for one call: group and shard as they are now."""
        group, vocab = tensor_parallel_group(self.tp_group), self.vocab
        if vocab is None:
            vocab = VocabShard.equal(max(self.logits.shape[-1], 1), group)
        return ResolvedHead(group, vocab, self.softcap, self.temperature, self.chunk_tokens, guessed=self.vocab is None)
