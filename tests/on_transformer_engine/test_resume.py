"""A run with dropout on Transformer Engine's layers, saved and resumed, goes on bit by bit as if it had not stopped."""

import pytest

from tests.megatron_on_cpu.test_resume import assert_goes_on
from tests.on_transformer_engine.models import ENGINE, te_spec
from tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("tracker", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["megatrons", "te"])
def test_on_transformer_engines_layers(tracker, tmp_path):
    assert_goes_on(tmp_path, te_spec, tracker, **ENGINE)
