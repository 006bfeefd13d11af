"""A Megatron script that pretrains a hybrid model, attention and MLP layers in turn; of megatron_ext it knows nothing.

    torchrun --nproc-per-node 2 -m megatron_ext.run --cpu --linear-ce examples/pretrain_hybrid.py

On GPUs without `--cpu`. It is tensor parallel over all ranks. Sources of Megatron from 0.18 on have a script of their
own, pretrain_hybrid.py, which the launcher runs as well; README says how. The layers are Megatron's local ones, since
the layer spec that Megatron has for hybrid models needs Transformer Engine.
"""

import inspect
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from program import take_no_arguments

try:  # since 0.18
    from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as StackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
except ModuleNotFoundError:
    from megatron.core.models.mamba import MambaModel as Model
    from megatron.core.ssm.mamba_block import MambaStack as Stack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as StackSubmodules

STEPS, BATCH, SEQ, VOCAB, PATTERN = 10, 4, 32, 256, "*-*-"  # the vocabulary are all bytes
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def layers() -> ModuleSpec:
    parts = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm,
        mlp=parts.mlp,
        mlp_bda=parts.mlp_bda,
    )
    return ModuleSpec(
        module=Stack,
        submodules=StackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def build_model() -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,  # these three need Apex or CUDA kernels
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    parameters = inspect.signature(Model).parameters
    spec = "hybrid_stack_spec" if "hybrid_stack_spec" in parameters else "mamba_stack_spec"
    if "hybrid_layer_pattern" in parameters:
        pattern = {"hybrid_layer_pattern": PATTERN}
    else:
        pattern = {"hybrid_override_pattern": PATTERN, "hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.5}
    model = Model(
        config=config,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        **{spec: layers()},
        **pattern,
    )
    model.to(torch.cuda.current_device())
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)


def main() -> None:
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        sys.exit(
            "run it by torchrun, which says who is who, and without a GPU by the launcher:"
            + __doc__.split("\n\n")[1].rstrip().removeprefix("   ")
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = build_model()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model], use_gloo_process_groups=False
    )
    positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)[None, None]
    for step in range(STEPS):
        windows = TEXT[torch.randint(len(TEXT) - SEQ, (BATCH, 1)) + torch.arange(SEQ + 1)].cuda()
        model.zero_grad_buffer()
        loss = model(windows[:, :-1], positions, mask, labels=windows[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
