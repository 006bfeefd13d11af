"""Losses of a model's own that read fewer tokens than there are labels, on ranks that share the vocabulary: what ranks
send does not depend on it, so that a change which one rank alone sees is told in a message of the usual size."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.dtensor import use_fused_loss
from tests.dtensor.models import batch, check_step, loss_and_gradients, make, meshes, parallelize
from tests.dtensor.test_decisions_of_ranks import _CHANGED, CHANGES
from tests.marks import slow
from tests.ranks import ranks


def shifted(logits, labels, vocab_size, **others):
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size).float(), labels[:, 1:].reshape(-1))


def chosen_by_a_mask(logits, labels, vocab_size, **others):
    counts = labels[:, 1:] != -100
    return F.cross_entropy(logits[:, :-1][counts].float(), labels[:, 1:][counts])


def of_the_last(logits, labels, vocab_size, **others):
    losses = F.cross_entropy(logits[:, -4:].flatten(0, 1), labels[:, -4:].flatten(), reduction="none")
    return losses[1:].square().mean()


def smoothed(logits, labels, vocab_size, **others):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def by_a_list(logits, labels, vocab_size, **others):
    row, column = torch.nonzero(labels[:, 1:] != -100, as_tuple=True)
    return F.cross_entropy(logits[row, column].float(), labels[row, column + 1])


def by_a_list_with_repeats(logits, labels, vocab_size, **others):
    row, column = torch.nonzero(labels[:, 1:] != -100, as_tuple=True)
    row, column = torch.cat([row, row[:3]]), torch.cat([column, column[:3]])
    targets = labels[row, column + 1].clone()
    targets[-3:] = torch.tensor([-100, 7, 7])
    mean = F.cross_entropy(logits[row, column].float(), targets)
    return mean + F.cross_entropy(logits[row, column].float(), targets, reduction="none").square().sum()


def of_some_labels(logits, labels, vocab_size, **others):
    labels = labels.clone()
    labels[:, ::3] = -100
    return F.cross_entropy(logits.float().view(-1, vocab_size), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten())


@pytest.mark.parametrize(
    "loss, options",
    [
        *((loss, "") for loss in (shifted, chosen_by_a_mask, smoothed)),
        *((of_the_last, "skip"), (by_a_list_with_repeats, "slices"), (of_some_labels, "slices, skip")),
        *slow((of_the_last, ""), (by_a_list, ""), (by_a_list_with_repeats, "")),
        *slow((shifted, "slices"), (by_a_list, "skip"), (by_a_list, "slices, skip")),
    ],
)
@ranks(2)
def test_losses_of_fewer_tokens_and_a_change_on_one_rank(loss, options):
    given, plain = batch(2, 10), make("llama")
    model = parallelize(make("llama"), *meshes(tp=2), sequence_parallel="slices" in options)
    use_fused_loss(model, skip_ignored="skip" in options)
    plain.loss_function = model.loss_function = loss
    expected, true = loss_and_gradients(plain, **given)
    for seen in (0, 1, 1):  # the first change is one of all ranks
        model.config.tokens_seen = seen
        check_step(model, model(**given).loss, expected, true)
    if dist.get_rank() == 1:
        CHANGES["logits"](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=_CHANGED):
            model(**given)
