"""Layers whose weights generalized tensor parallelism cuts once more, over a stand-in for Megatron's parameter.

Megatron-Core has the real one from 0.19 on, with Transformer Engine 2.20: Megatron's own tests of it are run with our
layers in place (docs/transformer_engine.md).
"""

import copy
import functools
import importlib
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.head.lm_head import LmHead
from megatron_ext.tensor_parallel import layers
from megatron_ext.tensor_parallel.inference_layers import InferenceLinear
from tests.ranks import ranks
from tests.tensor_parallel.sharded import CLASSES, Config, alone, build, no_tracker
from tests.tensor_parallel.test_newer_surface import WHOLE

MODULE = "megatron.core.tensor_parallel.gtp_api"
KINDS = [*CLASSES, "whole"]


class Piece(torch.nn.Parameter):
    """This rank's rows of a weight, padded, by Transformer Engine's protocol of distributed weights.

    The gathered weight lies in one buffer, which the next forward overwrites: who kept it for backward would see that.
    """

    is_distributed_weight = is_gtp_weight_remat = True

    def _gather(self):
        parts = [torch.empty_like(self.data) for _ in range(self.gtp_remat_size)]
        dist.all_gather(parts, self.data, group=self.group)
        whole = torch.cat(parts)
        return whole[: len(whole) - self.pad_length]

    def materialize_group_for_forward(self):
        self.lent = self._gather()
        return self.lent

    def materialize_group_for_backward(self):
        self.lent.fill_(float("nan"))
        return self._gather()

    def grad_buffer(self):
        rows = self.shape[0] * self.gtp_remat_size - self.pad_length
        return torch.full((rows, *self.shape[1:]), float("nan"), dtype=self.main_grad.dtype)

    def finalize_group_grads(self, dw):
        dw = F.pad(dw, (0, 0, 0, self.pad_length)).contiguous()
        dist.all_reduce(dw, group=self.group)
        self.main_grad += dw.chunk(self.gtp_remat_size)[dist.get_rank(self.group)]
        return torch.zeros_like(self)


def wrap_module_params_gtp(module, names, group):
    (name,), ranks = names, dist.get_world_size(group)
    weight = getattr(module, name)
    pad = -len(weight) % (4 * ranks)
    piece = Piece(F.pad(weight.data, (0, 0, 0, pad)).chunk(ranks)[dist.get_rank(group)].clone())
    piece.group, piece.gtp_remat_size, piece.pad_length = group, ranks, pad
    delattr(module, name)
    module._parameters[name] = piece
    piece.main_grad = torch.zeros(piece.shape)


class GTPEmbeddingWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.materialize_group_for_forward()

    @staticmethod
    def backward(ctx, grad):
        return ctx.weight.finalize_group_grads(grad)


def with_megatrons_module(test):
    """Runs a test with Megatron's module, in whatever version is installed."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        module = types.ModuleType(MODULE)
        module.HAVE_GTP, module.GTPEmbeddingWeight = True, GTPEmbeddingWeight
        module.wrap_module_params_gtp = wrap_module_params_gtp
        importlib.import_module("megatron.core.tensor_parallel")
        with mock.patch.dict(sys.modules, {MODULE: module}), no_tracker():
            test(*args, **kwargs)

    return run


def layer_of(kind, tp_group, gtp, **groups):
    torch.manual_seed(3)
    given = {"tp_group": tp_group, "pg_collection": types.SimpleNamespace(gtp_remat=gtp, **groups)}
    if kind == "whole":
        return InferenceLinear(6, 10, parallel_mode="duplicated", **WHOLE, **given)
    return build(kind, *((10, 6) if kind == "embedding" else (6, 10)), **given)


def batch_of(kind, rank):
    generator = torch.Generator().manual_seed(rank)
    if kind == "embedding":
        return torch.randint(10, (3, 2), generator=generator)
    return torch.randn(3, 2, 6, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
@with_megatrons_module
def test_a_layer_in_pieces_computes_what_the_whole_one_does(kind):
    """Ranks have tokens of their own, as data-parallel ranks do: the gradients of both add up in the pieces."""
    rank, own = dist.get_rank(), alone()
    layer, whole = layer_of(kind, own, dist.group.WORLD), layer_of(kind, own, own)
    assert (layer.gtp_remat_size, whole.gtp_remat_size) == (2, 1)
    assert layer.weight.shape == (8, 6)  # of 10 rows, padded to 16
    assert layer.weight._need_weight_prefetch == (kind != "embedding")  # which no product is before
    truth = 0
    for step in range(2):
        for other in range(2):
            x = batch_of(kind, other + 2 * step)
            x = x.requires_grad_() if x.is_floating_point() else x
            expected = whole(x)
            expected = expected if kind == "embedding" else expected[0]
            whole.weight.grad = None
            expected.square().sum().backward()
            truth = truth + whole.weight.grad
            if other == rank:
                mine = x.detach().clone().requires_grad_(x.requires_grad)
                found = layer(mine)
                found = found if kind == "embedding" else found[0]
                torch.testing.assert_close(found, expected)
                found.square().sum().backward()
                if x.requires_grad:
                    torch.testing.assert_close(mine.grad, x.grad)
    pieces = F.pad(truth, (0, 0, 0, 6)).chunk(2)
    torch.testing.assert_close(layer.weight.main_grad, pieces[rank])


@ranks(2)
@with_megatrons_module
def test_frozen_weight_in_pieces_is_gathered_for_the_input():
    own = alone()
    layer, whole = layer_of("column", own, dist.group.WORLD), layer_of("column", own, own)
    layer.weight.requires_grad_(False)
    found, expected = (batch_of("column", 0).requires_grad_() for _ in range(2))
    layer(found)[0].square().sum().backward()
    whole(expected)[0].square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    assert not layer.weight.main_grad.any()


@ranks(2)
@with_megatrons_module
def test_gradient_is_summed_and_sent_in_the_dtype_of_main_grad():
    rank, own = dist.get_rank(), alone()
    layer = layer_of("column", own, dist.group.WORLD).bfloat16()
    layer.weight.main_grad = torch.zeros(8, 6)
    xs = [batch_of("column", other).bfloat16() for other in range(2)]
    dy = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(9)).bfloat16()
    layer(xs[rank])[0].backward(dy)
    truth = sum(dy.flatten(0, 1).double().T @ x.flatten(0, 1).double() for x in xs)
    pieces = F.pad(truth, (0, 0, 0, 6)).chunk(2)
    torch.testing.assert_close(layer.weight.main_grad.double(), pieces[rank], rtol=1e-5, atol=1e-5)


@ranks(4)
@with_megatrons_module
def test_pieces_of_tensor_parallel_shards():
    rank = dist.get_rank()
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gtp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, gtp, own = tp_groups[rank // 2], gtp_groups[rank % 2], alone()
    torch.manual_seed(3)
    given = {"config": Config(sequence_parallel=True), "pg_collection": types.SimpleNamespace(gtp_remat=gtp)}
    layer = build("column", 6, 16, bias=False, tp_group=tp, **given)
    torch.manual_seed(3)
    whole = build("column", 6, 16, bias=False, tp_group=own)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(9))  # the same for both pairs of ranks
    mine = x.chunk(2)[rank % 2].clone().requires_grad_()
    all_tokens = x.clone().requires_grad_()
    found, expected = layer(mine)[0], whole(all_tokens)[0]
    torch.testing.assert_close(found, expected.chunk(2, dim=1)[rank % 2])
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, all_tokens.grad.chunk(2)[rank % 2])
    truth = 2 * whole.weight.grad  # of two pairs
    torch.testing.assert_close(layer.weight.main_grad, truth.chunk(2)[rank % 2].chunk(2)[rank // 2])


@ranks(2)
@with_megatrons_module
def test_checkpoints_know_the_pieces():
    from megatron.core.dist_checkpointing import mapping  # noqa: F401

    rank, own = dist.get_rank(), alone()
    layer, table = (layer_of(kind, own, dist.group.WORLD, dp_cp=own) for kind in ("column", "embedding"))
    shards = layer.sharded_state_dict("fc.", metadata={"dp_cp_group": own})
    shards |= table.sharded_state_dict("table.", metadata={"dp_cp_group": own})
    for key in ("fc.weight", "table.weight"):
        piece = shards[key]
        assert (piece.local_shape, piece.global_shape, piece.global_offset) == ((8, 6), (16, 6), (8 * rank, 0))
        assert (piece.replica_id, piece.allow_shape_mismatch) == ((0, 0, 0), True)
    assert shards["fc.bias"].replica_id == (0, rank, 0)  # one rank writes what all have
    assert shards["fc._extra_state"].replica_id == (0, rank, 0)


@ranks(2)
@with_megatrons_module
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (2, 1)], ids=str)
def test_experts_in_other_pieces_have_a_dp_group_of_their_own(sizes):
    names = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    config = types.SimpleNamespace(**dict(zip(names, sizes, strict=True)))
    own = alone()
    pieces = dist.group.WORLD if sizes[1] > 1 else own
    groups = types.SimpleNamespace(gtp_remat=own, expt_gtp_remat=pieces, dp_cp=None, expt_dp=own)
    layer = build("column", 6, 10, config=config, is_expert=True, tp_group=own, pg_collection=groups)
    assert layer.gtp_remat_size == sizes[1]
    assert getattr(layer.weight, "gtp_replica_group", own) is own
    assert [parameter.allreduce for parameter in layer.parameters()] == [sizes[0] == sizes[1]] * 2


@ranks(2)
@with_megatrons_module
def test_what_does_not_fit_is_refused():
    own = alone()
    layer = layer_of("column", own, dist.group.WORLD)
    x = torch.randn(3, 6)
    for function in (layers.linear_with_grad_accumulation_and_async_allreduce, layers.linear_with_frozen_weight):
        with pytest.raises(ValueError, match=r"gtp_remat_size is 1, .* cut the weight into 2 pieces: pass 2"):
            function(x, layer.weight, None, False, False, False, tp_group=own)
        with pytest.raises(ValueError, match=r"gtp_remat_size is 2, .* into 1 pieces: .*made over 2 ranks"):
            function(x, torch.randn(10, 6), None, False, False, False, tp_group=own, gtp_remat_size=2)
        torch.testing.assert_close(
            function(x, layer.weight, None, False, False, False, tp_group=own, gtp_remat_size=2), layer(x)[0]
        )
    with pytest.raises(ValueError, match="weight gradients are deferred"):
        layers.linear_with_grad_accumulation_and_async_allreduce(
            x, layer.weight, None, False, False, False, [], None, own, 2
        )
    with pytest.raises(ValueError, match=r"input is \(3, 5\) and weight \(10, 6\)"):
        layer(x[:, :5])
    with pytest.raises(ValueError, match=r"weight is a piece \(8, 6\) of this rank's shard, cut over 2 ranks"):
        LmHead(layer.weight, tp_group=own).resolved()
    output = layer(x)[0].sum()
    del layer.weight.main_grad
    with pytest.raises(ValueError, match=r"weight.main_grad is missing.*DistributedDataParallel"):
        output.backward()
    sys.modules[MODULE].HAVE_GTP = False
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"over 2 ranks, which needs Megatron-Core 0.19 or newer"):
            layer_of(kind, own, dist.group.WORLD)
        assert layer_of(kind, own, own).gtp_remat_size == 1  # the advice
    assert copy.deepcopy(layer_of("column", own, own)).gtp_remat_size == 1


@ranks(2)
@with_megatrons_module
def test_what_would_be_silently_wrong_is_refused():
    own = alone()
    layer, other = (layer_of(kind, own, dist.group.WORLD) for kind in ("column", "embedding"))
    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"weight is a piece \(8, 6\) .*share_embeddings_and_output_weights=False"):
        layer(x, weight=other.weight)
    with pytest.raises(ValueError, match="cannot be copied; build a second layer"):
        copy.deepcopy(layer)
    third = dist.new_group([0]), dist.new_group([1])
    layer.weight.group = third[dist.get_rank()]  # of several ranks that share no weight
    with pytest.raises(ValueError, match="pg_collection has gtp_remat and neither dp_cp nor"):
        layer.sharded_state_dict(metadata={"dp_cp_group": own})
    for kind in ("column", "row", "whole"):
        names = [name for name, _ in layer_of(kind, own, dist.group.WORLD).named_parameters()]
        assert names == ["weight", "bias"], "an optimizer's state goes by the order"
