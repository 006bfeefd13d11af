"""Seeds of each rank's streams: Megatron's where they are sound, and streams that never meet where they are not."""

import itertools

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as stock

from megatron_ext.distributed.groups import Coordinates
from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel._random.seeds import stream_seeds
from megatron_on_cpu import megatron_on_cpu
from tests.gpt import model_parallel
from tests.ranks import ranks
from tests.tensor_parallel.sharded import drawn, no_tracker, seeded

TP, EP, ETP, PP = 8, 24, 4, 3


def grid(tp_size=TP):
    for tp, ep, etp in itertools.product(range(tp_size), range(EP), range(ETP)):
        yield Coordinates(tp_rank=tp, ep_rank=ep, etp_rank=etp, tp_size=tp_size)


def test_the_streams_start_where_their_seeds_say():
    with seeded(1000, tp_rank=3, ep_rank=2, etp_rank=1) as tracker:
        assert torch.equal(torch.rand(4), drawn(1000, 4)[0])
        for name, seed in (
            (random.get_data_parallel_rng_tracker_name(), 1000),
            ("model-parallel-rng", 1000 + 2718 + 3),
            (random.get_expert_parallel_rng_tracker_name(), 1000 + 1024 + 200 + 1),
        ):
            with tracker.fork(name):
                assert torch.equal(torch.rand(4), drawn(seed, 4)[0]), name
        random.model_parallel_cuda_manual_seed(1000, tp_rank=0, ep_rank=0, etp_rank=0)  # again: forgets the old streams
        with tracker.fork():
            assert torch.equal(torch.rand(4), drawn(1000 + 2718, 4)[0])


def test_seeds_are_megatrons_wherever_megatron_seeds(monkeypatch):
    """Megatron's own code seeds one rank at a time; where it raises, ours does not."""
    with megatron_on_cpu(), no_tracker():
        for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
            monkeypatch.setattr(stock, name, None)
        for at in grid():
            where = {"tp_rank": at.tp_rank, "ep_rank": at.ep_rank, "etp_rank": at.etp_rank}
            random.model_parallel_cuda_manual_seed(77, **where)
            ours = random.get_cuda_rng_tracker().seeds_
            if tuple(where.values()) in [(6, 17, 0), (7, 17, 1)]:
                with pytest.raises(Exception, match="already exists"):
                    stock.model_parallel_cuda_manual_seed(77, **where, force_reset_rng=True)
                assert len(ours) == 3
            else:
                stock.model_parallel_cuda_manual_seed(77, **where, force_reset_rng=True)
                assert ours == stock.get_cuda_rng_tracker().seeds_, where


@pytest.mark.parametrize("tp_size", [1, 4, 7, TP])
def test_no_two_streams_of_a_job_meet(tp_size):
    tensor = {stream_seeds(0, at).model for at in grid(tp_size)}
    assert tensor == {2718 + tp for tp in range(tp_size)}
    experts = {}
    for at in grid(tp_size):
        seeds = stream_seeds(0, at)
        assert len({*seeds}) == 3
        assert seeds.expert not in tensor
        experts.setdefault((at.ep_rank, at.etp_rank), set()).add(seeds.expert)
        megatron = 1024 + 100 * at.ep_rank + at.etp_rank
        if megatron not in tensor:
            assert seeds.expert == megatron
    # Replicas of an expert agree, on whichever tensor-parallel rank they are; different experts differ.
    assert all(len(seeds) == 1 for seeds in experts.values())
    assert len(set().union(*experts.values())) == EP * ETP


def test_a_size_that_is_given_makes_replicas_agree():
    def expert(**size):
        with seeded(5, ep_rank=17, etp_rank=0, **size) as tracker:
            return (tracker.seeds_ - {5, 5 + 2718 + size["tp_rank"]}).pop()

    assert expert(tp_rank=1, tp_size=8) == expert(tp_rank=6, tp_size=8) != 5 + 2724
    assert expert(tp_rank=1, tp_size=4) == 5 + 2724


def test_unique_streams_are_unique():
    """Bases are those that Megatron's training gives each pipeline stage."""
    experts, others = {}, set()
    for pp, at in itertools.product(range(PP), grid()):
        seeds = stream_seeds(100 * pp, at._replace(pp_rank=pp), unique_streams=True)
        experts.setdefault(seeds.expert, set()).add((pp, at.ep_rank, at.etp_rank))
        others |= {seeds.data, seeds.model}
    assert len(experts) == PP * EP * ETP
    assert all(len(places) == 1 for places in experts.values())
    assert not others & set(experts)
    assert max(experts) < 2**32  # CPU generators look no further


def test_unique_streams_draw_differently():
    """Pipeline stages share streams of experts by default, as in Megatron."""

    def expert_numbers(pp, ep, **options):
        with seeded(100 * pp, tp_rank=0, ep_rank=ep, etp_rank=0, pp_rank=pp, **options) as tracker:
            with tracker.fork(random.get_expert_parallel_rng_tracker_name()):
                return torch.rand(4)

    assert torch.equal(expert_numbers(0, 1), expert_numbers(1, 0))
    assert not torch.equal(expert_numbers(0, 1, unique_streams=True), expert_numbers(1, 0, unique_streams=True))


@pytest.mark.parametrize("wrong", [{"ep_rank": 4096}, {"etp_rank": 64}, {"tp_rank": -1}], ids=str)
def test_ranks_out_of_range_are_refused_before_anything_changes(wrong):
    with seeded(1) as tracker:
        before = tracker.get_states()
        torch.manual_seed(3)
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            random.model_parallel_cuda_manual_seed(2, **wrong)
        assert torch.equal(torch.rand(3), drawn(3, 3)[0])
        assert all(torch.equal(before[name], state) for name, state in tracker.get_states().items())


@ranks(2)
def test_without_groups_ranks_must_be_given():
    with no_tracker():
        with pytest.raises(ValueError, match="tp_rank, etp_rank not given.*initialize_model_parallel"):
            random.model_parallel_cuda_manual_seed(1, ep_rank=0)
        with pytest.raises(ValueError, match="pp_rank not given"):
            random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0, unique_streams=True)
        random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)


@ranks(4)
def test_with_groups_the_ranks_are_megatrons():
    for sizes in ({"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1}, {"tp": 4}):
        with model_parallel(**sizes), no_tracker():
            stock.model_parallel_cuda_manual_seed(9)
            random.model_parallel_cuda_manual_seed(9)
            tracker = random.get_cuda_rng_tracker()
            assert tracker.seeds_ == stock.get_cuda_rng_tracker().seeds_, sizes
            random.model_parallel_cuda_manual_seed(9, unique_streams=True)
            at = Coordinates(
                tp_rank=parallel_state.get_tensor_model_parallel_rank(),
                ep_rank=parallel_state.get_expert_model_parallel_rank(),
                etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
                pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
                tp_size=sizes["tp"],
            )
            assert tracker.seeds_ == {*stream_seeds(9, at, unique_streams=True)}
