"""A Megatron training loop and what is added to it for the fused head. Trained both ways, the losses are the same.

    python examples/patch_gpt.py
    torchrun --nproc-per-node 2 examples/patch_gpt.py   # tensor parallel 2

Added are the lines with `patch` in them. They can come before the model is built or after.
"""

from pathlib import Path

import torch
from job import adam, megatron_job, print_steps, small_config
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from usage import take_no_arguments
from world import ranks

from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

STEPS, BATCH, SEQ, VOCAB = 10, 4, 32, 256  # the vocabulary are all bytes
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def build_model() -> DistributedDataParallel:
    config = small_config()
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ, position_embedding_type="rope")
    gpt.to(torch.cuda.current_device())
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)


def train() -> list[float]:
    """The loss of each step."""
    torch.manual_seed(1)
    model = build_model()
    optimizer = adam(model)
    positions = torch.arange(SEQ, device=torch.cuda.current_device()).expand(BATCH, SEQ)
    losses = []
    for _ in range(STEPS):
        windows = TEXT[torch.randint(len(TEXT) - SEQ, (BATCH, 1)) + torch.arange(SEQ + 1)].cuda()
        model.zero_grad_buffer()
        loss = model(windows[:, :-1], positions, None, labels=windows[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    with megatron_job(tensor=ranks(1, 2, 4)):  # attention heads divide by them
        stock = train()
        patch(chunk_tokens=16)  # or patch(model=gpt), for one model
        patched = train()
        unpatch()  # GPTModel is as it was
        print_steps(stock=stock, patched=patched)


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
