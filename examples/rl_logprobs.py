"""GRPO on a tiny Megatron GPT: log-probabilities, ratios and KL, the same however the ranks share model and sequence.

    torchrun --nproc-per-node 4 examples/rl_logprobs.py

Two steps of GRPO run in one process, from whole logits and PyTorch's log_softmax; then again tensor parallel, context
parallel, and both, with the functions that NeMo-RL calls: the policy's log-probabilities by the fused head, which makes
no logits, those of the reference model from its sharded logits. What one process finds is printed next to what the
ranks find. Runs on GPUs, or on the CPU with Megatron-Core under `megatron_on_cpu`.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import gpt_stage, process_group, small_config
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, param_is_not_tensor_parallel_duplicate
from program import end_on_interrupt
from torch import Tensor

from megatron_ext import reference
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.model_utils import (
    _get_tokens_on_this_cp_rank,
    from_parallel_logits_to_logprobs,
    patch_gpt_model_forward_for_linear_ce_fusion,
)

VOCAB, PROMPT, SEQUENCE, GROUP = 512, 8, 30, 4  # tokens; answers to each prompt
CLIP, KL_WEIGHT, LEARNING_RATE = 0.2, 0.1, 10.0
LAYOUTS = {"one process": (1, 1), "TP 2": (2, 1), "CP 2": (1, 2), "TP 2 x CP 2": (2, 2)}  # tensor and context parallel


@dataclass(frozen=True)
class Rollout:
    """Prompts with answers of the policy: B samples of S tokens, GROUP for each prompt."""

    tokens_BS: Tensor  # int64
    answered_BS: Tensor  # [B, S - 1], 1.0 where the next token is of the answer, 0.0 in the prompt
    advantage_B: Tensor  # the reward less its mean over the prompt's answers, in standard deviations


def roll_out(prompts: int, seed: int, device: torch.device) -> Rollout:
    """Draw random answers, rewarded for even token ids, in the place of an inference engine and a reward model."""
    g = torch.Generator().manual_seed(seed)
    prompts_BS = torch.randint(VOCAB, (prompts, PROMPT), generator=g).repeat_interleave(GROUP, 0)
    answers_BS = torch.randint(VOCAB, (prompts * GROUP, SEQUENCE - PROMPT), generator=g)
    answered_BS = (torch.arange(1, SEQUENCE) >= PROMPT).float().expand(prompts * GROUP, -1)
    reward = (answers_BS % 2 == 0).float().mean(1).view(prompts, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    tokens_BS = torch.cat([prompts_BS, answers_BS], 1)
    return Rollout(tokens_BS.to(device), answered_BS.to(device), advantage.view(-1).to(device))


def build_model(seed: int) -> GPTModel:
    """Make this rank's part of the GPT; the whole weights depend on the seed alone, not on the sharding."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = small_config(
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1,
    )
    model = gpt_stage(config, VOCAB, 32, gpt_block_spec(config))
    patch_gpt_model_forward_for_linear_ce_fusion(model=model)
    return model


def my_part(tokens_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens padded to a multiple of twice the context-parallel size, this rank's part and its positions."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    padded_BS = F.pad(tokens_BS, (0, -tokens_BS.shape[1] % (2 * size)))
    positions_BS = torch.arange(padded_BS.shape[1], device=tokens_BS.device).expand_as(padded_BS)
    return padded_BS, *(_get_tokens_on_this_cp_rank(x, rank, size) for x in (padded_BS, positions_BS))


def policy_log_probs(model: GPTModel, tokens_BS: Tensor) -> Tensor:
    """Return log-probabilities `[B, S - 1]` of the next tokens, differentiable, computed without logits."""
    padded_BS, mine, positions = my_part(tokens_BS)
    found = model(mine, positions, None, labels=padded_BS, return_logprobs_for_linear_ce_fusion=True)
    return found[:, : tokens_BS.shape[1] - 1]


def reference_log_probs(model: GPTModel, tokens_BS: Tensor) -> Tensor:
    """Return log-probabilities `[B, S - 1]`, computed from logits sharded over vocabulary and sequence."""
    _, mine, positions = my_part(tokens_BS)
    with torch.no_grad():
        logits_BSV = model(mine, positions, None)
    rank, columns = parallel_state.get_tensor_model_parallel_rank(), logits_BSV.shape[-1]
    return from_parallel_logits_to_logprobs(
        logits_BSV,
        tokens_BS,
        vocab_start_index=rank * columns,
        vocab_end_index=(rank + 1) * columns,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        inference_only=True,
        cp_group=parallel_state.get_context_parallel_group(),
    )


def one_process_log_probs(model: GPTModel, tokens_BS: Tensor) -> Tensor:
    """Return log-probabilities `[B, S - 1]`, computed the usual way: all logits, log_softmax, gather."""
    _, mine, positions = my_part(tokens_BS)
    return reference.log_probs(model(mine, positions, None)[:, :-1], tokens_BS[:, 1:])


def grpo(policy_BS: Tensor, old_BS: Tensor, ref_BS: Tensor, rollout: Rollout) -> tuple[Tensor, dict[str, float]]:
    """Return GRPO's loss, and its terms by name; all are means over the answers' tokens."""

    def mean(x_BS: Tensor) -> Tensor:
        return (x_BS * rollout.answered_BS).sum() / rollout.answered_BS.sum()

    ratio_BS = (policy_BS - old_BS).exp()
    advantage_B1 = rollout.advantage_B[:, None]
    gain_BS = torch.minimum(ratio_BS * advantage_B1, ratio_BS.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    difference_BS = ref_BS - policy_BS
    kl_BS = difference_BS.exp() - difference_BS - 1
    loss = mean(KL_WEIGHT * kl_BS - gain_BS)
    terms = {"log-prob": mean(policy_BS), "ratio": mean(ratio_BS), "KL": mean(kl_BS), "loss": loss}
    return loss, {name: term.item() for name, term in terms.items()}


def update(model: GPTModel) -> float:
    """Make one step of gradient descent; return the norm of the gradient.

    Every context-parallel rank differentiates the loss of the whole sequence, so the sum of the ranks' gradients counts
    the loss once for each rank. The gradient is therefore the mean over the ranks, as in Megatron's data parallelism.
    """
    squares = torch.zeros((), device=torch.cuda.current_device())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
        if getattr(parameter, "sequence_parallel", False):  # of this tensor-parallel rank's tokens only
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        parameter.grad /= parallel_state.get_context_parallel_world_size()
        if param_is_not_tensor_parallel_duplicate(parameter):
            squares += parameter.grad.square().sum()
        parameter.data -= LEARNING_RATE * parameter.grad
        parameter.grad = None
    dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
    return squares.sqrt().item()


def train(steps: int, prompts: int, seed: int) -> list[dict[str, float]]:
    """Train with the process groups of the present layout; return the terms and the gradient norm of each step."""
    alone = parallel_state.get_tensor_and_context_parallel_world_size() == 1
    of_policy = one_process_log_probs if alone else policy_log_probs
    of_reference = torch.no_grad()(one_process_log_probs) if alone else reference_log_probs
    policy, ref = build_model(seed), build_model(seed)
    rollout = roll_out(prompts, seed, next(policy.parameters()).device)
    ref_BS = old_BS = of_reference(ref, rollout.tokens_BS)
    found = []
    for _ in range(steps):
        loss, terms = grpo(of_policy(policy, rollout.tokens_BS), old_BS, ref_BS, rollout)
        loss.backward()
        found.append(terms | {"gradient": update(policy)})
    return found


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return a table: a row for each term of each step, a column for each layout, and differences from one process."""
    first = runs["one process"]
    rows = [["", *runs]]
    for step, terms in enumerate(first):
        rows += [[f"step {step} {name}", *(f"{run[step][name]:.6f}" for run in runs.values())] for name in terms]

    def difference(run: list[dict[str, float]]) -> float:
        found = [
            abs(run[step][name] - value) / max(abs(value), 1e-3)
            for step, terms in enumerate(first)
            for name, value in terms.items()
        ]
        return torch.tensor(found).max().item()  # NaN if any is

    rows.append(["largest difference", *(f"{difference(run):.0e}" for run in runs.values())])
    return "\n".join(f"{row[0]:<20}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


def main() -> None:
    end_on_interrupt()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, metavar="N")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help=f"each is answered {GROUP} times")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in ("steps", "prompts"):
        if getattr(args, name) < 1:
            sys.exit(f"rl_logprobs.py: --{name} is {getattr(args, name)}: it must be at least 1")

    with process_group():
        world = dist.get_world_size()
        runs = {}
        for name, (tp, cp) in LAYOUTS.items():
            if world % (tp * cp) == 0:
                parallel_state.initialize_model_parallel(tp, context_parallel_size=cp, create_gloo_process_groups=False)
                runs[name] = train(args.steps, args.prompts, args.seed)
                parallel_state.destroy_model_parallel()
        if dist.get_rank() == 0:
            print(table(runs))
            missing = [name for name in LAYOUTS if name not in runs]
            if missing:
                print(f"{world} ranks: no {', '.join(missing)}; start 4 with torchrun --nproc-per-node 4")


if __name__ == "__main__":
    main()
