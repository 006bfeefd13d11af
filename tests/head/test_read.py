"""Random heads, random sets of read-outs, layouts and ranks: values, gradients, and how many collectives a call takes.

The cases are those of `tests/fuzz/heads.py`, which has the truth in fp64.
"""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head import LmHead, Logits, ReadOut
from megatron_ext.head.call.logit_gradient import Basis
from tests.fuzz import drawn_read_outs, heads
from tests.fuzz.case import check, whole
from tests.fuzz.draw import Draw
from tests.ranks import ranks

# These exchange more than the statistics of one pass forward.
SEND_MORE = {"sampled", "JS", "total variation", "acceptance"}


def check_read(kind, number, names=None):
    """A case of `heads.read` or `heads.read_logits`, some of whose results no loss takes.

    One collective forward and one backward, none backward of logits; with the sequence layout twice as many, and one
    for all A of LoRA. `names`: of the read-outs; None: drawn too.
    """
    draw = Draw(1, number, dist.get_world_size())
    with mock.patch.object(drawn_read_outs, "names", return_value=names) if names else nullcontext():
        case = kind(draw)
    names = names or draw.record["read-outs"]
    graded = [g is not None and draw.chance(0.75) for g in case.upstream]
    # Where no token counts all ranks know it, and may send nothing.
    silent = draw.record.get("counts") is not None or 0 in draw.record["tokens"]
    sent = 0 if draw.ranks == 1 else 2 if draw.record.get("layout") == "sequence" else 1

    def ours(mine, rank):
        with count_collectives() as forward:
            found = case.ours(mine, rank)
        some_more = forward.total() > sent > 0 and SEND_MORE & {*names}
        assert forward.total() == sent or some_more or (silent and not forward), forward
        counts.clear()
        return [x if takes else x.detach() for x, takes in zip(found, graded, strict=True)]

    upstream = [g if takes else None for g, takes in zip(case.upstream, graded, strict=True)]
    with count_collectives() as counts:
        check(replace(case, ours=ours, upstream=upstream), dist.get_rank())
    if case.refused is not None:
        return
    if kind is heads.read_logits or not any(graded):
        assert not counts
        return
    fixed_bits = draw.record["mode"] or draw.record.get("bits") == "batch"
    most = sent + (sent == 2 and any(cut is whole for _, cut in case.inputs)) + (sent > 0 and fixed_bits)
    least = 0 if fixed_bits or silent or not case.wanted[0] else most
    if sent == 2 and not case.wanted[1] and not draw.record["lora"]:
        least -= 1  # where the logits are kept nothing needs the other ranks' hidden states
    assert least <= counts.total() <= most, counts


def run(numbers):
    for number in numbers:
        for kind in (heads.read, heads.read_logits):
            try:
                check_read(kind, number)
            except Exception as fault:
                fault.add_note(f"{kind.__name__} of case {number}, {dist.get_world_size()} ranks")
                raise


@ranks(1, 2, 4)
def test_a_hundred():
    run(range(20))


@pytest.mark.slow
@ranks(1, 2, 3, 4)
def test_thousands():
    run([*range(20, 100), *range(1000, 1200)])


class OfAnyNumber(ReadOut):
    """The log-probability of a label that may be none, and is then that of nothing."""

    reads_labels = True

    def __init__(self, labels):
        self.labels = labels

    def check(self, size, vocab, group):
        return None

    def flatten(self, flat):
        self.labels_T = flat(self.labels)

    def results(self, stats, stats_RKT, own_KT):
        return [(stats.target - stats.log_sum).to(own_KT.dtype)], []

    def basis(self, stats, saved, grad):
        return Basis(log_prob=grad)


def test_labels_that_a_read_out_does_not_check():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.tensor([3, -1, 19, -100])
    there, logits = labels >= 0, hidden @ weight.T
    want = logits.log_softmax(-1)[there].gather(1, labels[there, None])[:, 0]
    grads = torch.autograd.grad(want.sum(), (hidden, weight), retain_graph=True)
    for found in (LmHead(weight).read(hidden, OfAnyNumber(labels)), Logits(logits).read(OfAnyNumber(labels))):
        torch.testing.assert_close(found[there], want)
        assert (found[~there] == -torch.inf).all()
        torch.testing.assert_close(torch.autograd.grad(found[there].sum(), (hidden, weight), retain_graph=True), grads)
