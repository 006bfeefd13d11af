"""GRPO on Ray: a tiny model, drawn at random, learns to add two digits from nothing but rewards.

    python examples/grpo_tiny.py                        # two policy workers on CPU, about a minute
    python examples/grpo_tiny.py --steps 200 --resume   # goes on from the last checkpoint

In each step the policy samples answers to prompts such as "2+3=", by transformers' `generate` on its workers; the
reward is 1 for the right answer. A sample's advantage compares its reward with those of the same prompt's samples.
The program prints the mean rewards of the first and the last tenth, and writes a curve and a checkpoint.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from program import check_writable
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig

from megatron_ext.policy import BatchedDataDict, ClippedPGLoss, RayPolicy
from megatron_ext.policy.ray_policy import local_ray

DIGITS = 5  # 0 to 4, so that sums have one digit
PLUS, EQUALS, VOCABULARY = 10, 11, 12


def main() -> None:
    args = arguments()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # for one machine; Ray would write a token to the home folder
    with local_ray(args.workers):
        rewards = learn(args)
    first, last = tenths(rewards)
    plot(rewards, args.out / "reward.png")
    print(f"mean reward: first tenth {first:.3f}, last tenth {last:.3f}; curve in {args.out / 'reward.png'}")


def learn(args: argparse.Namespace) -> list[float]:
    """Train in the running Ray; return the mean reward of each step."""
    with RayPolicy(policy_config(args), args.workers, **checkpoint(args)) as policy:
        return train(policy, args)


def tenths(rewards: list[float]) -> tuple[float, float]:
    """Return the means of the first and of the last tenth of the rewards."""
    tenth = max(1, len(rewards) // 10)
    return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


def train(policy: RayPolicy, args: argparse.Namespace) -> list[float]:
    """Train up to `args.steps`; return the mean reward of every step, also of those before a resumption."""
    loss = ClippedPGLoss(reference_policy_kl_penalty=args.kl)
    rewards = progress(args.out)["rewards"] if args.resume else []
    bar = tqdm(range(len(rewards), args.steps), initial=len(rewards), total=args.steps, desc="GRPO")
    for step in bar:
        batch, reward = sample(policy, args, args.seed << 20 | step)
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        if args.kl:
            batch |= policy.get_reference_policy_logprobs(batch)
            batch["reference_policy_logprobs"] = batch.pop("reference_logprobs")
        policy.train(batch, loss)
        rewards.append(reward.mean().item())
        bar.set_postfix(reward=f"{rewards[-1]:.3f}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(rewards, args.out, policy)
    return rewards


def sample(policy: RayPolicy, args: argparse.Namespace, seed: int) -> tuple[BatchedDataDict, Tensor]:
    """Draw `args.samples` answers of one token to each prompt; return GRPO's batch and the rewards `[N]`.

    The advantage of an answer is its reward less the mean of its prompt, divided by the standard deviation there.
    """
    random = torch.Generator().manual_seed(seed)
    terms = torch.randint(DIGITS, (args.prompts, 2), generator=random).repeat_interleave(args.samples, 0)
    prompts = torch.stack(
        [terms[:, 0], torch.full((len(terms),), PLUS), terms[:, 1], torch.full((len(terms),), EQUALS)], 1
    )
    lengths = torch.full((len(prompts),), prompts.shape[1])
    tokens = policy.generate({"input_ids": prompts, "input_lengths": lengths}, seed=seed)["output_ids"]  # [N, 5]
    reward = (tokens[:, -1] == terms.sum(1)).float()
    by_prompt = reward.view(-1, args.samples)
    advantage = (by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-4)
    answer = torch.zeros(tokens.shape)
    answer[:, -1] = 1
    batch = BatchedDataDict(
        input_ids=tokens,
        input_lengths=lengths + 1,
        token_mask=answer,
        sample_mask=torch.ones(len(tokens)),
        advantages=answer * advantage.view(-1, 1),
    )
    return batch, reward


def save(rewards: list[float], out: Path, policy: RayPolicy) -> None:
    """Write a checkpoint, then progress.json, which so names a complete one at any time; remove the one before."""
    folder, named = out / f"step-{len(rewards):05d}", out / "progress.json"
    before = out / progress(out)["folder"] if named.exists() else folder
    policy.save_checkpoint(str(folder / "weights"), str(folder / "optimizer"))
    new = out / "progress.json.new"
    new.write_text(json.dumps({"folder": folder.name, "rewards": rewards}))
    new.replace(named)
    if before != folder:
        shutil.rmtree(before, ignore_errors=True)


def progress(out: Path) -> dict:
    """Read progress.json: the folder of the last checkpoint, and the rewards so far, whose number is the step."""
    return json.loads((out / "progress.json").read_text())


def checkpoint(args: argparse.Namespace) -> dict[str, str]:
    """Return the paths of the checkpoint that the policy begins with: none, or the last one with `--resume`."""
    if not args.resume:
        return {}
    folder = args.out / progress(args.out)["folder"]
    return {"weights_path": str(folder / "weights"), "optimizer_path": str(folder / "optimizer")}


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )


def policy_config(args: argparse.Namespace) -> dict:
    rows = args.prompts * args.samples
    replicas = args.workers // args.tensor_parallel_size
    return {
        "model_name": model_config(),
        "seed": args.seed,
        "precision": "float32",
        "train_global_batch_size": rows,
        "train_micro_batch_size": rows // replicas,
        "max_grad_norm": 1.0,
        "dtensor_cfg": {"tensor_parallel_size": args.tensor_parallel_size},
        "generation": {"max_new_tokens": 1, "temperature": 1.0},  # top_k, top_p too: scoring uses them
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": args.lr, "weight_decay": 0.0}},
    }


def plot(rewards: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Sums of two digits, by GRPO")
    figure.savefig(path, dpi=120)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--kl", type=float, default=0.0, help="factor of the KL penalty towards the first weights")
    parser.add_argument("--prompts", type=int, default=24, help="in a step")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--workers", type=int, default=2, help="Ray actors")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of the workers; the rest is data parallel")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args(given)
    for name in ("steps", "prompts", "workers", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
    size = args.tensor_parallel_size
    if size < 1 or args.workers % size or args.prompts * args.samples % (args.workers // size):
        parser.error(
            f"--workers {args.workers} --tensor-parallel-size {size}: the workers must be a multiple of it, and the "
            f"{args.prompts} * {args.samples} samples a multiple of the quotient"
        )
    if args.samples < 2:
        parser.error(f"--samples is {args.samples}: an advantage compares samples of one prompt; take 2 or more")
    if args.resume and not (args.out / "progress.json").exists():
        parser.error(f"--resume: there is no checkpoint in {args.out}; run without it first")
    try:
        check_writable(out=args.out)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    main()
