"""Packed documents: every one alone in one process is what all of them in one pack must give.

Of random packs: `tests.fuzz.model_utils`.
"""

import pytest
import torch

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import from_parallel_logits_to_logprobs_packed_sequences
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.targets import PackedTargets
from tests.devices import GPU
from tests.model_utils.sharded import Grid, grids, grids_with_context, problem
from tests.operators import Operators
from tests.ranks import ranks

LENGTHS = [3, 0, 8, 1, 4, 5]  # of the documents; each padded to a multiple of 2W
LONGEST = 8


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pack(grid: Grid):
    """Logits `[1, T, V]`, tokens `[1, T]` and places with padding."""
    multiple = 2 * grid.cp if grid.cp > 1 else 1
    padded = [-(-n // multiple) * multiple for n in LENGTHS]
    return *problem(batch=1, length=sum(padded)), padded


def call(grid: Grid, mine, tokens, padded, longest=LONGEST, **more):
    groups = {"group": grid.tp_group, "cp_group": grid.cp_group}
    return from_parallel_logits_to_logprobs_packed_sequences(
        mine, tokens, cumulative(padded), longest, **grid.vocab(24), **groups, **more
    )


@ranks(1, 2)
def test_empty_packs():
    for grid in grids():
        for lengths in ([], [0, 0]):
            logits, tokens = torch.zeros(1, 0, 24).requires_grad_(), torch.zeros(1, 0, dtype=torch.int64)
            found = call(grid, grid.columns(logits), tokens, lengths, 4)
            assert found.shape == (len(lengths), 3)
            assert not found.any()


def test_documents_that_do_not_fit_are_errors():
    logits, tokens = problem(batch=1, length=8)

    def call(*lengths, unpacked_seqlen=8, logits=logits, tokens=tokens, **more):
        cu_seqlens = cumulative(lengths)
        return from_parallel_logits_to_logprobs_packed_sequences(
            logits, tokens, cu_seqlens, unpacked_seqlen, 0, 24, None, **more
        )

    for wrong, said in (
        (lambda: call(5, 2), "must go from 0 to 8"),
        (lambda: call(9, -1), "never fall"),
        (lambda: call(8, tokens=tokens[:, 1:]), r"target has shape \(1, 7\).* must be \[1, 8\]"),
        (lambda: call(8, tokens=tokens[0]), "target is .* token ids"),
        (lambda: call(8, unpacked_seqlen=0), "unpacked_seqlen is 0"),
        (lambda: call(8, logits=logits.expand(2, -1, -1)), "a pack must be"),
        (lambda: call(5, 3, cu_seqlens=cumulative([6, 2])), "fit the places"),
        (lambda: call(5, 3, cu_seqlens=cumulative([8])), "one entry per document"),
        (lambda: call(5, 3, cu_seqlens=cumulative([5, 2]), unpacked_seqlen=4), r"from 0 to unpacked_seqlen \(4\)"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    assert call(5, 3, cu_seqlens=cumulative([4, 3]), unpacked_seqlen=4).shape == (2, 3)


@ranks(2)
def test_lengths_that_the_ranks_cannot_share_are_errors():
    grid = next(g for g in grids() if g.cp == 2)
    logits, tokens = problem(batch=1, length=4)
    with count_collectives() as sent, pytest.raises(ValueError, match="divide by 4"):
        from_parallel_logits_to_logprobs_packed_sequences(
            logits, tokens.repeat(1, 2), cumulative([6, 2]), 3, 0, 24, None, cp_group=grid.cp_group
        )
    assert not sent


@ranks(2, 4)
@pytest.mark.parametrize("rolled", [False, True], ids=["whole", "each its own"])
def test_an_id_that_only_one_context_parallel_rank_holds(rolled):
    """Labels split before show the id to one rank alone: the others learn of it where results are joined."""
    for grid in grids_with_context():
        logits, tokens, padded = pack(grid)
        parts = SequenceParts(grid.cp_group, cumulative(padded))
        own = grid.columns(parts.split(logits, 1))
        for bad in (-5, 24):
            wrong = tokens.clone()
            wrong[0, 0 if rolled else 1] = bad  # of the first rank's part; an unshifted first token is no label
            mine = parts.split(wrong, 1) if rolled else wrong
            with pytest.raises(ValueError, match=r"outside \[0, 24\)|another rank of cp_group refused") as error:
                call(grid, own, mine, padded, target_is_pre_rolled=rolled)
            if rolled:
                assert ("another rank of cp_group" in str(error.value)) == bool(grid.cp_rank)
        call(grid, own, tokens, padded)  # every rank is still here


@ranks(2, 4)
@pytest.mark.parametrize("rolled", [False, True], ids=["whole", "each its own"])
def test_logits_that_are_too_short_on_one_context_parallel_rank(rolled):
    for grid in grids_with_context():
        logits, tokens, padded = pack(grid)
        parts = SequenceParts(grid.cp_group, cumulative(padded))
        mine = grid.columns(parts.split(logits, 1))
        mine, said = (
            (mine[:, :-1], "a pack must be") if grid.cp_rank == 1 else (mine, "another rank of cp_group refused")
        )
        with pytest.raises(ValueError, match=said):
            call(grid, mine, parts.split(tokens, 1) if rolled else tokens, padded, target_is_pre_rolled=rolled)


@pytest.mark.gpu
@pytest.mark.rehearsed
def test_on_a_gpu_nothing_waits():
    tokens, cu_seqlens = torch.arange(8, device=GPU)[None], cumulative([5, 3]).to(GPU)
    logits = torch.randn(1, 8, 24, device=GPU, requires_grad=True)
    call = (logits, tokens, cu_seqlens, 6, 0, 24, None)
    expected = from_parallel_logits_to_logprobs_packed_sequences(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = from_parallel_logits_to_logprobs_packed_sequences(*call)
        found.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, expected)


def test_time_does_not_depend_on_the_number_of_documents():
    counts = []
    for documents in (2, 100):
        tokens = torch.arange(400)[None]
        with Operators() as operators:
            lengths = [400 // documents] * documents
            targets = PackedTargets(tokens, torch.Size((1, 400)), None, cumulative(lengths), 400)
            targets.results(targets.labels().double())
        counts.append(len(operators.seen))
    assert counts[0] == counts[1]
