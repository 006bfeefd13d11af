"""A run with dropout on Transformer Engine's layers, saved and resumed, goes on bit by bit as if it had not stopped."""

import types

import pytest
import torch

from tests.examples import EXAMPLES  # noqa: F401  so that checkpoint.py is found
from tests.gpt import child_processes, data_parallel, make_optimizer, model_parallel, tiny_batches, tiny_gpt, train_step
from tests.on_transformer_engine.models import ENGINE, te_spec
from tests.ranks import ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
STEPS, SAVED_AT = 4, 2
NO_SCHEDULE = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)


def seed(number, tracker, reset=False):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number, te_rng_tracker=tracker, force_reset_rng=reset)


def run(number, tracker, before_step, **overrides):
    """The losses from the step that `before_step(model, optimizer)` gives to the last one."""
    seed(number, tracker)
    (model,) = data_parallel(tiny_gpt(te_spec, **ENGINE, **overrides))
    optimizer = make_optimizer([model])
    losses, step = [], before_step(0, model, optimizer)
    # As Megatron makes its data loaders, after a checkpoint has been loaded: each draws the seed of its workers.
    batches = iter(torch.utils.data.DataLoader(tiny_batches(STEPS)[step:], batch_size=None, shuffle=False))
    for tokens_BS in batches:
        step += 1
        losses.append(train_step([model], optimizer, tokens_BS)[0])
        before_step(step, model, optimizer)
    return losses


@ranks(2)
@pytest.mark.parametrize("tracker", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["megatrons", "te"])
def test_a_resumed_run_draws_the_dropout_that_it_would_have_drawn(tracker, tmp_path):
    def save(step, model, optimizer):
        if step == SAVED_AT:
            with child_processes():
                checkpoint.save(str(tmp_path), step, 0, model, optimizer, NO_SCHEDULE)
        return step

    def load(step, model, optimizer):
        return checkpoint.load(str(tmp_path), 5, model, optimizer, NO_SCHEDULE)[0] if step == 0 else step

    def neither(step, model, optimizer):
        return step

    with model_parallel(tp=2):
        import checkpoint

        try:
            seed(11, tracker, reset=True)
            whole = run(11, tracker, save, **DROPOUT)
            rest = run(12, tracker, load, **DROPOUT)
            other = run(12, tracker, neither, **DROPOUT)
        finally:
            seed(11, False, reset=True)
    assert rest == whole[SAVED_AT:]
    assert other[SAVED_AT:] != rest, "another seed gives another dropout"
