"""Pretrain a GPT with Megatron-Core: its model, parallelism, optimizer, schedules and checkpoints; our layers and head.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 --head fused --layers ext

Runs on GPUs over NCCL, or on the CPU over gloo (Megatron-Core under `megatron_ext.emulation`). Flags have Megatron-LM's
names and meanings. Two are new: `--head` takes the loss from logits (stock) or from hidden states (fused), `--layers`
builds the transformer layers from Megatron's modules (stock) or from ours (ext).
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from interrupt import end_on_interrupt
from torch import Tensor
from tqdm import tqdm

from megatron_ext.emulation import megatron_on_cpu

with warnings.catch_warnings():  # at import Megatron says, five times, that Apex and Transformer Engine are missing
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    import checkpoint
    import head_meter
    import text
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from megatron_ext import substitute_tensor_parallel
    from megatron_ext.megatron.layer_specs import gpt_block_spec, with_our_norms
    from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, metavar="N")
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true", help="activations between layers split by sequence")
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=192)
    add("--num-attention-heads", type=int, default=6)
    add("--seq-length", type=int, default=256)
    add("--vocab-size", type=int, default=16384, help="of the tokenizer that is trained on the text")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    add("--hidden-dropout", type=float, default=0.1)
    add("--attention-dropout", type=float, default=0.1)
    add("--micro-batch-size", type=int, default=4, help="sequences a rank sees at once")
    add("--global-batch-size", type=int, default=8, help="sequences of one iteration, on all ranks")
    add("--train-iters", type=int, default=100)
    add("--lr", type=float, default=1e-3)
    add("--min-lr", type=float, default=0.0)
    add("--lr-warmup-iters", type=int, default=0)
    parser.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear")
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--seed", type=int, default=1234)
    parser.add_argument("--data", nargs="+", metavar="FILE", help="text to learn; default: Python's own documentation")
    parser.add_argument("--save", metavar="DIR", help="write checkpoints under DIR, the last one when done")
    add("--save-interval", type=int, help="also save every N iterations")
    parser.add_argument("--load", metavar="DIR", help="go on from the newest checkpoint under DIR")
    parser.add_argument("--head", choices=["stock", "fused"], default="fused")
    parser.add_argument("--layers", choices=["stock", "ext"], default="ext")
    parser.add_argument("--use-cpu-initialization", action="store_true", help="same weights for any parallel sizes")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU per rank, or CPU"
    )
    parser.add_argument("--metrics", metavar="FILE", help="write losses, speed and the cost of the head as JSON")
    parser.add_argument("--title", default="", help="of the progress bar")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Every rank comes to the same verdict by itself, before anything is sent.

    Raises:
        ValueError: sizes that do not fit each other or the `world_size`, or files that are not there.
    """

    def must_divide(divisor_name: str, divisor: int, name: str, value: int, fix: str) -> None:
        if value % divisor:
            raise ValueError(f"{name} is {value}, which {divisor_name} = {divisor} does not divide: {fix}")

    for name, value in vars(args).items():
        if (
            isinstance(value, int)
            and name not in ("seed", "lr_warmup_iters")
            and not isinstance(value, bool)
            and value < 1
        ):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 0 and below 1")
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    replica = "tensor x pipeline parallel size"
    must_divide(
        replica, tp * pp, "the number of ranks", world_size, "start as many ranks as one replica needs, or more"
    )
    must_divide("--num-attention-heads", args.num_attention_heads, "--hidden-size", args.hidden_size, "change one")
    must_divide(
        "tensor parallel size", tp, "--num-attention-heads", args.num_attention_heads, "each rank has whole heads"
    )
    must_divide("tensor parallel size", tp, "--vocab-size", args.vocab_size, f"take {-(-args.vocab_size // tp) * tp}")
    must_divide("pipeline parallel size", pp, "--num-layers", args.num_layers, "each stage has as many layers")
    if args.sequence_parallel:
        must_divide("tensor parallel size", tp, "--seq-length", args.seq_length, "each rank has an equal part")
    replicas = world_size // (tp * pp)
    must_divide(
        f"--micro-batch-size x {replicas} replicas",
        args.micro_batch_size * replicas,
        "--global-batch-size",
        args.global_batch_size,
        "each replica sees whole micro-batches",
    )
    if args.sequence_parallel and tp == 1:
        raise ValueError(
            "--sequence-parallel splits over tensor-parallel ranks: set --tensor-model-parallel-size above 1"
        )
    if args.lr_warmup_iters >= args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters is {args.lr_warmup_iters}: it must be below --train-iters {args.train_iters}"
        )
    if not 0 <= args.min_lr <= args.lr:
        raise ValueError(f"--min-lr is {args.min_lr}: it must lie between 0 and --lr, which is {args.lr}")
    if args.vocab_size < text.SMALLEST_VOCAB:
        raise ValueError(
            f"--vocab-size is {args.vocab_size}: a byte-level vocabulary has at least {text.SMALLEST_VOCAB}"
        )
    if args.save_interval and not args.save:
        raise ValueError("--save-interval says when, but --save does not say where: add --save DIR")
    for file in args.data or []:
        if not Path(file).is_file():
            raise ValueError(f"--data names {file!r}, which is not a file")
    if args.load:
        checkpoint.find_latest(args.load)


def build_model(args: argparse.Namespace) -> DistributedDataParallel:
    """This rank's part of the GPT, in Megatron's data parallelism."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=args.use_cpu_initialization,
        # These need Apex or CUDA kernels of Megatron's.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    if args.layers == "ext":
        layers = gpt_block_spec(config)
    else:
        layers = get_gpt_layer_local_spec(normalization=config.normalization)
        if config.sequence_parallel:  # which Megatron's norms refuse unless there is Apex
            layers = with_our_norms(layers)
    gpt = GPTModel(
        config,
        layers,
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(torch.cuda.current_device())
    if args.head == "fused":
        patch_gpt_model_forward_for_linear_ce_fusion(model=gpt)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel):
    """Megatron's distributed Adam and its schedule, which counts samples."""
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
    """Inputs, labels (the inputs one further on) and positions, each `[B, S]`, of samples `[B, S + 1]`."""
    tokens_BS1 = tokens_BS1.to(torch.cuda.current_device())
    tokens_BS, labels_BS = tokens_BS1[:, :-1].contiguous(), tokens_BS1[:, 1:].contiguous()
    return tokens_BS, labels_BS, torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)


def forward_step(microbatches: Iterator[Tensor], model: torch.nn.Module):
    """What Megatron's schedules call for each micro-batch. All ranks of a replica read the same samples."""
    tokens_BS, labels_BS, position_ids_BS = split(next(microbatches))
    output = model(tokens_BS, position_ids_BS, None, labels=labels_BS)  # attention is causal without a mask

    def loss(per_token_BS: Tensor):
        mean = per_token_BS.mean()
        return mean, mean.detach().clone()  # the schedule divides the first in place

    return output, loss


def mean_over_job(losses: list[Tensor]) -> float:
    """The mean loss of an iteration, on every rank. `losses`: this rank's micro-batches, on the last stage only."""
    mean = torch.stack(losses).mean() if losses else torch.zeros((), device=torch.cuda.current_device())
    dist.all_reduce(mean, group=parallel_state.get_pipeline_model_parallel_group())  # the other stages add 0
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return mean.item() / parallel_state.get_data_parallel_world_size()


def train(args: argparse.Namespace) -> dict:
    """The run, once `parallel_state` is initialised. Returns its metrics."""
    checkpoint.seed_everything(args.seed)
    samples = text.Samples(text.load_tokens(args.data, args.vocab_size), args.seq_length, args.seed)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    iteration = consumed = 0
    if args.load:
        iteration, consumed = checkpoint.load(args.load, args.seed, model, optimizer, scheduler)

    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * replicas)
    forward_backward = get_forward_backward_func()
    model.train()
    losses, seconds = [], []
    steps = range(iteration, args.train_iters)
    bar = tqdm(steps, args.title, disable=dist.get_rank() != 0, unit="step", dynamic_ncols=True, mininterval=0.5)
    for iteration in bar:
        start = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        of_microbatches = forward_backward(
            forward_step_func=forward_step,
            data_iterator=samples.microbatches(consumed, num_microbatches, args.micro_batch_size, replica, replicas),
            model=[model],
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(args.global_batch_size)
        consumed += args.global_batch_size
        losses.append(mean_over_job(of_microbatches))
        seconds.append(time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        done = iteration + 1
        if args.save and (done == args.train_iters or (args.save_interval and done % args.save_interval == 0)):
            checkpoint.save(args.save, done, consumed, model, optimizer, scheduler)

    tokens = args.global_batch_size * args.seq_length
    metrics = {"losses": losses, "tokens_per_s": tokens / statistics.median(seconds) if seconds else None}
    if args.metrics and parallel_state.is_pipeline_last_stage():
        tokens_BS, labels_BS, _ = split(next(samples.microbatches(0, 1, args.micro_batch_size, 0, 1)))
        metrics["head"] = head_meter.measure_head(model.module, tokens_BS, labels_BS)
        if args.head == "fused":  # once more, with little memory: nothing is kept for backward, and chunks are small
            patch_gpt_model_forward_for_linear_ce_fusion(model=model.module, cache=0, chunk_size=32)
            metrics["head_least_memory"] = head_meter.measure_head(model.module, tokens_BS, labels_BS)
    return metrics


def main() -> None:
    end_on_interrupt()
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what torch says of the functions that Megatron calls
    args = parse_arguments()
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        os.environ.setdefault(name, str(value))  # started without torchrun: one rank
    try:
        check_arguments(args, int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        sys.exit(f"pretrain_gpt.py: {error}")

    local_rank = int(os.environ["LOCAL_RANK"])
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpu = args.device == "cuda" or (args.device == "auto" and enough_gpus)
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants kernels in the order it starts them
    else:  # where one generator is both CPU's and CUDA's, Megatron warns of each draw of dropout
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    with nullcontext() if on_gpu else megatron_on_cpu():
        if args.layers == "ext":
            substitute_tensor_parallel()  # the embedding and the output layer too, which no layer spec reaches
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size, create_gloo_process_groups=False
        )
        metrics = train(args)
        if args.metrics and dist.get_rank() == dist.get_world_size() - 1:  # which is on the last pipeline stage
            Path(args.metrics).write_text(json.dumps(metrics))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
