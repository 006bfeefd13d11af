"""Random heads, drawn alike on every rank, their fp64 truth, and what plain PyTorch makes of them in its own dtype."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext import VocabShard, linear_cross_entropy, linear_log_probs, reference
from megatron_ext.distributed.groups import group_rank, group_size

# Every option alone, and all of them at once. "size" makes the last columns padding, "bias" draws one.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": True},
    "padded": {"size": 37},
    "empty shard": {"size": 9},
    "other ignore_index": {"ignore_index": 3},
}
OPTIONS["all"] = {name: value for each in OPTIONS.values() for name, value in each.items()} | {"size": 37}


@dataclass
class Problem:
    """The whole problem: hidden `[S, B, D]`, weight `[V, D]`, bias `[V]` or None, labels and gradients `[S, B]`."""

    shape: tuple[int, ...] = (4, 5)
    width: int = 8
    columns: int = 41
    dtype: torch.dtype = torch.float64
    seed: int = 0
    logit_size: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    cuts: list[int] | None = None  # where one rank's columns end and the next one's begin; None: nearly equal

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)

        options = dict(self.options)
        self.size = options.pop("size", self.columns)
        self.hidden = randn(*self.shape, self.width)
        self.weight = randn(self.columns, self.width) * (self.logit_size / self.width**0.5)
        self.bias = randn(self.columns) if options.pop("bias", False) else None
        self.arguments = options
        self.ignore_index = options.get("ignore_index", -100)
        self.labels = torch.randint(0, self.size, self.shape, generator=g)
        self.labels.view(-1)[1::7] = self.ignore_index
        self.grad, self.grad_entropy = (torch.randn(self.shape, generator=g) for _ in range(2))

    def shard(self, group) -> VocabShard:
        """Uneven shards of all columns, of which the first `size` count."""
        if self.cuts is None:
            split = VocabShard.split(self.columns, group)
            return VocabShard(split.start, split.stop, self.size)
        ends, rank = [0, *self.cuts[: group_size(group) - 1], self.columns], group_rank(group)
        return VocabShard(ends[rank], ends[rank + 1], self.size)

    def mine(self, group, layout: str = "replicated", grads: tuple[bool, bool] = (True, True)) -> tuple[Any, ...]:
        """This rank's own hidden, weight and bias, as leaves."""
        shard = self.shard(group)
        hidden = self.hidden
        if layout == "sequence":
            hidden = hidden.chunk(group_size(group))[group_rank(group)]
        weight = self.weight[shard.start : shard.stop].clone().requires_grad_(grads[1])
        bias = None if self.bias is None else self.bias[shard.start : shard.stop].clone().requires_grad_(grads[1])
        return hidden.clone().requires_grad_(grads[0]), weight, bias

    def pieces(self, grads: list[Tensor], group, layout: str) -> list[Tensor]:
        """This rank's pieces of the whole gradients."""
        shard = self.shard(group)
        dx, *rest = grads
        if layout == "sequence":
            dx = dx.chunk(group_size(group))[group_rank(group)]
        return [dx, *(x[shard.start : shard.stop] for x in rest)]

    def bent(self, z: Tensor) -> Tensor:
        """Raw logits without bias as they count."""
        z = z if self.bias is None else z + self.bias.to(z.dtype)
        softcap, temperature = self.arguments.get("softcap"), self.arguments.get("temperature", 1.0)
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature

    def from_logits(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, log-probs, entropy and hits of raw logits without bias, in their dtype."""
        kept, z = self.labels != self.ignore_index, self.bent(z)
        loss = reference.cross_entropy(
            z,
            self.labels,
            self.size,
            self.ignore_index,
            self.arguments.get("label_smoothing", 0.0),
            self.arguments.get("z_loss", 0.0),
        )
        log_probs = reference.log_probs(z, self.labels, self.size, self.ignore_index)
        entropy = reference.entropy(z, self.size).where(kept, 0.0)
        hits = (reference.counted(z, self.size).argmax(-1) == self.labels) & kept
        return loss, log_probs, entropy, hits

    def truth(self, what: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Results and gradients (of hidden, weight, bias) in fp64, unsharded. `what`: "loss" or "log_probs"."""
        leaves = [x.double().requires_grad_() for x in (self.hidden, self.weight, self.bias) if x is not None]
        z = reference.logits(*leaves[:2])
        held, self.bias = self.bias, leaves[2] if len(leaves) > 2 else None
        results, grads = self._results(what, z, leaves)
        self.bias = held
        return results, grads

    def _results(self, what: str, z: Tensor, leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        loss, log_probs, entropy, hits = self.from_logits(z)
        if what == "loss":
            return (loss.detach(),), list(torch.autograd.grad(loss, leaves, self.grad.to(loss.dtype)))
        upstream = [self.grad.to(loss.dtype), self.grad_entropy.to(loss.dtype)]
        grads = torch.autograd.grad([log_probs, entropy], leaves, upstream)
        return (log_probs.detach(), entropy.detach(), hits), list(grads)

    def plain(self, what: str, ranks: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Compute `truth` by unfused PyTorch in the problem's dtype (softmax in fp32 at least), over `ranks` shards.

        The ranks' parts of dx are added in the problem's dtype, as an all-reduce does.
        """
        x, w = self.hidden.flatten(0, -2), self.weight
        z = (x @ w.t()).view(*self.shape, w.shape[0]).requires_grad_()
        results, (dz,) = self._results(what, z.float() if z.dtype != torch.float64 else z, [z])
        dz = dz.flatten(0, -2)
        dx = torch.zeros_like(x)
        for rank in range(ranks):
            start, stop = (self.columns * r // ranks for r in (rank, rank + 1))
            dx = dx + dz[:, start:stop] @ w[start:stop]
        grads = [dx.view_as(self.hidden), dz.t() @ x]
        return results, grads if self.bias is None else [*grads, dz.sum(0)]

    def ours(
        self, what: str, group, layout: str = "replicated", **more: Any
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The head's results and this rank's gradients."""
        leaves = self.mine(group, layout)
        chosen = {"bias": leaves[2], "vocab": self.shard(group), **self.arguments, **more}
        wanted = [x for x in leaves if x is not None]
        if what == "loss":
            loss = linear_cross_entropy(*leaves[:2], self.labels, group, layout, **chosen)
            return (loss.detach(),), list(torch.autograd.grad(loss, wanted, self.grad))
        chosen = {k: v for k, v in chosen.items() if k not in ("label_smoothing", "z_loss")}
        results = linear_log_probs(
            *leaves[:2], self.labels, group, layout, return_entropy=True, return_hits=True, **chosen
        )
        grads = torch.autograd.grad(results[:2], wanted, [self.grad, self.grad_entropy])
        return tuple(x.detach() for x in results), list(grads)

    def beside_plain(
        self, what: str, group, layout: str = "replicated", **more: Any
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Triples of ours, the truth and `plain`'s, for each result but the hits and for each gradient."""
        every = self.ours(what, group, layout, **more), self.truth(what), self.plain(what, group_size(group))
        grads = every[0][1], *(self.pieces(whole, group, layout) for _, whole in every[1:])
        return list(zip(*([*of[0][:2], *own] for of, own in zip(every, grads, strict=True)), strict=True))


def error(got: Tensor, truth: Tensor) -> float:
    """Relative to the truth's norm."""
    got, truth = got.detach().double(), truth.detach().double()
    size = truth.norm()
    return float((got - truth).norm() / size) if size else float(got.norm())


def loss_and_grads(problem, cache=1, **more):
    hidden, weight, bias = problem.mine(None)
    loss = linear_cross_entropy(hidden, weight, problem.labels, bias=bias, cache=cache, **more)
    return loss, torch.autograd.grad(loss, [x for x in (hidden, weight, bias) if x is not None], problem.grad)
