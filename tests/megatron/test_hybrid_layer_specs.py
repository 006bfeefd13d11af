"""HybridModel on our layers: Megatron's numbers, on the versions that have it."""

import pytest

from megatron_ext.megatron import versions
from tests import gpt
from tests.gpt import grouped, loss_and_grads, model_parallel, ours_everywhere, tiny_batches
from tests.megatron.language_models import tiny_hybrid_chunks
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not versions.HYBRID_MODEL.is_there(), reason="HybridModel came with Megatron-Core 0.18")

EXPERTS = gpt.EXPERTS | {"moe_ffn_hidden_size": 32}


@ranks(2)
@pytest.mark.parametrize(
    "sizes,options",
    [
        ({"tp": 2}, {"pattern": "*-"}),
        pytest.param({"tp": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"ep": 2}, EXPERTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_numbers_of_megatrons_layers(sizes, options):
    def result(ours):
        return loss_and_grads(tiny_hybrid_chunks(tied=False, ours=ours, **options), tiny_batches()[0])

    with model_parallel(**sizes):
        stock, stock_grads = result(False)
        with ours_everywhere():
            both = result(True)
        ours = result(True)
    for loss, grads in (ours, both):
        assert loss == pytest.approx(stock, rel=1e-6)
        assert grads.keys() == stock_grads.keys()
        for name, grad in grads.items():
            assert (grad - stock_grads[name]).norm() <= 1e-6 * stock_grads[name].norm(), name


@grouped(1)
def test_other_kinds_of_layers_are_refused():
    with pytest.raises(ValueError, match="pattern has a gdn layer.*use Megatron's own"):
        tiny_hybrid_chunks(ours=True, pattern="*G")


@ranks(1)
def test_every_parameter_lies_in_our_layers():
    for _ in range(2):  # the emulation has a final norm for Megatron's own hybrid models each time it is entered
        with model_parallel(), ours_everywhere():
            (model,) = tiny_hybrid_chunks(tied=False, ours=True)
        homes = {type(m).__module__ for m in model.modules() if any(True for _ in m.parameters(recurse=False))}
        assert homes
        assert all(home.startswith("megatron_ext.") for home in homes), homes
