"""Packed documents: every one alone in one process is what all of them in one pack must give."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.meter import one_rank_of
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    TrainingSamplingParams,
    from_parallel_logits_to_logprobs_packed_sequences,
)
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.targets import PackedTargets
from tests.devices import GPU
from tests.model_utils.sharded import Grid, gradient, grids, grids_with_context, next_log_probs, problem, same
from tests.operators import Operators
from tests.ranks import ranks

LENGTHS = [3, 0, 8, 1, 4, 5]  # of the documents; each padded to a multiple of 2W
LONGEST = 8
SOFTER = TrainingSamplingParams(temperature=0.7)  # the caller's part: the logits are divided by it already


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def places(multiple: int) -> list[int]:
    return [-(-n // multiple) * multiple for n in LENGTHS]


def pack(grid: Grid, dtype=torch.float64):
    """Logits `[1, T, V]`, tokens `[1, T]` and places with padding."""
    padded = places(2 * grid.cp if grid.cp > 1 else 1)
    return *problem(batch=1, length=sum(padded), dtype=dtype), padded


def rows(z: torch.Tensor, tokens: torch.Tensor, padded: list[int], lengths: list[int], temperature=1.0):
    """`[documents, LONGEST - 1]`: each document by itself, with zeros behind."""
    found = []
    for start, length in zip(cumulative(padded).tolist(), lengths, strict=False):
        here = slice(start, start + length)
        row = next_log_probs(z[:, here], tokens[:, here], temperature)[0]
        found.append(F.pad(row, (0, LONGEST))[: LONGEST - 1])
    return torch.stack(found)


def ours(grid: Grid, logits, tokens, padded, **more):
    parts = SequenceParts(grid.cp_group, cumulative(padded))
    leaf = grid.columns(parts.split(logits, 1)).clone().requires_grad_()
    with count_collectives() as forward:
        found = from_parallel_logits_to_logprobs_packed_sequences(
            leaf,
            tokens,
            cumulative(padded),
            LONGEST,
            **grid.vocab(logits.shape[-1]),
            group=grid.tp_group,
            cp_group=grid.cp_group,
            **more,
        )
    mine, whole = grid.weights(found.shape)
    with count_collectives() as backward:
        grad = gradient(found, leaf, mine)
    cp = int(grid.cp > 1)
    assert (forward.total(), backward.total()) == (int(grid.tp > 1) + cp, cp), (forward, backward)
    return found.detach(), grad, whole, parts


def check(grid: Grid, logits, tokens, padded, lengths, target=None, **more):
    """Values and gradients of a pack of whole logits and tokens, which are the target where none is given."""
    found, grad, weights, parts = ours(grid, logits, tokens if target is None else target, padded, **more)
    leaf = logits.clone().requires_grad_()
    wanted = rows(leaf, tokens, padded, lengths)
    same(found, wanted.detach())
    same(grad, grid.columns(parts.split(gradient(wanted, leaf, weights), 1)))


@ranks(1, 2, 4)
@pytest.mark.parametrize("known", [False, True], ids=["padding counts", "lengths known"])
def test_values_and_gradients(known):
    for grid in grids():
        logits, tokens, padded = pack(grid)
        more = {"cu_seqlens": cumulative(LENGTHS)} if known else {}
        for sampling in (None, SOFTER):
            check(grid, logits, tokens, padded, LENGTHS if known else padded, sampling_params=sampling, **more)


@ranks(1, 2, 4)
@pytest.mark.parametrize("rolled", [False, True], ids=["whole", "shifted before"])
def test_a_last_document_that_is_extended_to_the_length_of_the_pack(rolled):
    """As pipelines and FP8 have it; what is behind its row's end is padding."""
    for grid in grids():
        padded = [8, 16 + 8 * grid.cp]
        logits, tokens = problem(batch=1, length=sum(padded))
        tokens[:, 8 + LONGEST :] = 0
        target = tokens
        if rolled:
            target = torch.cat([document.roll(-1, 1) for document in tokens.split(padded, 1)], 1)
            target = SequenceParts(grid.cp_group, cumulative(padded)).split(target, 1)
        check(grid, logits, tokens, padded, padded, target, target_is_pre_rolled=rolled)


@ranks(1, 2)
def test_targets_that_were_shifted_before():
    for grid in grids():
        logits, tokens, padded = pack(grid)
        cu_seqlens = cumulative(padded)
        rolled = torch.cat([document.roll(-1, 1) for document in tokens.split(padded, 1)], 1)
        mine = SequenceParts(grid.cp_group, cu_seqlens).split(rolled, 1)
        found, grad, *_ = ours(grid, logits, mine, padded, target_is_pre_rolled=True)
        expected, expected_grad, *_ = ours(grid, logits, tokens, padded)
        same(found, expected)
        same(grad, expected_grad)


@ranks(1, 2)
def test_empty_packs():
    for grid in grids():
        for lengths in ([], [0, 0]):
            logits, tokens = torch.zeros(1, 0, 24).requires_grad_(), torch.zeros(1, 0, dtype=torch.int64)
            groups = {"group": grid.tp_group, "cp_group": grid.cp_group}
            found = from_parallel_logits_to_logprobs_packed_sequences(
                grid.columns(logits), tokens, cumulative(lengths), 4, **grid.vocab(24), **groups
            )
            assert found.shape == (len(lengths), 3)
            assert not found.any()


@ranks(1, 2)
def test_documents_padded_to_64_whose_rows_are_shorter():
    """As FP8 and sequence parallelism pad them, with rows of the longest document and no lengths without padding."""
    for grid in grids():
        logits, tokens = problem(batch=1, length=3 * 64)
        padded, lengths = [64, 64, 64], [5, 8, 3]
        check(grid, logits, tokens, padded, padded)
        told, *_ = ours(grid, logits, tokens, padded, cu_seqlens=cumulative(lengths))
        same(told, rows(logits, tokens, padded, lengths))


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
    """Of labels split before, one rank alone sees it: the others learn of it where results are joined."""
    for grid in grids_with_context():
        logits, tokens, padded = pack(grid)
        parts = SequenceParts(grid.cp_group, cumulative(padded))
        for bad in (-5, 24):
            wrong = tokens.clone()
            wrong[0, 0 if rolled else 1] = bad  # of the first rank's part; an unshifted first token is no label
            mine = parts.split(wrong, 1) if rolled else wrong
            with pytest.raises(ValueError, match=r"outside \[0, 24\)|another rank of cp_group refused") as error:
                ours(grid, logits, mine, padded, target_is_pre_rolled=rolled)
            if rolled:
                assert ("another rank of cp_group" in str(error.value)) == bool(grid.cp_rank)
        ours(grid, logits, tokens, padded)  # every rank is still here


@ranks(2, 4)
@pytest.mark.parametrize("rolled", [False, True], ids=["whole", "each its own"])
def test_logits_that_are_too_short_on_one_context_parallel_rank(rolled):
    for grid in grids_with_context():
        logits, tokens, padded = pack(grid)
        cuts = cumulative(padded)
        parts = SequenceParts(grid.cp_group, cuts)
        mine = grid.columns(parts.split(logits, 1))
        mine, said = (
            (mine[:, :-1], "a pack must be") if grid.cp_rank == 1 else (mine, "another rank of cp_group refused")
        )
        with pytest.raises(ValueError, match=said):
            from_parallel_logits_to_logprobs_packed_sequences(
                mine,
                parts.split(tokens, 1) if rolled else tokens,
                cuts,
                LONGEST,
                **grid.vocab(24),
                group=grid.tp_group,
                cp_group=grid.cp_group,
                target_is_pre_rolled=rolled,
            )


@ranks(1, 2, 4)
def test_padding_beyond_the_rows():
    """Sequence parallelism pads a document of 5 further than to 5; the row has no room for it and needs none."""
    for grid in grids():
        multiple = grid.tp * (2 * grid.cp if grid.cp > 1 else 1)
        room = -(-5 // multiple) * multiple
        logits, tokens = problem(batch=1, length=room + multiple)

        def call(*padded, logits=logits, tokens=tokens, grid=grid, **more):
            mine = grid.columns(SequenceParts(grid.cp_group, cumulative(padded)).split(logits, 1))
            groups = {"group": grid.tp_group, "cp_group": grid.cp_group}
            return from_parallel_logits_to_logprobs_packed_sequences(
                mine, tokens, cumulative(padded), 5, **grid.vocab(24), **groups, **more
            )

        row = next_log_probs(logits[:, :room], tokens[:, :room])[0, :4]
        same(call(room, multiple)[0], row)
        same(call(room, multiple, cu_seqlens=cumulative([5, 1]))[0], row)
        same(call(room + multiple, cu_seqlens=cumulative([5]))[0], row)
        same(call(room + multiple)[0], row)  # the last one may reach to the end of the pack
        same(call(room + multiple, 0)[0], row)  # and any other one


@pytest.mark.slow
@ranks(2, rules="gloo")  # its group takes fake tensors
def test_nothing_waits_for_the_device():
    """On fake tensors whoever reads a value fails: cu_seqlens may lie on a GPU."""
    grid = next(g for g in grids() if g.cp == 2)
    with one_rank_of(1):  # fake tensors; the group is a real one
        logits = torch.empty(1, 8, 24, dtype=torch.bfloat16, requires_grad=True)
        tokens, cu_seqlens = torch.zeros(1, 16, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
        for more in ({}, {"cu_seqlens": cu_seqlens.clone()}):
            found = from_parallel_logits_to_logprobs_packed_sequences(
                logits, tokens, cu_seqlens, 8, 0, 24, None, cp_group=grid.cp_group, **more
            )
            assert found.shape == (3, 7)
            found.sum().backward()
            assert logits.grad.shape == logits.shape


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
    """As many operations for 100 documents as for 2: there is no loop over them."""
    counts = []
    for documents in (2, 100):
        tokens = torch.arange(400)[None]
        with Operators() as operators:
            lengths = [400 // documents] * documents
            targets = PackedTargets(tokens, torch.Size((1, 400)), None, cumulative(lengths), 400)
            targets.results(targets.labels().double())
        counts.append(len(operators.seen))
    assert counts[0] == counts[1]
