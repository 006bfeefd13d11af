"""A run with dropout, saved and resumed under the emulation, goes on bit by bit as if it had not stopped."""

import types

import pytest
import torch

from tests.examples import EXAMPLES  # noqa: F401  so that checkpoint.py is found
from tests.gpt import child_processes, data_parallel, make_optimizer, tiny_batches, tiny_gpt, train_step
from tests.on_transformer_engine.models import any_tracker
from tests.ranks import ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
STEPS, SAVED_AT = 6, 4
NO_SCHEDULE = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)


def seed(number, tracker=False, reset=False):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number, te_rng_tracker=tracker, force_reset_rng=reset)


def run(number, before_step, spec, tracker, **overrides):
    """The losses from the step that `before_step(step, model, optimizer)` gives to the last one."""
    seed(number, tracker)
    (model,) = data_parallel(tiny_gpt(spec, **DROPOUT | overrides))
    optimizer = make_optimizer([model])
    losses, step = [], before_step(0, model, optimizer)
    # As Megatron makes its data loaders, after a checkpoint has been loaded: each draws the seed of its workers.
    batches = iter(torch.utils.data.DataLoader(tiny_batches(STEPS)[step:], batch_size=None, shuffle=False))
    for tokens_BS in batches:
        step += 1
        losses.append(train_step([model], optimizer, tokens_BS)[0])
        before_step(step, model, optimizer)
    return losses


def assert_goes_on(folder, spec=None, tracker=False, **overrides):
    def save(step, model, optimizer):
        if step == SAVED_AT:
            with child_processes():
                checkpoint.save(str(folder), step, 0, model, optimizer, NO_SCHEDULE)
        return step

    def load(step, model, optimizer):
        return checkpoint.load(str(folder), 5, model, optimizer, NO_SCHEDULE)[0] if step == 0 else step

    def neither(step, model, optimizer):
        return step

    with any_tracker(tp=2):
        import checkpoint

        seed(11, tracker, reset=True)
        whole = run(11, save, spec, tracker, **overrides)
        rest = run(12, load, spec, tracker, **overrides)
        other = run(12, neither, spec, tracker, **overrides)
    assert len(rest) == STEPS - SAVED_AT
    assert rest == whole[SAVED_AT:]
    assert other[SAVED_AT:] != rest, "another seed gives another dropout"


@pytest.mark.slow
@ranks(2)
def test_on_local_layers(tmp_path):
    assert_goes_on(tmp_path)
