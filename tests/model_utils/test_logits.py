"""Log-probabilities of next tokens from logits, at every arrangement of ranks, against one process.

`tests.fuzz.model_utils` adds random problems, with filters, tokens that do not count and padding.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    TrainingSamplingParams,
    from_parallel_logits_to_logprobs,
    get_next_token_logprobs_from_logits,
)
from tests.model_utils.sharded import Grid, gradient, grids, grids_with_context, next_log_probs, problem, same
from tests.ranks import ranks

SOFTER = TrainingSamplingParams(temperature=0.7)  # the caller's part: the logits are divided by it already


def call(grid: Grid, logits, tokens, vocabulary=24, **more):
    arguments = grid.vocab(vocabulary) | grid.groups | more
    return from_parallel_logits_to_logprobs(logits, tokens, **arguments)


def ours(grid: Grid, logits, tokens, **more):
    """The result, and the gradient of this rank's loss and that of the others, of what this rank holds."""
    leaf = grid.own(logits).clone().requires_grad_()
    with count_collectives() as forward:
        found = call(grid, leaf, tokens, vocabulary=logits.shape[-1], **more)
    mine, _ = grid.weights(found.shape)
    with count_collectives() as backward:
        grad = gradient(found, leaf, mine)
    if tokens.numel():
        cp = int(grid.cp > 1)
        assert (forward.total(), backward.total()) == (int(grid.tp > 1) + cp, cp), (forward, backward)
    return found.detach(), grad


def check(grid: Grid, logits, tokens, truth, **more):
    leaf = logits.clone().requires_grad_()
    wanted = truth(leaf)
    found, grad = ours(grid, logits, tokens, **more)
    same(found, wanted.detach())
    _, whole = grid.weights(found.shape)
    expected = torch.zeros_like(grid.padded(logits))
    expected[:, : logits.shape[1]] = gradient(wanted, leaf, whole)
    same(grad, grid.columns(grid.part(expected)))


@pytest.mark.slow
@ranks(8)
def test_tp4_cp2():
    logits, tokens = problem(length=7)
    for grid in grids():
        check(grid, logits, tokens, lambda z: next_log_probs(z, tokens))


@ranks(1, 2)
def test_no_sequence_no_position():
    for shape in ((0, 4, 8), (2, 0, 8)):
        for grid in grids():
            logits, tokens = torch.randn(shape), torch.zeros(shape[:2], dtype=torch.int64)
            found, grad = ours(grid, logits.double(), tokens)
            assert found.shape == (shape[0], max(shape[1] - 1, 0))
            assert grad.shape == grid.columns(grid.part(logits)).shape


@ranks(1, 2)
def test_masked_columns_have_no_probability():
    logits, tokens = problem()
    logits[..., 5] = -torch.inf
    tokens[tokens == 5] = 6
    for grid in grids():
        check(grid, logits, tokens, lambda z: next_log_probs(z, tokens))


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_worse_than_plain_pytorch(dtype):
    logits, tokens = problem(batch=4, length=64, vocabulary=512, dtype=dtype)
    truth = next_log_probs(logits.double(), tokens)
    plain = (next_log_probs(logits, tokens).double() - truth).norm()
    for grid in grids():
        found, grad = ours(grid, logits, tokens)
        assert found.dtype == torch.float32
        assert grad.dtype == dtype
        assert (found.double() - truth).norm() <= (1 if dtype == torch.float32 else 0.01) * plain


@ranks(1, 2)
def test_inference_keeps_nothing():
    logits, tokens = problem()
    for grid in grids():
        found = call(grid, grid.own(logits).clone().requires_grad_(), tokens, inference_only=True)
        assert not found.requires_grad
        same(found, next_log_probs(logits, tokens))


@ranks(1, 2)
def test_next_token_log_probs_of_any_logits():
    logits, tokens = problem()
    truth = next_log_probs(logits, tokens)
    same(get_next_token_logprobs_from_logits(tokens, logits), truth)
    same(get_next_token_logprobs_from_logits(tokens.int(), logits, chunk_size=2), truth)
    with pytest.raises(ValueError, match="vocab_parallel_rank is 1 and vocab_parallel_group None"):
        get_next_token_logprobs_from_logits(tokens, logits, vocab_parallel_rank=1)
    with pytest.raises(ValueError, match="input_ids is list"):
        get_next_token_logprobs_from_logits(tokens.tolist(), logits)
    for grid in grids():
        groups = {"vocab_parallel_group": grid.tp_group, "context_parallel_group": grid.cp_group}
        mine = grid.own(logits)
        for rank in (grid.tp_rank, None):
            same(get_next_token_logprobs_from_logits(tokens, mine, vocab_parallel_rank=rank, **groups), truth)
        softer = get_next_token_logprobs_from_logits(tokens, mine, sampling_params=SOFTER, **groups)
        same(softer, truth)


@ranks(2)
def test_whole_logits_stay_whole_where_megatron_is_set_up():
    """No group means whole logits, not Megatron's group: as NeMo-RL has it."""
    from tests.gpt import model_parallel

    logits, tokens = problem()
    with model_parallel(tp=2), count_collectives() as sent:
        same(get_next_token_logprobs_from_logits(tokens, logits), next_log_probs(logits, tokens))
    assert not sent


@ranks(1, 2)
def test_wrong_arguments_are_errors_on_every_rank():
    logits, tokens = problem(length=8)
    for grid in grids():
        mine = grid.own(logits)
        for wrong, said in (
            ({"tokens": tokens[0]}, "target is .* it must be token ids"),
            ({"tokens": tokens[:1]}, "target is .* batch size as of the logits"),
            ({"tokens": torch.cat([tokens, tokens], 1)}, "target has 16 positions, logits or hidden states 8"),
            ({"tokens": tokens.float()}, "target is torch.float32: it must be integer token ids"),
            ({"tokens": tokens - 24}, "outside .* token id of the vocabulary"),
            ({"tokens": tokens + 24}, "outside .* token id of the vocabulary"),
            ({"logits": mine[0]}, r"must be \[batch, sequence, vocabulary shard\]"),
            ({"chunk_size": 0}, "chunk_size is 0: .* positive number of sequence positions"),
            ({"sampling_params": TrainingSamplingParams(top_p=0.0)}, "top_p is 0.0"),
        ):
            with count_collectives() as sent, pytest.raises(ValueError, match=said):
                call(grid, **{"logits": mine, "tokens": tokens} | wrong)
            may_fit_elsewhere = grid.cp > 1 and said.startswith("target has")
            may_have_more_columns = grid.tp * grid.cp > 1 and said.startswith("outside")
            assert not sent or may_fit_elsewhere or may_have_more_columns
        same(call(grid, mine, tokens), next_log_probs(logits, tokens))  # every rank is still here


@ranks(2, 4)
@pytest.mark.parametrize("place", [1, 4, 7])
def test_an_id_that_only_one_context_parallel_rank_holds(place):
    """Other ranks see the id in the whole target, or learn of it where the ranks meet."""
    logits, tokens = problem(length=8)
    for grid in grids():
        mine = grid.own(logits)
        for bad in (-2, 24, 1000):
            wrong = tokens.clone()
            wrong[1, place] = bad
            said = f"outside \\[0, 24\\)|another rank of {'cp_group' if grid.cp > 1 else 'tp_group'} refused"
            with pytest.raises(ValueError, match=said):
                call(grid, mine, wrong)
        same(call(grid, mine, tokens), next_log_probs(logits, tokens))


@ranks(2, 4)
def test_ids_that_one_rank_alone_is_given():
    """Other ranks of a tensor- or context-parallel group are told in an exchange that they make anyway."""
    logits, tokens = problem(length=8)
    for grid in grids():
        mine, last = grid.own(logits), torch.distributed.get_world_size() - 1
        for shift in (-30, 24):
            own = torch.distributed.get_rank() == last
            said = r"labels holds .* outside \[0, 24\)" if own else "another rank of (tp|cp)_group refused"
            with pytest.raises(ValueError, match=said):
                call(grid, mine, tokens + shift if own else tokens)
        same(call(grid, mine, tokens), next_log_probs(logits, tokens))


@ranks(2, 4)
@pytest.mark.parametrize("sampling", [None, TrainingSamplingParams(top_p=0.9)], ids=["all", "top-p"])
def test_columns_that_only_one_context_parallel_rank_has_wrong(sampling):
    """The ranks that share its vocabulary learn of it from each other, the others where results are joined."""
    logits, tokens = problem(length=8)
    for grid in grids():
        vocab = {"vocab_start_index": 3, "vocab_end_index": 5} if dist.get_rank() == 1 else {}
        with pytest.raises(ValueError, match="vocab|refused"):
            call(grid, grid.own(logits), tokens, **vocab, sampling_params=sampling)
        same(call(grid, grid.own(logits), tokens), next_log_probs(logits, tokens))  # every rank is still here


@ranks(2, 4)
def test_logits_that_do_not_fit_on_one_context_parallel_rank():
    """Widths that make an id wrong, and other lengths: one rank refuses, and the others hear of it where they meet."""
    logits, tokens = problem(length=8)
    tokens[0, 1] = 23
    for grid in grids_with_context():
        good, odd = grid.own(logits), grid.cp_rank == 1
        for wrong, said in (
            (good[..., :-2], r"vocab|outside \[0, 20\)" if grid.tp > 1 else r"vocab|outside \[0, 22\)"),
            (good[:, :1], "target has 8 positions"),
            (good[:, :0], "target has 8 positions"),
            (torch.cat([good, good[:, :1]], 1), "an even number on each"),
        ):
            mine = wrong if odd else good
            with pytest.raises(ValueError, match=said if odd else "another rank of cp_group refused"):
                call(grid, mine, tokens, vocabulary=grid.tp * mine.shape[-1])
        same(call(grid, good, tokens), next_log_probs(logits, tokens))  # every rank is still here


@ranks(2, 4)
@pytest.mark.parametrize("own, others", [(6, 4), (4, 6), (8, 6), (2, 6), (5, 8)], ids=str)
def test_parts_of_different_lengths_are_refused_on_every_rank(own, others):
    """One rank's positions, and those of the others, for sequences of 8 tokens a pair: nobody waits for more."""
    for grid in grids_with_context():
        logits, tokens = problem(length=4 * grid.cp)
        odd = grid.cp_rank == grid.cp - 1
        columns = grid.columns(logits)[:, :1].repeat(1, own if odd else others, 1)
        said = "target has .* positions" if odd and own in (2, 5) else "another rank of cp_group"
        with pytest.raises(ValueError, match=said):
            call(grid, columns, tokens)
        same(call(grid, grid.own(logits), tokens), next_log_probs(logits, tokens))  # every rank is still here


@ranks(2, 4)
@pytest.mark.parametrize(
    "sampling",
    [None, TrainingSamplingParams(top_k=3), TrainingSamplingParams(top_p=0.9)],
    ids=["all", "top-k", "top-p"],
)
def test_columns_of_another_rank_are_refused_on_every_rank(sampling):
    logits, tokens = problem(length=8)
    tp = dist.get_world_size()
    grid = next(g for g in grids() if g.tp == tp)
    right, everywhere = grid.vocab(24), grid.vocab(24) | {"vocab_start_index": 0, "vocab_end_index": 24 // tp}
    last, mine = everywhere if grid.tp_rank == tp - 1 else right, grid.columns(logits)
    more = {"tp_group": grid.tp_group, "sampling_params": sampling, "chunk_size": 3}
    for vocab in (everywhere, last):
        with pytest.raises(ValueError, match="vocab|refused"):
            from_parallel_logits_to_logprobs(mine, tokens, **vocab, **more)
    found = from_parallel_logits_to_logprobs(mine, tokens, **right, **more)
    assert found.shape == (2, 7)
