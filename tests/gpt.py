"""Tiny GPT models on real Megatron-Core, on the CPU, for tests of several folders.

    @grouped(2)
    def test_something():
        losses = train_steps(tiny_gpt(), tiny_batches(steps=30))

By default weights depend on parameter names alone, not on the sharding: the same overrides give the same model at every
size of tensor, pipeline and expert parallelism, and for every spec with the same parameter names.
"""

import functools
import inspect
import multiprocessing
import os
import sys
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu import megatron_on_cpu
from megatron_on_cpu.megatron_modules import TorchNorm
from tests import left_behind
from tests.ranks import ranks

VOCAB = 64
SEQUENCE = 16
# Options of a mixture of experts.
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
_wrapped: weakref.WeakSet = weakref.WeakSet()  # the DistributedDataParallel of the running test


@contextmanager
def model_parallel(
    tp: int = 1, pp: int = 1, vp: int | None = None, cp: int = 1, ep: int = 1, seed: int = 123, **sizes
) -> Iterator[None]:
    """Enter the emulation and make Megatron's groups over the ranks of this world; remaining ranks are data parallel.

    `sizes` go to `initialize_model_parallel`. The fusion report begins anew. At the end groups are destroyed and loss
    scales are reset to 1 for the next test.
    """
    with megatron_on_cpu():
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

        groups = left_behind.groups()
        if (report := sys.modules.get("megatron_ext.megatron.fusion_report")) is not None:
            report.reset_fusion_report()
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vp,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                create_gloo_process_groups=False,
                **sizes,
            )
            seed_ranks(seed)
            dist.barrier()  # all ranks are connected before a quicker one may end a group
            yield
        finally:
            parallel_state.destroy_model_parallel()
            forget_megatron()
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            MTPLossLoggingHelper.tracker.clear()
            moe_utils.get_moe_layer_wise_logging_tracker().clear()
            for scaler in MTPLossAutoScaler, moe_utils.MoEAuxLossAutoScaler:  # schedules set 1 / micro-batches
                scaler.set_loss_scale(torch.ones(1))
            # Autograd keeps a hook of DDP alive for good, and with it model and groups, each with threads that wake
            # 100 times a second. So DDP's attributes are cleared.
            while _wrapped:
                vars(_wrapped.pop()).clear()
            left_behind.end_groups(but=groups)  # Megatron only forgets its groups


def grouped(*world_sizes: int, over: str = "tp", **sizes):
    """Decorate a body by `@ranks(*world_sizes)`, run in `model_parallel(**sizes)` or without sizes `over` all ranks."""

    def decorate(body):
        @functools.wraps(body)
        def test(**kwargs):
            with model_parallel(**(sizes or {over: dist.get_world_size()})):
                body(**kwargs)

        return ranks(*world_sizes)(test)

    return decorate


def forget_megatron() -> None:
    """Reset the state that Megatron's models and seeds set and no function of Megatron resets."""
    if embeddings := sys.modules.get("megatron.core.models.common.embeddings"):
        for kind in embeddings.RotaryEmbedding, embeddings.YarnRotaryEmbedding:
            getattr(kind.forward, "cache_clear", int)()  # the cache keeps models alive
    for name in "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN":
        os.environ.pop(name, None)
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    for name, unset in ("_CUDA_RNG_STATE_TRACKER", None), ("_CUDA_RNG_STATE_TRACKER_INITIALIZED", False):
        if hasattr(random, name):
            setattr(random, name, unset)


def seed_ranks(seed: int = 123) -> None:
    """Seed all generators: those that tensor-parallel ranks share, and each rank's own (for dropout)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def tiny_config(**overrides):
    """Return a `TransformerConfig` that runs on the CPU, with the parallel sizes of the present `model_parallel`."""
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    virtual_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual_stages,
        # As Megatron-LM demands for interleaving: batched messages between one pair of stages could change places.
        "overlap_p2p_comm": virtual_stages is not None,
        "batch_p2p_comm": virtual_stages is None,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "mtp_loss_scaling_factor": 0.1,
        "pipeline_dtype": torch.float32,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    latent = overrides.get("multi_latent_attention")
    return (MLATransformerConfig if latent else TransformerConfig)(**settings | overrides)


def stock_spec(config, vp_stage: int | None = None):
    """Return Megatron's local layers; with other norms under sequence parallelism, which Megatron's refuse."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if not config.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)


@contextmanager
def ours_everywhere() -> Iterator[None]:
    """Substitute our tensor-parallel package for Megatron's inside the context."""
    from megatron_ext import restore_tensor_parallel, substitute_tensor_parallel

    substitute_tensor_parallel()
    try:
        yield
    finally:
        restore_tensor_parallel()


class LoRALinear(torch.nn.Module):
    """A layer of Megatron's with a LoRA adapter, which has the layer's attributes, as in Megatron-Bridge."""

    def __init__(self, to_wrap):
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = torch.nn.Linear(to_wrap.input_size, to_wrap.output_size_per_partition, bias=False)
        torch.nn.init.constant_(self.adapter.weight, 0.01)

    def __getattr__(self, name):
        inside = self.__dict__["_modules"]
        return inside[name] if name in inside else getattr(inside["to_wrap"], name)

    def forward(self, x, *args, **kwargs):
        found, bias = self.to_wrap(x, *args, **kwargs)
        return found + self.adapter(x), bias


def tiny_gpt(
    spec=None,
    *,
    tied: bool = True,
    weights: Literal["names", "init"] = "names",
    vocab_size: int = VOCAB,
    model: dict | None = None,
    engine: bool = False,
    **overrides,
):
    """Return this rank's GPTModel, as a list of its chunks: one, or one for each virtual pipeline stage.

    `spec`: anything that GPTModel takes as its layer spec, or a function of (config, vp_stage) that returns it; None:
    Megatron's local layers. `weights`: drawn for each parameter name (see the top), or as the model initialises itself.
    `model`: further arguments of GPTModel. `engine`: the additional modules of multi-token prediction are Transformer
    Engine's. `overrides` go to `tiny_config`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = tiny_config(**overrides)
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if stages is None else range(stages):
        layers = spec or stock_spec
        if not isinstance(layers, (ModuleSpec, TransformerBlockSubmodules)):
            layers = layers(config, stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        mtp = None
        if config.mtp_num_layers and last:
            from megatron_ext.megatron.layer_specs import with_our_norms

            mtp = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=stage)
            mtp = with_our_norms(mtp) if config.sequence_parallel else mtp
        arguments = {
            "vocab_size": vocab_size,
            "max_sequence_length": SEQUENCE,
            "share_embeddings_and_output_weights": tied,
            "position_embedding_type": "rope",
            "mtp_block_spec": mtp,
            "vp_stage": stage,
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": last,
        }
        chunks.append(GPTModel(config, layers, **arguments | (model or {})))
        if weights == "names":
            set_weights(chunks[-1])
    return chunks


def sharded_state(model) -> dict:
    """Return the state dict that Megatron would store of a model."""
    from megatron.core import parallel_state

    copies = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    last_of_many = getattr(model, "post_process", False) and not model.pre_process
    if last_of_many and getattr(model, "mtp_process", False) and model.share_embeddings_and_output_weights:
        # The output layer has an unused weight, and Megatron's sharded_state_dict demands that it has none.
        unused, model.output_layer.weight = model.output_layer.weight, None
        state = model.sharded_state_dict(metadata=copies)
        model.output_layer.weight = unused
        return state
    return model.sharded_state_dict(metadata=copies)


def stored_tensors(model) -> list:
    """Return the `ShardedTensor`s that Megatron would store of a model's parameters."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = sharded_state(model)
    apply_factories(state)
    return [shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)]


@torch.no_grad()
def set_weights(model) -> None:
    """Fill the parameters with numbers drawn for each global parameter name, sharded as in a checkpoint."""
    for shard in stored_tensors(model):
        # Before experts Transformer Engine's norm has its own name, Megatron's local norm the name in a dense layer.
        name = shard.key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = 0.05 * torch.randn(shard.global_shape, generator=generator)
        if "norm" in shard.key and shard.key.endswith("weight"):
            whole += 1
        layer, offsets = shard.global_offset[: shard.prepend_axis_num], shard.global_offset[shard.prepend_axis_num :]
        own = tuple(slice(start, start + n) for start, n in zip(offsets, shard.local_shape, strict=True))
        shard.data.copy_(whole[layer][own])


def tiny_batches(steps: int = 1, batch: int = 4, seq: int = SEQUENCE, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    """Return random token ids, int64 [steps, batch, seq + 1], the same on all ranks; labels are the next tokens."""
    return torch.randint(vocab_size, (steps, batch, seq + 1), generator=torch.Generator().manual_seed(seed))


def causal_mask(seq: int) -> Tensor:
    """Return a bool mask [1, 1, seq, seq], True where Megatron's local attention must not look."""
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)[None, None]


def own_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this context-parallel rank's part of [B, S, ...] tensors, cut by Megatron itself."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" not in inspect.signature(get_batch_on_this_cp_rank).parameters:  # before 0.18
        return get_batch_on_this_cp_rank(batch)
    group = parallel_state.get_context_parallel_group()  # without it newer versions cut for all ranks of the world
    part = get_batch_on_this_cp_rank(batch | {"cu_seqlens": None}, is_hybrid_cp=False, cp_group=group)
    return {name: part[name] for name in batch}


def forward_step(microbatches: Iterator[Tensor], model):
    """Run `model` on the next [micro_batch, seq + 1] token ids, as Megatron's schedules call it."""
    from megatron.core import parallel_state

    tokens_BS = next(microbatches)
    size, seq = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    batch = {
        "tokens": tokens_BS[:, :-1],
        "labels": tokens_BS[:, 1:],
        "position_ids": torch.arange(seq).expand(size, seq),
    }
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = own_part(batch)
        mask = None
    else:
        mask = causal_mask(seq)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])

    def loss(per_token_BS: Tensor):
        mean = per_token_BS.sum() / (size * seq)  # under context parallelism this rank's part of the mean
        return mean, mean.detach().clone()

    return output, loss


def run_schedule(
    chunks: list, tokens_BS: Tensor, *, micro_batch: int = 2, step=forward_step, forward_only=False
) -> float:
    """Run Megatron's schedule for the current sizes over one global batch; return the mean loss on every rank."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replicas = parallel_state.get_data_parallel_world_size()
    own = tokens_BS.chunk(replicas)[parallel_state.get_data_parallel_rank()]
    microbatches = own.split(micro_batch)
    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=tokens_BS.shape[1] - 1,
        micro_batch_size=micro_batch,
        forward_only=forward_only,
    )
    loss = torch.stack(losses).mean() if losses else torch.zeros(())  # only the last stage has losses
    for group in (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ):
        dist.all_reduce(loss, group=group)
    return loss.item() / replicas


def data_parallel(chunks: list, *, distributed_optimizer: bool = True) -> list:
    """Wrap `chunks` in Megatron's DistributedDataParallel, and set up their config for its schedules."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    config = chunks[0].config
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    _wrapped.update(wrapped)
    return wrapped


def fully_sharded(chunks: list, how: Literal["torch", "megatron"], *, reshard_after_forward: bool = True) -> list:
    """Wrap `chunks` in Megatron's wrapper of torch's FSDP2 or in Megatron-FSDP, and set up their config for schedules.

    torch's FSDP2 needs `transformer_impl="local"` in the config, Megatron-FSDP needs einops.
    """
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
        finalize_model_grads,
    )
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = chunks[0].config
    if how == "torch":
        settings = DistributedDataParallelConfig()
        settings.reshard_after_forward = reshard_after_forward  # not a field: Megatron's training sets it so
        return [TorchFullyShardedDataParallel(config, settings, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads  # before 0.19 it fails on torch's FSDP2
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    return [FullyShardedDataParallel(config, settings, chunk) for chunk in chunks]


def make_optimizer(chunks: list, *, lr: float = 3e-4, use_distributed_optimizer: bool = True, **settings):
    """Make Megatron's Adam for chunks from `data_parallel` or `fully_sharded`; for torch's FSDP2 not distributed."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=lr, use_distributed_optimizer=use_distributed_optimizer, **settings)
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def train_step(chunks: list, optimizer, tokens_BS: Tensor, **schedule) -> tuple[float, float]:
    """Make one step of `chunks` from `data_parallel`; return the loss, and the gradients' norm before clipping."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run_schedule(chunks, tokens_BS, **schedule)
    updated, norm, _ = optimizer.step()
    assert updated
    return loss, float(norm)


def train_steps(chunks: list, batches: Tensor, *, lr: float = 3e-4) -> list[float]:
    """Train on `batches` [steps, batch, seq + 1] by Megatron's own functions; return each step's loss on every rank.

    These are data parallelism with the distributed optimizer (Adam, clipped gradients), the schedule for the current
    pipeline sizes, and `finalize_model_grads`. Generators are seeded before the first step, so that two models draw the
    same dropout.
    """
    seed_ranks()
    chunks = data_parallel(chunks)
    optimizer = make_optimizer(chunks, lr=lr)
    return [train_step(chunks, optimizer, tokens_BS)[0] for tokens_BS in batches]


@contextmanager
def child_processes() -> Iterator[None]:
    """Let `dist_checkpointing.save` start processes, which the pool's workers may not do, since they are daemons.

    One of the processes holds a queue for the others. Megatron would spawn it, importing torch anew; here it is forked.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    config = multiprocessing.current_process()._config
    daemon, config["daemon"] = config.get("daemon", False), False
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    try:
        yield
    finally:
        config["daemon"] = daemon
        filesystem_async._results_queue = None  # else the next save would use the queue of an ended process
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()


def loss_and_grads(
    chunks: list, tokens_BS: Tensor, *, micro_batch: int = 2, step=forward_step
) -> tuple[float, dict[str, Tensor]]:
    """Run one forward and backward; return the loss, and each local parameter's final gradient by "chunk.name"."""
    seed_ranks()
    wrapped = data_parallel(chunks, distributed_optimizer=False)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    loss = run_schedule(wrapped, tokens_BS, micro_batch=micro_batch, step=step)
    return loss, {
        f"{i}.{name}": parameter.main_grad.clone()
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
