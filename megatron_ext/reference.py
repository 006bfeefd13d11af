"""Unsharded, unfused reference functions of a few lines each, with which tests and benchmarks compare.

They run in one process on the whole vocabulary, by plain autograd, and are written to be read, not to be fast. Tensors
keep their dtype, so that float64 inputs give a float64 reference.

Legend: T tokens, D hidden size, V vocabulary. Leading dims of hidden states, logits and labels may be anything.
Attention: S queries, T keys, B batch, H heads of queries and G of keys, D channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, temperature: float = 1.0
) -> Tensor:
    """Compute the lm head's logits `[..., V]`: capped by the softcap, then divided by the temperature."""
    z = F.linear(hidden, weight, bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def counted(z: Tensor, vocab_size: int | None = None) -> Tensor:
    """Set the columns of `z` past the true vocabulary to -inf: they get no probability and no gradient."""
    if vocab_size is None or vocab_size == z.shape[-1]:
        return z
    return z.masked_fill(torch.arange(z.shape[-1], device=z.device) >= vocab_size, -torch.inf)


def log_probs(z: Tensor, labels: Tensor, vocab_size: int | None = None, ignore_index: int = -100) -> Tensor:
    """Log-probability of each label under `z`; 0 where the label is `ignore_index`."""
    kept = labels != ignore_index
    safe = labels.where(kept, 0).unsqueeze(-1)
    picked = torch.log_softmax(counted(z, vocab_size), dim=-1).gather(-1, safe).squeeze(-1)
    return picked.where(kept, 0.0)


def entropy(z: Tensor, vocab_size: int | None = None) -> Tensor:
    """-sum p log p of each token, over the columns with any probability."""
    log_p = torch.log_softmax(counted(z, vocab_size), dim=-1)
    finite = log_p > -torch.inf
    return -(log_p.exp() * log_p.where(finite, 0.0)).sum(-1)


def cross_entropy(
    z: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Per-token loss `(1 - e) nll - e mean_log_prob + z_loss * lse^2`; 0 where the label is `ignore_index`.

    `mean_log_prob` runs over the columns that count: below the true vocabulary size and not -inf (PyTorch's
    definition of label smoothing, with masked columns left out).
    """
    z = counted(z, vocab_size)
    lse = torch.logsumexp(z, dim=-1)
    loss = -(1 - label_smoothing) * log_probs(z, labels, None, ignore_index) + z_loss * lse.square()
    if label_smoothing:
        finite = z > -torch.inf
        mean_log_prob = (z.where(finite, 0.0).sum(-1) / finite.sum(-1)) - lse
        loss = loss - label_smoothing * mean_log_prob
    return loss.where(labels != ignore_index, 0.0)


def kept(z: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Return which columns sampling keeps, bool in the shape of `z`: the k largest logits (None or -1: all), and of
    these each column whose larger columns together have a probability below p.

    Columns equal to one that is kept are kept too; columns at -inf are not.
    """
    if top_k not in (None, -1):
        kth = z.topk(min(top_k, z.shape[-1]), -1).values[..., -1:]
        z = z.masked_fill(z < kth, -torch.inf)
    falling = z.sort(-1, descending=True).values
    before = F.pad(falling.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
    last = falling.where(before < top_p, torch.inf).amin(-1, keepdim=True)
    return (z >= last) & (z > -torch.inf)


def sampled_log_probs(
    z: Tensor,
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of each label among the columns of `kept`; -inf for any other label, 0 for `ignore_index`."""
    z = counted(z, vocab_size)
    return log_probs(z.masked_fill(~kept(z.detach(), top_k, top_p), -torch.inf), labels, None, ignore_index)


def soft_cross_entropy(student: Tensor, teacher: Tensor, vocab_size: int | None = None) -> Tensor:
    """`-sum p log q` of each token, p the teacher's distribution and q the student's, both from logits."""
    log_p, log_q = (torch.log_softmax(counted(z, vocab_size), dim=-1) for z in (teacher, student))
    return -(log_p.exp() * log_q.where(log_p > -torch.inf, 0.0)).sum(-1)


def kl_divergence(from_: Tensor, to: Tensor, vocab_size: int | None = None) -> Tensor:
    """`sum p (log p - log q)` of each token, p of the logits `from_`, q of the logits `to`."""
    return soft_cross_entropy(to, from_, vocab_size) - soft_cross_entropy(from_, from_, vocab_size)


def attention(q_SBHD: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """Compute softmax(scale * q k^T) v, `[S, B, H, D]`, over the keys where `visible` is True.

    `visible`: bool, broadcastable to `[B, H, S, T]`. A query that sees no key gets zeros. `scale` None: 1 / sqrt(D).
    Query head h reads the keys of head h // (H / G).
    """
    k, v = (x.repeat_interleave(q_SBHD.shape[2] // x.shape[2], 2) for x in (k_TBGD, v_TBGD))
    scale = q_SBHD.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("sbhd,tbhd->bhst", q_SBHD, k)
    hidden = ~visible.expand_as(scores)
    some = visible.expand_as(scores).any(-1, keepdim=True)
    probs = scores.masked_fill(hidden & some, -torch.inf).softmax(-1) * some
    return torch.einsum("bhst,tbhd->sbhd", probs, v)
