"""A hand-written training loop whose loss makes no logits any more. Trained both ways, the losses are the same.

    python examples/replace_loss.py
    torchrun --nproc-per-node 2 examples/replace_loss.py   # each rank holds a part of the vocabulary

Shapes: B windows of text, S bytes each, D hidden size, V vocabulary (all bytes), R ranks.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program import take_no_arguments
from torch import Tensor, nn

from megatron_ext import VocabShard, linear_cross_entropy

STEPS, B, S, D, V = 10, 8, 32, 64, 256
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


class Trunk(nn.Module):
    """Bytes `[B, S]` to hidden states `[B, S, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixer = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        return self.mixer(self.embedding(bytes_BS))[0]


def train(fused: bool, device: str = "cpu") -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    trunk = Trunk().to(device)
    weight_VD = torch.randn(V, D).div(D**0.5).to(device)
    group = dist.group.WORLD if dist.is_initialized() else None
    vocab = VocabShard.chunk(V, group)  # as torch.chunk cuts it, for any number of ranks
    if fused:
        weight_VD = weight_VD[vocab.start : vocab.stop].clone()  # [V/R, D]
    head = nn.Parameter(weight_VD)
    optimizer = torch.optim.Adam([*trunk.parameters(), head], lr=3e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - S, (B, 1))
        window_BS1 = TEXT[starts + torch.arange(S + 1)].to(device)
        labels_BS = window_BS1[:, 1:]
        hidden_BSD = trunk(window_BS1[:, :-1])
        if fused:
            loss = linear_cross_entropy(hidden_BSD, head, labels_BS, tp_group=group, vocab=vocab, reduction="mean")
        else:
            loss = F.cross_entropy((hidden_BSD @ head.T).flatten(0, 1), labels_BS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = rank < torch.cuda.device_count()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("nccl" if on_gpu else "gloo")
    device = f"cuda:{rank}" if on_gpu else "cpu"
    for step, (logits, fused) in enumerate(zip(train(False, device), train(True, device), strict=True)):
        if rank == 0:
            print(f"step {step}  from logits {logits:.5f}  fused {fused:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
