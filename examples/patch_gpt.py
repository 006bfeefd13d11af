"""A Megatron training loop and what is added to it for the fused head. Trained both ways, the losses are the same.

    python examples/patch_gpt.py
    torchrun --nproc-per-node 2 examples/patch_gpt.py           # tensor parallel 2
    torchrun --nproc-per-node 2 examples/patch_gpt.py --fsdp2   # Megatron's torch FSDP2

Added are the lines with `patch` in them. They can come before the model is built or after. Under FSDP2 every rank holds
a part of every weight, that of the output layer too, and reads texts of its own; the fused head runs inside the gathers
that FSDP2 makes, whether weights are resharded after forward or not.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from job import adam, gpt_stage, megatron_job, print_steps, small_config
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from program import ranks

from megatron_ext.megatron.fusion_report import fusion_report
from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

STEPS, BATCH, SEQ, VOCAB = 10, 4, 32, 256  # the vocabulary are all bytes
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def build_model(fsdp2: bool) -> Any:
    config = small_config(transformer_impl="local")
    tied = not fsdp2  # as Megatron-LM demands with FSDP2
    gpt = gpt_stage(config, VOCAB, SEQ, share_embeddings_and_output_weights=tied)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=not fsdp2)
    settings.reshard_after_forward = True  # Megatron-LM sets it so for FSDP2
    return (TorchFullyShardedDataParallel if fsdp2 else DistributedDataParallel)(config, settings, gpt)


def train(fsdp2: bool = False) -> list[float]:
    """The loss of each step, the mean over data-parallel ranks."""
    torch.manual_seed(1)
    model = build_model(fsdp2)
    optimizer = adam(model, distributed=not fsdp2)
    positions = torch.arange(SEQ, device=torch.cuda.current_device()).expand(BATCH, SEQ)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - SEQ, (replicas, BATCH, 1))[replica]
        windows = TEXT[starts + torch.arange(SEQ + 1)].cuda()
        optimizer.zero_grad()
        if not fsdp2:
            model.zero_grad_buffer()
        loss = model(windows[:, :-1], positions, None, labels=windows[:, 1:]).mean()
        loss.backward()
        if not fsdp2:
            finalize_model_grads([model])
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / replicas, group=parallel_state.get_data_parallel_group())
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fsdp2", action="store_true", help="shard weights by torch's FSDP2, and not by tensor parallelism"
    )
    fsdp2 = parser.parse_args().fsdp2
    with megatron_job(tensor=1 if fsdp2 else ranks(1, 2, 4)):  # attention heads divide by them
        stock = train(fsdp2)
        patch(chunk_tokens=16)  # or patch(model=gpt), for one model
        patched = train(fsdp2)
        unpatch()  # GPTModel is as it was
        print_steps(stock=stock, patched=patched)
        if dist.get_rank() == 0:
            print(fusion_report())


if __name__ == "__main__":
    main()
