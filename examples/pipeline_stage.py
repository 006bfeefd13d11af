"""A pipeline of hand-made stages in Megatron's 1F1B schedule, the last of which ends in the fused head.

    torchrun --nproc-per-node 2 examples/pipeline_stage.py   # two stages
    python examples/pipeline_stage.py                        # the same layers, one after another

Megatron asks little of a stage: a `config`, a `model_type`, and `set_input_tensor` for what the stage before sends.
No logits are made, so the last stage, which has the most to hold, needs no more memory than the others.

Shapes: S positions, B micro-batch, H hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from job import mean_loss, megatron_job, run_schedule
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from program import ranks, take_no_arguments
from torch import Tensor, nn

from megatron_ext import linear_cross_entropy

LAYERS, S, B, H, V, MICROBATCHES = 4, 16, 3, 32, 101, 4


class Stage(nn.Module):
    """A stage's layers, on the first stage the embedding too, on the last the head; layer i has its own seed."""

    def __init__(self) -> None:
        super().__init__()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=H,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            pipeline_dtype=torch.float32,
        )
        self.model_type = ModelType.encoder_or_decoder
        self.received: Tensor | None = None
        self.first, self.last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        per_stage = LAYERS // stages
        here = range(stage * per_stage, (stage + 1) * per_stage)
        self.layers = nn.ModuleDict({str(i): seeded(i, nn.Linear, H, H) for i in here})
        if self.first:
            self.embedding = seeded(100, nn.Embedding, V, H)
        if self.last:
            self.head = seeded(101, nn.Linear, H, V, bias=False)

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, tokens_SB: Tensor, labels_SB: Tensor) -> Tensor:
        """Return per-token losses `[S, B]` on the last stage, hidden states `[S, B, H]` on the others."""
        x_SBH = self.embedding(tokens_SB) if self.first else self.received
        for layer in self.layers.values():
            x_SBH = x_SBH + torch.tanh(layer(x_SBH))
        return linear_cross_entropy(x_SBH, self.head.weight, labels_SB) if self.last else x_SBH


def seeded(seed: int, kind: type[nn.Module], *args, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*args, **kwargs)


def microbatches() -> list[Tensor]:
    """Return token ids `[S + 1, B]`; each id follows from the id before, which the model can learn."""
    first = torch.arange(MICROBATCHES * B).view(MICROBATCHES, 1, B)
    return list((7 * first + 3 * torch.arange(S + 1).view(1, -1, 1)) % V)


def forward_step(data: Iterator[Tensor], stage: Stage):
    """Run a micro-batch's forward pass, for Megatron's schedule; return its output and loss function."""
    tokens_S1B = next(data).cuda()
    return stage(tokens_S1B[:-1], tokens_S1B[1:]), mean_loss


def step(stage: Stage) -> Tensor:
    """Run forward and backward of a global batch; return the mean loss, on every stage."""
    return run_schedule(stage, forward_step, microbatches(), (S, B))


def main() -> None:
    with megatron_job(pipeline=ranks(1, 2, 4)):  # layers divide by the stages
        stage = Stage().to(torch.cuda.current_device())
        optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
        for i in range(10):
            optimizer.zero_grad()
            loss = step(stage)
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {i}  loss {loss.item():.5f}")


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
