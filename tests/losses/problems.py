"""Rows of tokens with all that losses read, drawn alike on every rank, and a loss's value and gradients beside a truth.

Legend: B rows, S positions, D hidden size, V vocabulary.
"""

import torch
import torch.distributed as dist

from megatron_ext import VocabShard, reference
from megatron_ext.distributed.groups import group_size
from tests.fuzz.losses import Rows

B, S, D, V = 4, 6, 5, 23
TEMPERATURE = 0.7


def drawn(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head(seed=0):
    """Hidden states `[B, S, D]` and weight `[V, D]`."""
    return drawn(B, S, D, seed=seed), drawn(V, D, seed=seed + 1)


def rows(advantages=None):
    """Labels, a mask, and the log-probabilities of other policies; some tokens and labels do not count."""
    generator = torch.Generator().manual_seed(2)
    labels_BS = torch.randint(V, (B, S), generator=generator)
    labels_BS[0, -2:] = -100
    mask_BS = (torch.rand(B, S, generator=generator) < 0.8).double()
    own_BS = reference.log_probs(reference.logits(*head(), temperature=TEMPERATURE), labels_BS)
    names = ("old_log_probs", "reference_log_probs", "sampling_log_probs")
    others = {name: own_BS + drawn(B, S, scale=0.5, seed=seed) for seed, name in enumerate(names, 3)}
    return Rows(labels_BS, mask_BS, others, advantages)


def check_rows(loss, truth, *per_row, mask=None, **per_token):
    """`loss` from hidden states and from log-probabilities, in both layouts, against `truth(log_probs_BS)`.

    `loss`: makes the loss of its options. `per_row` and `per_token` are what it takes beside labels and mask.
    """
    group = dist.group.WORLD
    ranks, rank = group_size(group), dist.get_rank()
    labels_BS = rows().labels
    leaves = [x.requires_grad_() for x in head()]
    true_BS = reference.log_probs(reference.logits(*leaves, temperature=TEMPERATURE), labels_BS)
    want = truth(true_BS)
    want_grads = torch.autograd.grad(want, [*leaves, true_BS])
    assert all(x.abs().max() > 1e-3 for x in want_grads)
    shard = VocabShard.split(V, group)
    own = slice(shard.start, shard.stop)
    for sequence in (False, True):

        def laid(x, sequence=sequence):
            return x.t() if sequence and isinstance(x, torch.Tensor) and x.dim() == 2 else x

        x, w = (x.detach() for x in leaves)
        part = slice(rank * S // ranks, (rank + 1) * S // ranks)
        mine = [(x.transpose(0, 1)[part] if sequence else x).clone().requires_grad_(), w[own].clone().requires_grad_()]
        made = loss(
            tp_group=group,
            vocab=shard,
            temperature=TEMPERATURE,
            hidden_layout="sequence" if sequence else "replicated",
            sequence_first=sequence,
        )
        given = {name: laid(value) for name, value in per_token.items()}
        found, metrics = made(*mine, laid(labels_BS), *map(laid, per_row), mask=laid(mask), **given)
        torch.testing.assert_close(found, want)
        assert not any(x.requires_grad for x in metrics.values())
        grads = torch.autograd.grad(found, mine)
        dx = want_grads[0].transpose(0, 1)[part] if sequence else want_grads[0]
        torch.testing.assert_close(list(grads), [dx, want_grads[1][own]])
        log_probs = laid(true_BS.detach()).clone().requires_grad_()
        kept = labels_BS != -100 if mask is None else (labels_BS != -100) * mask
        found, _ = made.from_log_probs(log_probs, *map(laid, per_row), mask=laid(kept), **given)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, log_probs)[0], laid(want_grads[2]))
