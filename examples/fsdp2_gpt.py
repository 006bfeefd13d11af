"""A GPT in Megatron's torch FSDP2, trained with stock's loss and with the fused head: the losses are the same.

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py

Every rank holds a part of every weight, that of the output layer too; the fused head runs inside the gathers that
FSDP2 makes, whether weights are resharded after forward or not. Added for it are the lines with `patch` in them.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from job import adam, megatron_job, print_steps, small_config
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from usage import take_no_arguments

from megatron_ext.megatron.fusion_report import fusion_report
from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

STEPS, BATCH, SEQ, VOCAB = 10, 4, 32, 256  # the vocabulary are all bytes
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def build_model() -> TorchFullyShardedDataParallel:
    config = small_config(transformer_impl="local")
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,  # as Megatron-LM demands with FSDP2
    )
    settings = DistributedDataParallelConfig()
    settings.reshard_after_forward = True  # Megatron-LM sets it so
    return TorchFullyShardedDataParallel(config, settings, gpt.to(torch.cuda.current_device()))


def train() -> list[float]:
    """The loss of each step, the mean over ranks, which read texts of their own."""
    torch.manual_seed(1)
    model = build_model()
    optimizer = adam(model, distributed=False)
    positions = torch.arange(SEQ, device=torch.cuda.current_device()).expand(BATCH, SEQ)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - SEQ, (dist.get_world_size(), BATCH, 1))[dist.get_rank()]
        windows = TEXT[starts + torch.arange(SEQ + 1)].cuda()
        optimizer.zero_grad()
        loss = model(windows[:, :-1], positions, None, labels=windows[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses


def main() -> None:
    with megatron_job():
        stock = train()
        patch(chunk_tokens=16)
        patched = train()
        unpatch()
        print_steps(stock=stock, patched=patched)
        if dist.get_rank() == 0:
            print(fusion_report())


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
