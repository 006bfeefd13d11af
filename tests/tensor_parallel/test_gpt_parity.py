"""Stock Megatron's GPTModel and the same model on our package, from one seed: weights, dropout masks, loss, gradients.

Layers, recomputation, random streams and mappings are ours where Megatron's stood; a mask drawn otherwise would
change the loss by a thousand times what is allowed.
"""

from contextlib import nullcontext

import pytest
import torch

from tests import gpt
from tests.gpt import loss_and_grads, model_parallel, ours_everywhere, seed_ranks, stock_spec, tiny_batches, tiny_gpt
from tests.ranks import ranks

LAYERS = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]}
SEQUENCE = {"sequence_parallel": True}
ON_DEVICE = {"use_cpu_initialization": False}  # Megatron's default
EXPERTS = gpt.EXPERTS | {"moe_ffn_hidden_size": 32}


def trained(ours, sizes, options):
    """First weights, and loss and gradients of a global batch."""
    with model_parallel(**sizes), ours_everywhere() if ours else nullcontext():
        seed_ranks(7)
        chunks = tiny_gpt(stock_spec, weights="init", hidden_dropout=0.1, attention_dropout=0.1, **options)
        homes = {type(m).__module__.split(".")[0] for m in chunks[0].modules() if type(m).__name__ in LAYERS}
        assert homes == {"megatron_ext" if ours else "megatron"}
        weights = {
            f"{i}.{name}": parameter.detach().clone()
            for i, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        return weights, *loss_and_grads(chunks, tiny_batches()[0])


def check(sizes, **options):
    """Megatron's own model recomputes nothing: of the parts of layers, its recomputation needs Transformer Engine."""
    plain = {name: value for name, value in options.items() if not name.startswith("recompute")}
    stock_weights, stock_loss, stock_grads = trained(False, sizes, plain)
    weights, loss, grads = trained(True, sizes, options)
    assert weights.keys() == stock_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, stock_weights[name]), name
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    assert grads.keys() == stock_grads.keys()
    for name, grad in grads.items():
        size = stock_grads[name].abs().max().item()  # sums of other orders err by the rounding of their largest terms
        torch.testing.assert_close(
            grad, stock_grads[name], rtol=1e-5, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}"
        )


@ranks(1)
def test_one_rank():
    check({})


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param(SEQUENCE | SELECTIVE, id="sequence-selective"),
        pytest.param(FULL, id="full", marks=pytest.mark.slow),
        pytest.param(SEQUENCE | FULL, id="sequence-full", marks=pytest.mark.slow),
        pytest.param({"tied": False}, id="untied", marks=pytest.mark.slow),
        pytest.param(ON_DEVICE | {"tied": False}, id="on-device", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_2(options):
    check({"tp": 2}, **options)


@ranks(2)
@pytest.mark.parametrize("options", [{}, pytest.param(FULL, marks=pytest.mark.slow)], ids=["plain", "full"])
def test_pipeline_parallel_2(options):
    check({"pp": 2}, **options)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, ON_DEVICE], ids=["on-cpu", "on-device"])
def test_expert_parallel_2(where):
    check({"ep": 2}, **EXPERTS, **where)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, SEQUENCE, FULL, SEQUENCE | SELECTIVE], ids=["plain", "sequence", "full", "selective"]
)
def test_tensor_parallel_4(options):
    check({"tp": 4}, **options)


@ranks(4)
@pytest.mark.slow
def test_tensor_pipeline_and_expert_parallel():
    check({"tp": 2, "pp": 2}, **SEQUENCE, **FULL)
    whole_experts = EXPERTS | {"expert_tensor_parallel_size": 1}
    check({"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1}, **SEQUENCE, **whole_experts)
    check({"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1}, **SEQUENCE, **whole_experts, **ON_DEVICE)
