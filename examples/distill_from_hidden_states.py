"""On-policy distillation: a small student learns a teacher's distribution, on what it samples, from hidden states.

    python examples/distill_from_hidden_states.py              # reverse KL over the whole vocabulary
    python examples/distill_from_hidden_states.py --top-k 16   # over the teacher's likeliest tokens, all others as one

Neither model's logits are stored: they exist for a few tokens at a time. Last comes the same loss from whole logits.
"""

from argparse import ArgumentParser

import torch
from head_meter import peak_mib
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_ext.head import KL, LmHead, Teacher
from megatron_ext.losses import TopKDistillationLoss

B, P, S, V, CHUNK = 16, 4, 32, 4096, 64  # prompts, tokens of each and of an answer, vocabulary, tokens of a chunk


def new_model(width: int, layers: int, spread: float) -> LlamaForCausalLM:
    """Make a Llama whose weights have the standard deviation `spread`; no token ends its answers."""
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, initializer_range=spread, eos_token_id=None, **sizes))


def roll_out(student: LlamaForCausalLM, teacher: LlamaForCausalLM, prompts: Tensor) -> list[LmHead | Tensor]:
    """Let the student answer; return for student and teacher the head and the hidden states `[B, S, D]` of answers."""
    tokens, batch = student.generate(prompts, do_sample=True, top_k=0, max_new_tokens=S), []  # 0: draw from all tokens
    for model in (student, teacher):
        batch += [LmHead.of(model.lm_head, chunk_tokens=CHUNK), model.model(tokens).last_hidden_state[:, P - 1 : -1]]
    return batch


def from_hidden_states(student: LmHead, hidden: Tensor, teacher: LmHead, target: Tensor, top_k: int) -> Tensor:
    """Return the mean of KL(student | teacher) over the answers' tokens."""
    if top_k:
        loss = TopKDistillationLoss(divergence="reverse", bucket=True)  # the bucket: all other tokens together
        return loss.with_teacher(hidden, student, target, teacher, top_k)[0]
    return student.read(hidden, KL(Teacher(teacher, target), "reverse")).mean()


def from_logits(student: LmHead, hidden: Tensor, teacher: LmHead, target: Tensor, top_k: int) -> Tensor:
    """Return the same mean, computed from whole logits."""
    q, p = (hidden @ student.weight.T).log_softmax(-1), (target @ teacher.weight.T).log_softmax(-1)
    if top_k:
        ids = p.topk(top_k).indices
        others = [x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for x in (q, p)]
        q, p = (torch.cat([x.gather(-1, ids), other], -1) for x, other in zip((q, p), others, strict=True))
    return (q.exp() * (q - p)).sum(-1).mean()


def train(steps: int, top_k: int) -> tuple[list[float], list[LmHead | Tensor]]:
    """Train the student; return the loss of each step, and `roll_out` after the last."""
    torch.manual_seed(0)
    teacher, student = new_model(64, 2, spread=0.2).requires_grad_(False), new_model(32, 1, spread=0.02)
    teacher.model.embed_tokens.weight += 1  # some tokens become likely everywhere, which is learned in a few steps
    prompts, optimizer = torch.randint(V, (B, P)), torch.optim.Adam(student.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        loss = from_hidden_states(*roll_out(student, teacher, prompts), top_k)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, roll_out(student, teacher, prompts)


def gradients(loss, student: LmHead, hidden: Tensor, *others) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(student, hidden, *others), [hidden, student.weight])


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: the whole vocabulary")
    args = parser.parse_args()
    if args.steps < 1 or not 0 <= args.top_k < V:
        parser.error(f"--steps is {args.steps}, --top-k {args.top_k}: at least 1 step, and K from 0 to {V - 1}")
    losses, batch = train(args.steps, args.top_k)
    print("reverse KL of each step:", *(f"{loss:.3f}" for loss in losses))
    for way in (from_hidden_states, from_logits):
        peak = peak_mib(lambda way=way: gradients(way, *batch, args.top_k), torch.device("cpu"))
        print(f"{way.__name__}: reverse KL {way(*batch, args.top_k):.5f}, peak of forward and backward {peak:.1f} MiB")


if __name__ == "__main__":
    main()
