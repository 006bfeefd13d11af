"""Fine-tune a Hugging Face model under tensor, context and data parallelism, and give it back to Hugging Face.

    torchrun --nproc-per-node 4 examples/finetune_hf.py --tensor-parallel-size 2 --export runs/finetuned

A tiny Llama (or `--model DIRECTORY`) learns Python's documentation (or `--data FILES`), on GPUs or on the CPU. The lm
head, sharded by vocabulary, feeds the fused cross entropy: no rank ever holds logits. Checkpoints are by
`torch.distributed.checkpoint`; what 4 ranks saved, 1 or 2 go on with, cut another way. Text, order and learning rate
follow from the arguments and the step alone, so that every layout computes the same losses.
"""

import argparse
import json
import logging
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import hf_directory
import text
import torch
import torch.distributed as dist
from program import check_files, check_writable, end_on_interrupt, flag, has_gpus, ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from megatron_ext.dtensor import causal_lm_loss, clip_grad_by_total_norm_, get_grad_norm, parallelize, save_pretrained
from megatron_ext.policy import checkpoint

HELD_OUT = 0.05  # the fraction at the end of the text that is not trained on
EVALUATION_BATCHES = 4


def parse_arguments(argv: list[str] | None = None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, number = ({"type": kind, "metavar": "N"} for kind in (int, float))
    parser.add_argument("--tensor-parallel-size", default=1, **count, help="ranks that share each layer")
    parser.add_argument("--context-parallel-size", default=1, **count, help="ranks that share each sequence")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard activations between layers as well")
    parser.add_argument("--activation-checkpointing", action="store_true", help="compute layers again in backward")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face model; else a small Llama, of these sizes:")
    parser.add_argument("--hidden-size", default=128, **count, help="a multiple of 32")
    parser.add_argument("--layers", default=2, **count)
    parser.add_argument("--vocab-size", default=1024, **count)
    parser.add_argument("--untied", action="store_true", help="the lm head is no copy of the embedding")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="text; else Python's documentation")
    parser.add_argument("--steps", default=120, **count, help="of the whole run")
    parser.add_argument("--global-batch-size", default=16, **count, help="samples of a step, over all ranks")
    parser.add_argument("--seq-length", default=128, **count, help="tokens of a sample")
    parser.add_argument("--learning-rate", default=3e-3, **number)
    parser.add_argument("--max-grad-norm", default=1.0, **number)
    parser.add_argument("--seed", default=1, **count)
    parser.add_argument("--save", metavar="DIR", help="where checkpoints go: DIR/step_120 and so on")
    parser.add_argument("--save-interval", **count, help="steps; else once, at the end")
    parser.add_argument("--load", metavar="DIR", help="a checkpoint to go on from")
    parser.add_argument("--export", metavar="DIR", help="where the trained model goes, as Hugging Face has it")
    parser.add_argument("--metrics", metavar="FILE", help="for all losses, as JSON")
    return parser.parse_args(argv)


def check_arguments(args: Namespace, world_size: int) -> None:
    """Check the arguments on every rank alike, before anything is communicated.

    Raises:
        ValueError: numbers do not fit each other or the `world_size`, files are missing, or folders cannot be written.
    """
    for name, value in vars(args).items():
        if type(value) in (int, float) and name != "seed" and value <= 0:
            raise ValueError(f"{flag(name)} is {value}: it must be above 0")
    model_parallel = args.tensor_parallel_size * args.context_parallel_size
    if world_size % model_parallel:
        raise ValueError(
            f"--tensor-parallel-size x --context-parallel-size is {args.tensor_parallel_size} x "
            f"{args.context_parallel_size} = {model_parallel}: it must divide the number of ranks, which is "
            f"{world_size}; start another number of ranks, or choose other sizes"
        )
    replicas = world_size // model_parallel
    if args.global_batch_size % replicas:
        raise ValueError(
            f"--global-batch-size is {args.global_batch_size}: it must be a multiple of the number of data-parallel "
            f"replicas, {world_size} ranks / {model_parallel} = {replicas}"
        )
    if not args.model and args.hidden_size % 32:
        raise ValueError(f"--hidden-size is {args.hidden_size}: it must be a multiple of 32, two heads of 16 channels")
    if not args.model and args.vocab_size < text.SMALLEST_VOCAB:
        raise ValueError(f"--vocab-size is {args.vocab_size}: bytes alone make a vocabulary of {text.SMALLEST_VOCAB}")
    if args.save_interval and not args.save:
        raise ValueError("--save-interval is given without --save DIR")
    check_files(args.data)
    check_writable(save=args.save, export=args.export, metrics=args.metrics and Path(args.metrics).parent)


class Run:
    """A parallelized model, its optimizer and its text.

    `B` is the number of samples of this rank's data-parallel replica in a step, `S` is `--seq-length`.
    """

    def __init__(self, args: Namespace, device: torch.device):
        self.args, self.device, self.step = args, device, 0
        tp, cp = args.tensor_parallel_size, args.context_parallel_size
        shape = (dist.get_world_size() // (tp * cp), cp, tp)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp", "tp"))
        self.dp_cp = self.mesh["dp", "cp"]._flatten("dp_cp")
        texts = text.documents(args.data) if args.data else [topics[name] for name in sorted(topics)]
        if args.model:
            model, self.tokenizer = hf_directory.load(args.model)
        else:
            self.tokenizer = hf_directory.new_tokenizer(texts, args.vocab_size)
            model = hf_directory.new_model(args.hidden_size, args.layers, args.vocab_size, not args.untied, args.seed)
        self.config = model.config.get_text_config()
        self._split_text(texts)
        self.model: nn.Module = parallelize(
            model.to(device),
            self.mesh,
            torch.bfloat16 if device.type == "cuda" else torch.float32,
            sequence_parallel=args.sequence_parallel,
            activation_checkpointing=args.activation_checkpointing,
        )
        # torch's multi-tensor kernels do not take DTensors of different meshes in one call.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, foreach=False)

    def _split_text(self, texts: list[str]) -> None:
        longest = self.config.max_position_embeddings
        if self.args.seq_length > longest:
            raise ValueError(f"--seq-length is {self.args.seq_length}: the model knows positions up to {longest}")
        if len(self.tokenizer) > self.config.vocab_size:
            raise ValueError(f"--model has a tokenizer of {len(self.tokenizer)} tokens, more than the model itself has")
        tokens = hf_directory.tokenize(texts, self.tokenizer)
        held_out = max(int(HELD_OUT * len(tokens)), self.args.seq_length + 1)
        self.samples = text.Samples(tokens[:-held_out], self.args.seq_length, self.args.seed)
        self.held_out = text.Samples(tokens[-held_out:], self.args.seq_length, self.args.seed)

    def _batch(self, samples: text.Samples, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels `[B, S]`, this replica's part of global batch `number`."""
        replicas = self.mesh["dp"].size()
        size, replica = self.args.global_batch_size // replicas, self.mesh["dp"].get_local_rank()
        start = number * self.args.global_batch_size
        (tokens_BS1,) = samples.microbatches(start, 1, size, replica, replicas)
        tokens_BS1 = tokens_BS1.to(self.device)
        return tokens_BS1[:, :-1], tokens_BS1[:, 1:]

    def _mean(self, loss_BS: Tensor) -> Tensor:
        """Return the mean loss of the global batch, by an all-reduce over the replicas."""
        total = loss_BS.detach().sum()
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return total / (self.args.global_batch_size * self.args.seq_length)

    def _losses(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the losses `[B, S]` of predicting the token after each token."""
        return causal_lm_loss(self.model, tokens_BS, shift_labels=targets_BS)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss on the text that is never trained on."""
        self.model.eval()
        batches = [self._batch(self.held_out, number) for number in range(EVALUATION_BATCHES)]
        losses = [self._mean(self._losses(*batch)) for batch in batches]
        return torch.stack(losses).mean().item()

    def train_step(self) -> float:
        """Make one update; return the mean loss before it."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * self._schedule()
        loss_BS = self._losses(*self._batch(self.samples, self.step))
        # FSDP2 averages gradients over the replicas, which have equally many tokens.
        loss_BS.mean().backward()
        parameters = list(self.model.parameters())
        norm = get_grad_norm(parameters, self.dp_cp.get_group(), self.mesh["tp"].get_group())
        clip_grad_by_total_norm_(parameters, self.args.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self._mean(loss_BS).item()

    def _schedule(self) -> float:
        """Return the factor of the learning rate: up to 1 over a tenth of the steps, then down towards a tenth."""
        warmup = max(1, self.args.steps // 10)
        return min((self.step + 1) / warmup, 1 - 0.9 * self.step / self.args.steps)

    def save(self) -> None:
        tensors, numbers = self._optimizer_state()
        path = Path(self.args.save) / f"step_{self.step}"
        facts = {"step": self.step, "numbers": numbers}
        checkpoint.save_together(checkpoint.Part("training", path, self._weights() | tensors, facts))

    def load(self) -> None:
        """Load the state of a checkpoint that a run of any layout has saved.

        Raises:
            ValueError: the checkpoint is missing, incomplete, damaged, or of another model, or it has at least as many
                steps as this run shall have.
        """
        tensors, _ = self._optimizer_state()
        [saved], held = checkpoint.find(training=self.args.load), self._weights() | tensors
        checkpoint.must_hold(saved, held)
        checkpoint.read(saved, held)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = tensors | saved.facts["numbers"]
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
        self.step = saved.facts["step"]
        if self.step >= self.args.steps:
            raise ValueError(f"--load has {self.step} steps behind it: --steps is {self.args.steps}, and must be more")

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights by transformers' names, tied weights once; the tensors share the model's memory."""
        state = get_model_state_dict(self.model)
        if self.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return {name: x for name, x in state.items() if isinstance(x, Tensor)}

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's tensors, and its other values, both by name."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
        return tensors, {name: x for name, x in state.items() if name not in tensors}

    def export(self) -> None:
        save_pretrained(self.model, self.args.export)
        if dist.get_rank() == 0:
            self.tokenizer.save_pretrained(self.args.export)


def finetune(args: Namespace, device: torch.device) -> dict[str, Any]:
    """Train, evaluate and export after `torch.distributed` is initialised; return losses and held-out losses."""
    run = Run(args, device)
    if args.load:
        run.load()
    talks = dist.get_rank() == 0
    first, losses, start = run.evaluate(), [], time.perf_counter()
    bar = tqdm(range(run.step, args.steps), disable=not talks, unit="step", dynamic_ncols=True, mininterval=0.5)
    for _ in bar:
        losses.append(run.train_step())
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        if args.save and (run.step == args.steps or (args.save_interval and run.step % args.save_interval == 0)):
            run.save()
    seconds = time.perf_counter() - start
    last = run.evaluate()
    if args.export:
        run.export()
    if talks:
        dp, cp, tp = run.mesh.shape
        tokens = len(losses) * args.global_batch_size * args.seq_length
        speed = f"{tokens / seconds:.0f} tokens/s"
        print(f"dp {dp} x cp {cp} x tp {tp}: held-out loss {first:.4f} before, {last:.4f} after; {speed}")
    return {"losses": losses, "held_out_before": first, "held_out_after": last}


def main() -> None:
    end_on_interrupt()
    args = parse_arguments()
    # The export gathers weights one parameter at a time, and this logger would say that it could be faster.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        check_arguments(args, ranks())
        on_gpu = has_gpus()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        metrics = finetune(args, device)
    except ValueError as error:
        sys.exit(f"finetune_hf.py: {error}")
    if args.metrics and dist.get_rank() == 0:
        Path(args.metrics).write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
