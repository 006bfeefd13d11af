"""The flags of pretrain_gpt.py, named as Megatron-LM names them, and what must hold between them."""

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

import checkpoint
import text
from program import check_files, check_writable, flag

COUNTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_query_groups",
    "rotary_base",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
)


def parse_arguments(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="pretrain_gpt.py", description="Pretrain a GPT with Megatron-Core.")
    number = partial(parser.add_argument, metavar="N", type=int)
    fraction = partial(parser.add_argument, metavar="X", type=float)
    path = partial(parser.add_argument, metavar="PATH")
    choice = parser.add_argument
    switch = partial(parser.add_argument, action="store_true")

    number("--tensor-model-parallel-size", default=1)
    number("--pipeline-model-parallel-size", default=1)
    switch("--sequence-parallel", help="between layers, each tensor-parallel rank has a part of the sequence")
    number("--num-layers", default=4)
    number("--hidden-size", default=192)
    number("--ffn-hidden-size", help="of the MLP; default: 4 times the hidden size")
    number("--num-attention-heads", default=6)
    switch("--group-query-attention", help="heads share keys and values, in --num-query-groups groups")
    number("--num-query-groups", default=1)
    number("--seq-length", default=256)
    number("--vocab-size", default=16384, help="of the tokenizer, which is trained on the text")
    switch("--untie-embeddings-and-output-weights")
    switch("--swiglu", help="gated MLPs")
    switch("--disable-bias-linear", help="linear layers have no bias")
    choice("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    fraction("--norm-epsilon", default=1e-5)
    number("--rotary-base", default=10000)
    fraction("--hidden-dropout", default=0.1)
    fraction("--attention-dropout", default=0.1)
    number("--micro-batch-size", default=4, help="sequences that a rank sees at once")
    number("--global-batch-size", default=8, help="sequences of an iteration, on all ranks together")
    number("--train-iters", default=100)
    fraction("--lr", default=6e-4)
    fraction("--min-lr", default=0.0)
    number("--lr-warmup-iters", default=0)
    choice("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear")
    fraction("--weight-decay", default=0.01)
    fraction("--clip-grad", default=1.0)
    number("--seed", default=1234)
    path("--data", nargs="+", help="files to learn; default: Python's own documentation and sources")
    switch("--mock-data", help="no text: ids that count upwards")
    path("--save", help="folder for checkpoints; the last one is written when the run is done")
    number("--save-interval", help="iterations between checkpoints")
    path("--load", help="folder that --save was given: go on from its newest checkpoint")
    choice("--head", choices=["stock", "fused"], default="fused", help="the loss from logits, or from hidden states")
    choice("--layers", choices=["stock", "ext"], default="ext", help="Megatron's, or ours")
    switch("--use-cpu-initialization", help="the same weights at any parallel sizes")
    choice("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU for each rank, or the CPU")
    path("--metrics", help="file for losses, speed and the cost of the head, as JSON")
    parser.add_argument("--title", default="", help="of the progress bar")
    return parser.parse_args(argv)


def check_arguments(args: Namespace, world_size: int) -> None:
    """Check the arguments on every rank alike, before anything is communicated.

    Raises:
        ValueError: numbers do not fit each other or the `world_size`, files are missing, folders cannot be written, or
            the checkpoint has at least as many iterations as this run shall have.
    """
    for name in COUNTS:
        if (count := getattr(args, name)) is not None and count < 1:
            raise ValueError(f"{flag(name)} is {count}: it must be at least 1")
    if not args.norm_epsilon > 0:
        raise ValueError(f"--norm-epsilon is {args.norm_epsilon}: it must be above 0")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{flag(name)} is {getattr(args, name)}: it must be at least 0 and below 1")
    _check_parallel_sizes(args, world_size)
    _check_schedule(args)
    if args.vocab_size < text.SMALLEST_VOCAB:
        raise ValueError(f"--vocab-size is {args.vocab_size}: bytes alone make a vocabulary of {text.SMALLEST_VOCAB}")
    if args.save_interval is not None and (args.save_interval < 1 or not args.save):
        raise ValueError(f"--save-interval is {args.save_interval}: it must be at least 1, beside --save PATH")
    check_files(args.data)
    if args.data and args.mock_data:
        raise ValueError("--data names files, and --mock-data trains without any: leave one of them out")
    if args.load:
        done = checkpoint.iteration_of(checkpoint.find_latest(args.load))
        if args.train_iters <= done:
            raise ValueError(
                f"--load has {done} iterations behind it: --train-iters is {args.train_iters}, and must be more"
            )
    check_writable(save=args.save, metrics=args.metrics and Path(args.metrics).parent)


def _check_parallel_sizes(args: Namespace, world_size: int) -> None:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    _divides("--tensor- x --pipeline-model-parallel-size", tp * pp, "the number of ranks", world_size)
    replicas = world_size // (tp * pp)
    _divides("--num-attention-heads", args.num_attention_heads, "--hidden-size", args.hidden_size)
    _divides("--tensor-model-parallel-size", tp, "--num-attention-heads", args.num_attention_heads)
    if args.group_query_attention:
        _divides("--num-query-groups", args.num_query_groups, "--num-attention-heads", args.num_attention_heads)
        _divides("--tensor-model-parallel-size", tp, "--num-query-groups", args.num_query_groups)
    elif args.num_query_groups != 1:
        raise ValueError(f"--num-query-groups is {args.num_query_groups}: it needs --group-query-attention beside it")
    if args.ffn_hidden_size is not None:
        _divides("--tensor-model-parallel-size", tp, "--ffn-hidden-size", args.ffn_hidden_size)
    elif args.swiglu:  # Megatron-LM has another default width for gated MLPs
        raise ValueError("--swiglu is given without --ffn-hidden-size: add the width of the gated MLPs")
    _divides("--tensor-model-parallel-size", tp, "--vocab-size", args.vocab_size)
    _divides("--pipeline-model-parallel-size", pp, "--num-layers", args.num_layers)
    per_round = args.micro_batch_size * replicas
    _divides(f"--micro-batch-size x {replicas} replicas", per_round, "--global-batch-size", args.global_batch_size)
    if args.sequence_parallel:
        _divides("--tensor-model-parallel-size", tp, "--seq-length", args.seq_length)
        if tp == 1:
            raise ValueError("--sequence-parallel needs ranks to share a sequence: --tensor-model-parallel-size is 1")


def _check_schedule(args: Namespace) -> None:
    if not 0 <= args.lr_warmup_iters < args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters is {args.lr_warmup_iters}: it must be at least 0 and below --train-iters, "
            f"which is {args.train_iters}"
        )
    if not 0 <= args.min_lr <= args.lr:
        raise ValueError(f"--min-lr is {args.min_lr}: it must be at least 0 and at most --lr, which is {args.lr}")


def _divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    if value % divisor:
        below = value - value % divisor
        fitting = " or ".join(str(n) for n in (below, below + divisor) if n)
        raise ValueError(
            f"{name} is {value}: it must be a multiple of {divisor_name}, which is {divisor}; {fitting} would fit"
        )
