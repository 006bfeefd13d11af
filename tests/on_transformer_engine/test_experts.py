"""Mixtures of experts on Transformer Engine's layers train as on Megatron's local ones."""

import pytest

from tests.gpt import EXPERTS
from tests.marks import slow
from tests.on_transformer_engine.models import assert_te_is_local
from tests.ranks import ranks

MOE = EXPERTS | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
FUSED = {"moe_permute_fusion": True, "moe_router_fusion": True, "moe_grouped_gemm": True}


@ranks(1)
@pytest.mark.parametrize(
    "only_te",
    [
        {},
        *slow({"moe_grouped_gemm": True}, {"moe_permute_fusion": True}, {"moe_router_fusion": True}),
        FUSED | {"use_cpu_initialization": False},  # the default of Megatron's scripts
    ],
    ids=["sequential", "grouped", "permutation", "router", "all"],
)
def test_one_rank(only_te):
    assert_te_is_local({}, only_te, **MOE)


@ranks(1)
@pytest.mark.parametrize(
    "router",
    [
        *slow({"moe_router_score_function": "sigmoid"}),
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_pre_softmax": True, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
        *slow({"moe_router_topk_scaling_factor": 2.5, "moe_router_pre_softmax": True}),
    ],
    ids=["sigmoid", "bias", "groups", "scaled"],
)
def test_routers(router):
    assert_te_is_local({}, {"moe_router_fusion": True}, **MOE | router)


@ranks(2)
@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.slow)])
def test_expert_parallel(dispatcher):
    assert_te_is_local({"ep": 2}, FUSED, **MOE | {"moe_token_dispatcher_type": dispatcher})
