"""One lm-head problem, drawn alike on every rank: the whole truth, and this rank's pieces of it."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import VocabShard, linear_cross_entropy, reference


@dataclass
class Problem:
    """T tokens in `[S, B]`, odd sizes, every fourth label ignored. `padded`: the last columns do not exist."""

    dtype: torch.dtype = torch.float64
    S: int = 8
    B: int = 3
    D: int = 10
    V: int = 20
    size: int = 20
    scale: float = 1.0
    with_bias: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        self.hidden_SBD = self.scale * draw(self.S, self.B, self.D)
        self.weight_VD = draw(self.V, self.D)
        self.bias_V = draw(self.V) if self.with_bias else None
        self.labels_SB = torch.randint(self.size, (self.S, self.B), generator=g)
        self.labels_SB.view(-1)[::4] = -100
        self.grad_SB = draw(self.S, self.B)

    def truth(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """fp64 loss and gradients of hidden states, weight and bias."""
        leaves = [x.double().clone().requires_grad_() if x is not None else None for x in self.inputs()]
        hidden, weight, bias = leaves
        o = self.options
        z = reference.logits(hidden, weight, bias, o.get("softcap"), o.get("temperature", 1.0))
        loss = reference.cross_entropy(
            z, self.labels_SB, self.size, -100, o.get("label_smoothing", 0.0), o.get("z_loss", 0.0)
        )
        loss.backward(self.grad_SB.double())
        return loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden_SBD, self.weight_VD, self.bias_V

    def shard(self) -> VocabShard:
        columns = self.V // dist.get_world_size()
        return VocabShard.equal(columns, dist.group.WORLD, self.size)

    def ours(self, layout: str = "replicated", **how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """This rank's loss and gradients: of its hidden states, its weight shard, its bias shard."""
        hidden, weight, bias = self.pieces(layout)
        loss = linear_cross_entropy(
            hidden,
            weight,
            self.labels_SB,
            tp_group=dist.group.WORLD,
            hidden_layout=layout,
            bias=bias,
            vocab=self.shard(),
            **{**self.options, **how},
        )
        loss.backward(self.grad_SB.to(loss.dtype))
        return loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad

    def pieces(self, layout: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Leaves: hidden states in their layout, and the shards."""
        shard, own = self.shard(), self.own_tokens(layout)
        hidden = self.hidden_SBD[own].clone().requires_grad_()
        weight = self.weight_VD[shard.start : shard.stop].clone().requires_grad_()
        bias = None if self.bias_V is None else self.bias_V[shard.start : shard.stop].clone().requires_grad_()
        return hidden, weight, bias

    def own_tokens(self, layout: str) -> slice:
        if layout == "replicated":
            return slice(None)
        part = self.S // dist.get_world_size()
        return slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)

    def check(self, found: tuple, layout: str = "replicated", rtol: float = 1e-9, atol: float = 1e-9) -> None:
        """Loss and every gradient of this rank against the truth."""
        shard, own = self.shard(), self.own_tokens(layout)
        loss, dx, dw, db = self.truth()
        rows = slice(shard.start, shard.stop)
        wanted = (loss, dx[own], dw[rows], None if db is None else db[rows])
        for name, ours, theirs in zip(("loss", "dx", "dw", "db"), found, wanted, strict=True):
            if theirs is not None:
                torch.testing.assert_close(
                    ours.double(), theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
                )
