"""Log-probabilities of next tokens from hidden states, at every arrangement of ranks.

Values, gradients and collectives of random problems, packed and padded, are those of `tests.fuzz.model_utils`.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.meter import measure
from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    ChunkedDistributedHiddenStatesToLogprobs,
    TrainingSamplingParams,
    from_parallel_hidden_states_to_logprobs,
)
from tests.batch_invariant_mode import fixed_calls
from tests.model_utils.sharded import Grid, grids, next_log_probs, same
from tests.model_utils.test_packed import cumulative
from tests.ranks import ranks

WIDTH, VOCABULARY = 6, 24
SOFTER = TrainingSamplingParams(temperature=0.7)


def problem(batch: int = 2, length: int = 16, dtype=torch.float64):
    """Hidden states `[S, B, D]`, a weight `[V, D]` and token ids `[B, S]`, the same on all ranks."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(length, batch, WIDTH, dtype=torch.float64, generator=g)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=g)
    return hidden.to(dtype), weight.to(dtype), torch.randint(VOCABULARY, (batch, length), generator=g)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    return reference.logits(hidden, weight).transpose(0, 1)


class Mine:
    """This rank's hidden states and weight, as leaves."""

    def __init__(self, grid: Grid, layout: str, hidden: Tensor, weight: Tensor):
        self.grid, self.layout = grid, layout
        hidden = grid.part(hidden, 0)
        if layout == "sequence":
            hidden = hidden.chunk(grid.tp)[grid.tp_rank]
        mine = hidden, weight.chunk(grid.tp)[grid.tp_rank]
        self.hidden, self.weight = (x.clone().requires_grad_() for x in mine)

    def call(self, tokens: Tensor, tied: bool = False, **more):
        weights = (None, self.weight) if tied else (self.weight, None)
        return from_parallel_hidden_states_to_logprobs(
            self.hidden,
            *weights,
            None,
            tokens,
            **self.grid.vocab(VOCABULARY),
            tp_group=self.grid.tp_group,
            cp_group=self.grid.cp_group,
            **{"hidden_layout": self.layout} | more,
        )


@ranks(1, 2)
def test_bits_and_targets_that_are_left_out():
    hidden, weight, tokens = problem(dtype=torch.float32)
    tokens[0, 3:9] = -100
    for grid in grids():
        for params in (SOFTER, TrainingSamplingParams(5, 0.9, 0.7)):

            def call(grid=grid, params=params, **options):
                with torch.no_grad():
                    mine = Mine(grid, "sequence", hidden, weight)
                    return mine.call(tokens, sampling_params=params, **options)

            with fixed_calls() as calls:
                found = [call(bits="batch", chunk_size=3), call(bits="batch", skip_ignored=True)]
                found.append(call(bits="batch", skip_ignored=tokens.numel()))
                assert len(calls) == (3 if params is SOFTER else 0)  # a filter reads logits
            whole = call(bits="batch")
            assert all(torch.equal(x, whole) for x in found)
            assert whole[0, 2:8].eq(0).all()
            torch.testing.assert_close(call(skip_ignored=True), whole)


@ranks(1, 2)
def test_products_are_of_the_targets_that_count():
    """Or of as many as a bound says, on each rank; packed documents' ends and padding count no more than -100."""
    hidden, weight, tokens = problem(1, 24)
    tokens[0, :9] = -100
    cuts = cumulative([8, 16])
    for grid in grids():
        if grid.cp == 1:
            for packed, counting in (({}, 15), ({"cu_seqlens_padded": cuts, "unpacked_seqlen": 16}, 15)):
                flops = {}
                for skip in (False, True, 18):
                    with measure() as found:
                        mine = Mine(grid, "replicated", hidden, weight)
                        mine.call(tokens, cache=1, skip_ignored=skip, **packed).sum().backward()
                    flops[skip] = found.flops
                each = 6 * mine.weight.numel()
                assert flops == {False: 24 * each, True: counting * each, 18: 18 * each}


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["sequence", "replicated"])
def test_the_autograd_function_takes_shifted_targets(layout):
    hidden, weight, tokens = problem()
    grid = next(g for g in grids() if g.cp == 1)
    mine = Mine(grid, layout, hidden, weight)
    labels = tokens.roll(-1, 1)
    args = (mine.hidden, labels, mine.weight, *grid.vocab(VOCABULARY).values(), 3, grid.tp_group)
    found = ChunkedDistributedHiddenStatesToLogprobs.apply(*args, hidden_layout=layout)
    same(found[:, :-1], next_log_probs(logits_of(hidden, weight), tokens))
    if layout == "sequence":  # NeMo-RL's own
        same(found, ChunkedDistributedHiddenStatesToLogprobs.apply(*args))
    assert not ChunkedDistributedHiddenStatesToLogprobs.apply(*args, True, hidden_layout=layout).requires_grad


@ranks(1, 2)
def test_gradients_go_into_main_grad():
    hidden, weight, tokens = problem(dtype=torch.float32)
    for grid in grids():
        plain, fused = (Mine(grid, "sequence", hidden, weight) for _ in range(2))
        plain.call(tokens).sum().backward()
        fused.weight.main_grad = torch.ones_like(fused.weight)
        fused.weight.grad_added_to_main_grad = False
        fused.call(tokens, gradient_accumulation_fusion=True).sum().backward()
        assert fused.weight.grad_added_to_main_grad
        torch.testing.assert_close(fused.weight.main_grad - 1, plain.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused.hidden.grad, plain.hidden.grad)


@ranks(2, 4)
@pytest.mark.parametrize("layout", ["sequence", "replicated"])
def test_what_only_one_rank_has_wrong(layout):
    hidden, weight, tokens = problem()
    for grid in grids():
        mine, wrong = Mine(grid, layout, hidden, weight), tokens.clone()
        wrong[1, 15] = VOCABULARY
        with pytest.raises(ValueError, match=r"outside \[0, 24\)|another rank of cp_group refused"):
            mine.call(wrong)
        good = mine.weight
        if torch.distributed.get_rank() == 1:
            mine.weight = torch.zeros(*good.shape[:1], WIDTH + 1, dtype=good.dtype)
        with pytest.raises(ValueError, match="weight has shape|another rank of (tp|cp)_group refused"):
            mine.call(tokens, return_entropy=True)
        for bad in (torch.zeros((), dtype=good.dtype), good[:, 0], good[:-3]):
            mine.weight = bad if torch.distributed.get_rank() == 1 else good
            with pytest.raises(ValueError, match="weight|vocab|shards|another rank of (tp|cp)_group refused"):
                mine.call(tokens.where(tokens != 0, VOCABULARY - 1), tied=bad.dim() == 0)
        mine.weight, whole = good, mine.hidden
        if grid.cp > 1:
            mine.hidden = whole[: -whole.shape[0] // 2] if grid.cp_rank == 1 else whole
            said = "target has 16 positions" if grid.cp_rank == 1 else "another rank of cp_group refused"
            with pytest.raises(ValueError, match=said):
                mine.call(tokens)
            mine.hidden = whole
        same(mine.call(tokens), next_log_probs(logits_of(hidden, weight), tokens))


@ranks(1, 2)
def test_wrong_arguments_are_errors_on_every_rank():
    hidden, weight, tokens = problem()
    filtered = TrainingSamplingParams(top_k=3)
    for grid in grids():
        mine = Mine(grid, "sequence", hidden, weight)
        for wrong, said in (
            (lambda mine=mine: mine.call(tokens[0]), "target is .* token ids"),
            (lambda mine=mine: mine.call(tokens.repeat(1, 2)), "target has 32 positions"),
            (lambda mine=mine: mine.call(tokens, hidden_layout="elsewhere"), "hidden_layout is 'elsewhere'"),
            (lambda mine=mine: mine.call(tokens, chunk_size=-1), "chunk_size is -1"),
            (lambda mine=mine: mine.call(tokens, return_entropy=True, sampling_params=filtered), "whole vocabulary"),
            (lambda mine=mine: mine.call(tokens[:1], cu_seqlens_padded=cumulative([16])), "a pack must be"),
        ):
            with count_collectives() as sent, pytest.raises(ValueError, match=said):
                wrong()
            assert not sent or (said.startswith("target has") and grid.cp > 1)  # others may have what fits
        columns = (*grid.vocab(VOCABULARY).values(), None, grid.tp_group)
        for target in (tokens[0], tokens[None], tokens.tolist()):
            with pytest.raises(ValueError, match=r"target is .* it must be token ids \[batch, sequence\]"):
                ChunkedDistributedHiddenStatesToLogprobs.apply(mine.hidden, target, mine.weight, *columns)
        with pytest.raises(ValueError, match="output_weight_layer and output_weight are None"):
            from_parallel_hidden_states_to_logprobs(hidden, None, None, None, tokens, 0, 24, None)


@ranks(1, 2)
def test_the_weight_in_either_place():
    """Earlier versions of NeMo-RL have `output_weight` before `runtime_gather_output`: types tell which is meant."""
    hidden, weight, tokens = problem()
    other = weight + 1
    for grid in grids():
        mine, spare = Mine(grid, "sequence", hidden, weight), Mine(grid, "sequence", hidden, other)
        where = (*grid.vocab(VOCABULARY).values(), grid.tp_group, True, grid.cp_group, 3)
        wanted, of_other = (next_log_probs(logits_of(hidden, w), tokens) for w in (weight, other))
        for given, expected in (
            ((mine.weight, False, tokens), wanted),  # today's
            ((mine.weight, None, tokens), wanted),
            ((mine.weight, None, False, tokens), wanted),  # the earlier one
            ((mine.weight, None, None, tokens), wanted),
            ((mine.weight, spare.weight, None, tokens), of_other),
            ((None, spare.weight, True, tokens), of_other),
        ):
            found = from_parallel_hidden_states_to_logprobs(mine.hidden, *given, *where)
            same(found, expected)
            assert not found.requires_grad  # inference keeps nothing
        named = {"runtime_gather_output": None, "target": tokens, "tp_group": grid.tp_group, "cp_group": grid.cp_group}
        named |= grid.vocab(VOCABULARY)
        found = from_parallel_hidden_states_to_logprobs(mine.hidden, mine.weight, **named, output_weight=spare.weight)
        same(found.detach(), of_other)
        found = from_parallel_hidden_states_to_logprobs(mine.hidden, None, spare.weight, **named)
        same(found.detach(), of_other)
