"""Ours beside Transformer Engine's: its RNG tracker through a substitution, and its functions where they are now."""

import warnings

import torch

from megatron_ext.sequence.zigzag import thd_partition_indices
from megatron_ext.tensor_parallel._random.transformer_engine import Fp8Recompute
from megatron_ext.tensor_parallel.random import CheckpointWithoutOutput
from tests.gpt import ours_everywhere
from tests.on_transformer_engine.models import any_tracker
from tests.ranks import ranks


def draw(x):
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        return x * torch.rand(4, device="cuda")


def seed():
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(5, te_rng_tracker=True, force_reset_rng=True)


@ranks(1)
def test_a_tracker_made_before_goes_on_in_ours_and_is_given_back():
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatrons

    one = torch.ones(4, requires_grad=True)
    with any_tracker():
        seed()
        expected = [draw(one).detach() for _ in range(3)]
        seed()
        tracker = megatrons._CUDA_RNG_STATE_TRACKER
        assert type(tracker).__module__ == "megatron.core.extensions.transformer_engine"
        got = [draw(one)]
        with ours_everywhere():
            assert isinstance(tensor_parallel.get_cuda_rng_tracker(), type(tracker))
            got.append(tensor_parallel.checkpoint(draw, False, one))
            got[-1].sum().backward()
        assert megatrons._CUDA_RNG_STATE_TRACKER is tracker
        got.append(draw(one))
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert torch.equal(one.grad, expected[1])


@ranks(1)
def test_a_tracker_made_in_ours_is_one_in_megatrons():
    from megatron.core import tensor_parallel
    from megatron.core.extensions.transformer_engine import TECudaRNGStatesTracker

    with any_tracker():
        with ours_everywhere():
            seed()
        assert type(tensor_parallel.get_cuda_rng_tracker()) is TECudaRNGStatesTracker
        found = draw(1)
        seed()
        assert torch.equal(found, draw(1))


@ranks(1)
def test_tracker_asked_for_before_is_seeded_by_default():
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker as stock_initialize

    def draws(initialize):
        initialize(use_te_rng_tracker=True, force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(5)
        assert tensor_parallel.is_graph_safe_cuda_rng_tracker(tensor_parallel.get_cuda_rng_tracker())
        return draw(1)

    with any_tracker():
        expected = draws(stock_initialize)
        with ours_everywhere():
            assert torch.equal(draws(tensor_parallel.random.initialize_rng_tracker), expected)


@ranks(1)
def test_settings_of_fp8_are_found_where_they_live_now():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        recompute = Fp8Recompute(told=True)
        with recompute.first():
            pass
        with recompute.second():
            pass


@ranks(1)
def test_recomputation_without_fp8_is_told_to_te():
    """Megatron's generalized tensor parallelism asks for the phase, to prefetch weights in the order of
    recomputation."""
    from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

    def told(fp8, runs):
        def function(x):
            runs.append(in_fp8_activation_recompute_phase())
            return x.sin()

        recompute = CheckpointWithoutOutput(fp8)
        x = torch.ones(3, requires_grad=True)
        result = recompute.checkpoint(function, x).exp()
        recompute.discard_output_and_register_recompute(result)
        result.sum().backward()
        return runs

    assert told(False, []) == [False, True]
    assert told(None, []) == [False, False]


@ranks(1)
def test_places_of_packed_tokens_are_transformer_engines():
    import transformer_engine_torch as engine

    cu_seqlens = torch.tensor([0, 8, 24])
    for rank in range(2):
        theirs = engine.thd_get_partitioned_indices(cu_seqlens.int(), 24, 2, rank)
        assert torch.equal(thd_partition_indices(cu_seqlens, 24, 2, rank), theirs)
