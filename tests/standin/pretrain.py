"""Stands in for Megatron-LM's pretrain_gpt.py, which is not on PyPI: it expects of its surroundings what that does."""

import json
import os
import pickle
import sys
from functools import partial

import torch
from arguments import arguments
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.replace import replacement_of

VOCAB, SEQUENCE = 64, 16


class Batch:
    """Something that worker processes would find in `__main__`."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB, (2, SEQUENCE + 1), generator=generator).cuda()
        self.tokens, self.labels = ids[:, :-1], ids[:, 1:]


def model_provider():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
    )
    local = arguments.transformer_impl == "local"
    spec = get_gpt_layer_local_spec() if local else get_gpt_layer_with_transformer_engine_spec()
    if arguments.sequence_parallel:  # as `--spec MODULE NAME` does it
        config.sequence_parallel = True
        spec = import_module(("megatron_ext.megatron.layer_specs", "gpt_layer_spec"))
    return GPTModel(
        config, spec, VOCAB, SEQUENCE, position_embedding_type="rope", share_embeddings_and_output_weights=True
    )


def main():
    assert torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    assert local_rank < torch.cuda.device_count()
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(arguments.tensor_model_parallel_size)
    torch.distributed.barrier()  # as Megatron does: with --check a rank may end while others still connect
    assert torch.cuda.is_initialized()
    assert torch.cuda.get_device_properties(local_rank).major >= 0
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)

    model = model_provider().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)[None, None]
    positions = torch.arange(SEQUENCE, device=torch.cuda.current_device()).expand(2, SEQUENCE)
    step = partial(model, position_ids=positions, attention_mask=mask)
    losses = []
    for index in range(arguments.steps):
        batch = pickle.loads(pickle.dumps(Batch(index)))
        loss = step(batch.tokens, labels=batch.labels).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # as Megatron's finalize_model_grads
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        report = {
            "losses": losses,
            "argv": sys.argv[1:],
            "cpu": arguments.cpu,
            "layers": tensor_parallel.ColumnParallelLinear.__module__,
            "attention": type(model.decoder.layers[0].self_attention.core_attention).__name__,
            "head": str(getattr(replacement_of(GPTModel._postprocess), "settings", None)),
        }
        with open(arguments.report, "w") as file:
            json.dump(report, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
