"""Rows of tokens with all that losses read.

Legend: B rows, S positions, D hidden size, V vocabulary.
"""

import torch

from megatron_ext import reference
from tests.fuzz.losses import Rows

B, S, D, V = 4, 6, 5, 23
TEMPERATURE = 0.7


def drawn(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head():
    return drawn(B, S, D), drawn(V, D, seed=1)


def rows():
    """Labels, a mask, and the log-probabilities of other policies; some tokens and labels do not count."""
    generator = torch.Generator().manual_seed(2)
    labels_BS = torch.randint(V, (B, S), generator=generator)
    labels_BS[0, -2:] = -100
    mask_BS = (torch.rand(B, S, generator=generator) < 0.8).double()
    own_BS = reference.log_probs(reference.logits(*head(), temperature=TEMPERATURE), labels_BS)
    names = ("old_log_probs", "reference_log_probs", "sampling_log_probs")
    others = {name: own_BS + drawn(B, S, scale=0.5, seed=seed) for seed, name in enumerate(names, 3)}
    return Rows(labels_BS, mask_BS, others, drawn(B, S, seed=7))
