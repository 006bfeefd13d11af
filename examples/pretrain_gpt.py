"""Pretrain a GPT with Megatron-Core: its model, parallelism, optimizer, schedules and checkpoints; our layers and head.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 --head fused --layers ext

Runs on GPUs over NCCL, or on the CPU over gloo (Megatron-Core under `megatron_on_cpu`). Flags have Megatron-LM's
names and meanings. Two are new: `--head` takes the loss from logits (stock) or from hidden states (fused), `--layers`
builds the transformer layers from Megatron's modules (stock) or from ours (ext).
"""

import json
import os
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import gpt_stage, mean_loss, megatron_job, run_schedule
from program import end_on_interrupt, has_gpus, ranks
from torch import Tensor
from tqdm import tqdm

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    import checkpoint
    import head_meter
    import text
    from arguments import check_arguments, parse_arguments
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig

    from megatron_ext import substitute_tensor_parallel
    from megatron_ext.megatron.fusion_report import fusion_report
    from megatron_ext.megatron.layer_specs import gpt_block_spec, with_our_norms
    from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion


def build_model(args: Namespace) -> DistributedDataParallel:
    """Make this rank's part of the GPT, wrapped by Megatron's DDP."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=not args.disable_bias_linear,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=args.use_cpu_initialization,
        # These options need Apex or CUDA kernels of Megatron's.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    if args.layers == "ext":
        layers = gpt_block_spec(config)
    else:
        layers = get_gpt_layer_local_spec(normalization=config.normalization)
        if config.sequence_parallel:  # Megatron's norms refuse it unless there is Apex
            layers = with_our_norms(layers)
    tied = not args.untie_embeddings_and_output_weights
    embeddings = {"share_embeddings_and_output_weights": tied, "rotary_base": args.rotary_base}
    gpt = gpt_stage(config, args.vocab_size, args.seq_length, layers, **embeddings)
    if args.head == "fused":
        patch_gpt_model_forward_for_linear_ce_fusion(model=gpt, cache=1)  # the fastest
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)


def build_optimizer(args: Namespace, model: DistributedDataParallel):
    """Make Megatron's distributed Adam and its learning rate schedule, which counts samples."""
    config = OptimizerConfig(
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # the command line decides; a checkpoint says how far the run has come
    )
    return optimizer, scheduler


def split(tokens_BS1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split samples `[B, S + 1]` into inputs, labels (the next tokens) and positions, each `[B, S]`."""
    tokens_BS1 = tokens_BS1.to(torch.cuda.current_device())
    tokens_BS, labels_BS = tokens_BS1[:, :-1].contiguous(), tokens_BS1[:, 1:].contiguous()
    return tokens_BS, labels_BS, torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)


def forward_step(microbatches: Iterator[Tensor], model: torch.nn.Module):
    """Run a micro-batch's forward pass, for Megatron's schedules. All ranks of a replica read the same samples."""
    tokens_BS, labels_BS, position_ids_BS = split(next(microbatches))
    return model(tokens_BS, position_ids_BS, None, labels=labels_BS), mean_loss  # causal without a mask


def say_what_came_out(args: Namespace, metrics: dict) -> None:
    """Print losses, the checkpoint's folder and the last rank's fusion report, on the first rank."""
    report = fusion_report()  # of the launcher's patch too
    fused = [str(report) if report.models else "head: Megatron-Core's own, through logits"]
    dist.broadcast_object_list(fused, src=dist.get_world_size() - 1)
    if dist.get_rank() == 0 and metrics["losses"]:
        first, last = metrics["losses"][0], metrics["losses"][-1]
        steps = f"{len(metrics['losses'])} steps, {metrics['tokens_per_s']:.0f} tokens/s"
        saved = f"; checkpoint in {args.save}" if args.save else ""
        print(
            f"{args.title or 'pretrain_gpt.py'}: loss {first:.4f} first, {last:.4f} last; {steps}{saved}\n{fused[0]}",
            flush=True,
        )


def train(args: Namespace) -> dict:
    """Train after `parallel_state` is initialised; return losses, speed and, on the last stage, the head's costs."""
    checkpoint.seed_everything(args.seed)
    tokens = text.mock_tokens(args.vocab_size) if args.mock_data else text.load_tokens(args.data, args.vocab_size)
    samples = text.Samples(tokens, args.seq_length, args.seed)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    iteration = consumed = 0
    if args.load:
        iteration, consumed = checkpoint.load(args.load, args.seed, model, optimizer, scheduler)

    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * replicas)
    model.train()
    losses, seconds = [], []
    steps = range(iteration, args.train_iters)
    bar = tqdm(steps, args.title, disable=dist.get_rank() != 0, unit="step", dynamic_ncols=True, mininterval=0.5)
    for iteration in bar:
        start = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = list(samples.microbatches(consumed, num_microbatches, args.micro_batch_size, replica, replicas))
        mean = run_schedule(model, forward_step, batches, (args.seq_length, args.micro_batch_size))
        optimizer.step()
        scheduler.step(args.global_batch_size)
        consumed += args.global_batch_size
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        losses.append(mean.item() / replicas)
        seconds.append(time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        done = iteration + 1
        if args.save and (done == args.train_iters or (args.save_interval and done % args.save_interval == 0)):
            checkpoint.save(args.save, done, consumed, model, optimizer, scheduler)

    per_step = args.global_batch_size * args.seq_length
    metrics = {"losses": losses, "tokens_per_s": per_step / statistics.median(seconds) if seconds else None}
    say_what_came_out(args, metrics)
    if args.metrics and parallel_state.is_pipeline_last_stage():
        tokens_BS, labels_BS, _ = split(next(samples.microbatches(0, 1, args.micro_batch_size, 0, 1)))
        metrics["head"] = head_meter.measure_head(model.module, tokens_BS, labels_BS)
        metrics["head_bf16"] = head_meter.measure_head(model.module, tokens_BS, labels_BS, torch.bfloat16)
        if args.head == "fused":  # again with little memory: no logits saved for backward, small chunks
            patch_gpt_model_forward_for_linear_ce_fusion(
                model=model.module, cache=0, chunk_tokens=32 * args.micro_batch_size
            )
            for name, dtype in (("head_least_memory", torch.float32), ("head_bf16_least_memory", torch.bfloat16)):
                metrics[name] = head_meter.measure_head(model.module, tokens_BS, labels_BS, dtype)
    return metrics


def main() -> None:
    end_on_interrupt()
    args = parse_arguments()
    try:
        check_arguments(args, ranks())
    except ValueError as error:
        sys.exit(f"pretrain_gpt.py: {error}")

    on_gpu = has_gpus() if args.device == "auto" else args.device == "cuda"
    if on_gpu and not has_gpus():
        gpus, here = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", 1)
        sys.exit(f"pretrain_gpt.py: --device is cuda, but this machine has {gpus} GPUs for {here} ranks: take cpu")
    with megatron_job(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, on_gpu=on_gpu):
        if args.layers == "ext":
            substitute_tensor_parallel()  # the embedding and the output layer too, which no layer spec reaches
        try:
            metrics = train(args)
        except ValueError as error:
            sys.exit(f"pretrain_gpt.py: {error}")
        if args.metrics and dist.get_rank() == dist.get_world_size() - 1:  # the last rank is on the last pipeline stage
            Path(args.metrics).write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
