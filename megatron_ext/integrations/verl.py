"""Our log-probabilities and entropies in verl's Megatron and FSDP paths.

The functions of verl's fused paths (`linear_cross_entropy`, `FusedLinearForPPO`) read hidden states without logits,
also on CPU and for any hidden size; the others read logits. Results are fp32 (fp64 for fp64 inputs). The functions of
the Megatron path are replaced only if Megatron-Core is installed. See docs/rl.md.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_ext import head
from megatron_ext.distributed.groups import UNSHARDED, Group, check_group, group_size
from megatron_ext.head.checks import one_of
from megatron_ext.integrations.substitution import FrameworkSubstitution, ReplacedName


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels, and entropies, of T tokens in the order of `hidden`.

    Args:
        hidden: `[..., D]`, the same on all ranks of the group, T tokens in all. Their gradient is the whole gradient on
            each rank (verl's own function leaves each rank with its part). If `hidden` comes from Megatron's
            `gather_from_sequence_parallel_region`, directly or through views and casts, and the backward of that gather
            sums over ranks, the gradient is divided by the number of ranks.
        weight: `[V/R, D]`, this rank's rows.
        labels: T token ids, in any shape.
        temperature: logits are divided by it; None: 1.
        reduction: "none" or None; "sum" or "mean" of the log-probabilities over the tokens.
        dist_process_group: the ranks that share the vocabulary; None: `weight` is whole.

    Returns:
        Log-probabilities `[T]`, or their sum or mean, and entropies `[T]`.

    Communicates: 1 collective forward, 1 backward.

    Raises:
        ValueError: an argument that `megatron_ext.linear_log_probs` refuses; another reduction.
    """
    reduction = "none" if reduction is None else reduction.lower()
    one_of("reduction", reduction, ("none", "sum", "mean"))
    ranks = group_size(check_group(dist_process_group, "dist_process_group"))
    if ranks > 1 and _adds_up_gradients(hidden):
        hidden = _Share.apply(hidden, ranks)
    log_probs, entropy = head.linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        tp_group=UNSHARDED if dist_process_group is None else dist_process_group,
        temperature=1.0 if temperature is None else temperature,
        return_entropy=True,
    )
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, entropy


class _Share(torch.autograd.Function):
    """Identity whose backward divides the gradient by `ranks`, as an earlier gather's backward sums it over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0] / ctx.ranks, None


def _adds_up_gradients(hidden: Tensor) -> bool:
    """Tell whether `hidden` comes from a gather, through functions of one tensor, whose backward sums over ranks."""
    node: Any = hidden.grad_fn
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        before = [one for one, _ in node.next_functions if one is not None]
        node = before[0] if len(before) == 1 else None
    is_gather = "GatherFromSequenceParallelRegion" in type(node).__name__
    return is_gather and getattr(node, "tensor_parallel_output_grad", True)


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies from hidden states and a whole weight; `chunk_size` tokens at a time.

    `impl_backend`, "torch" or "liger" (verl 0.9), names kernels of verl's own: the head runs in place of either.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        one_of("impl_backend", impl_backend, ("torch", "liger"))
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return both in the shape of `input_ids`, `[T]` or `[B, S]`, from hidden states `[T, D]` or `[B, S, D]`."""
        log_probs, entropy = head.linear_log_probs(
            hidden_states,
            vocab_weights,
            input_ids,
            tp_group=UNSHARDED,
            temperature=temperature,
            chunk_tokens=self.chunk_size,
            return_entropy=True,
        )
        return log_probs, entropy


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of labels `[...]` from logits `[..., V/R]` over Megatron's tensor-parallel group.

    The logits are kept, whereas verl's own function overwrites them. Communicates 1 collective, backward none.
    """
    return cast(Tensor, head.token_log_probs(logits, labels))


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """Entropies `[...]` from logits `[..., V/R]` over Megatron's tensor-parallel group.

    The logits are kept, whereas verl's own function overwrites them. Communicates 1 collective, backward none.
    """
    return head.token_entropy(vocab_parallel_logits)


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Entropies `[B, S]` from logits `[B, S, V/R]`, as by `vocab_parallel_entropy`, `chunk_size` positions at a time.

    Communicates 1 collective, whatever the number of chunks. Raises ValueError for a `chunk_size` below 1.
    """
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}: it must be a positive number of positions; pass 2048, say")
    return head.token_entropy(vocab_parallel_logits, chunk_tokens=chunk_size * vocab_parallel_logits.shape[0])


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probabilities of labels `[...]` from whole logits `[..., V]`.

    `inplace_backward` has no effect: the gradient never takes the memory of the logits, which callers read again for
    the entropy.
    """
    return cast(Tensor, head.token_log_probs(logits, labels, tp_group=UNSHARDED))


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropies `[...]` from whole logits `[..., V]`; backward keeps the logits, and no other tensor of that size."""
    return head.token_entropy(logits, tp_group=UNSHARDED)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Entropies `[T]` from whole logits `[T, V]`, as by `entropy_from_logits`, `chunk_size` rows at a time."""
    return head.token_entropy(logits, tp_group=UNSHARDED, chunk_tokens=chunk_size)


def _replaced(module: str, ours: Any, **options: Any) -> ReplacedName:
    return ReplacedName(f"verl.utils.{module}", ours.__name__, ours, **options)


def _replaced_names() -> list[ReplacedName]:
    megatron, functional = "megatron.tensor_parallel", "torch_functional"
    return [
        _replaced("kernel.linear_cross_entropy", linear_cross_entropy),
        _replaced("experimental.torch_functional", FusedLinearForPPO),
        _replaced(functional, logprobs_from_logits),
        _replaced(functional, entropy_from_logits, required=False),
        _replaced(functional, entropy_from_logits_with_chunking, required=False),
        _replaced(megatron, vocab_parallel_log_probs_from_logits, needs="megatron.core"),
        _replaced(megatron, vocab_parallel_entropy, needs="megatron.core"),
        # since verl 0.9
        _replaced(megatron, vocab_parallel_entropy_with_chunking, required=False, needs="megatron.core"),
    ]


_substitution = FrameworkSubstitution("verl", _replaced_names)
apply, report, restore = _substitution.apply, _substitution.report, _substitution.restore
