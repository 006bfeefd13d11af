"""Parameters that tensor parallelism leaves whole: their gradients are the whole ones on every rank, or refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from megatron_ext.dtensor import causal_lm_loss
from megatron_ext.dtensor.layers import ParallelSizes
from megatron_ext.dtensor.piecewise import Cut, adds_up
from megatron_ext.dtensor.plans import choose_plan
from megatron_ext.dtensor.replicated_parameters import unequal_gradients
from tests.dtensor.models import check_gradients, drawn, make, meshes, of_family, parallelize, reference
from tests.ranks import ranks

HEAD = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
PLAN = HEAD | {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@of_family("apertus")
@ranks(2)
def test_custom_plan_sums_gradients_it_leaves_out():
    """Apertus has activation functions with parameters, and norms of heads; neither is named."""
    tokens = drawn(2, 16)
    mesh, dp_cp = meshes(tp=2)
    model = parallelize(make("apertus"), mesh, dp_cp, custom_parallel_plan=PLAN)
    causal_lm_loss(model, tokens)[:, :-1].mean().backward()
    check_gradients(model, reference("apertus", False, tokens)[2])
    assert unequal_gradients(model, mesh["tp"].get_group()) == []


class _Scaled(nn.Module):
    """A feed-forward block with a factor of its own on what is cut."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        return self.down_proj(torch.sigmoid(self.gate_proj(hidden)) * self.up_proj(hidden) * self.factor)


def _scaled():
    model = make("llama")
    model.model.layers[1].mlp = _Scaled(model.model.layers[1].mlp)
    return model


CUT_BLOCKS = HEAD | {"model.layers.*.mlp.[gu]*": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize("plan", [None, CUT_BLOCKS])
@ranks(2)
def test_part_of_a_gradient_is_refused_on_every_rank(plan):
    model, tokens = parallelize(_scaled(), *meshes(tp=2), custom_parallel_plan=plan), drawn(2, 16)
    loss = causal_lm_loss(model, tokens).mean()
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.factor of LlamaForCausalLM are on every tensor-parallel"):
        loss.backward()


@of_family("granite_moe_hybrid")
@ranks(2)
def test_whole_heads_refuse_dropout_of_scores():
    model = make("granite_moe_hybrid")
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout is 0.1: tensor-parallel ranks would draw different"):
        parallelize(model, *meshes(tp=2))


class _Block(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96), nn.Linear(48, 32)
        self.between = between

    def forward(self, hidden):
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(self.between(torch.sigmoid(gate) * up))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pieces_of_a_block_add_up_unless_it_mixes_channels(device):
    def of(block):
        return adds_up(block.to(device), Cut(["gate_up_proj"], ["down_proj"], ["gate_up_proj"]))

    assert of(_Block())
    assert of(_Block(torch.nn.Dropout(0.5)))
    assert of(_Block(lambda x: torch.softmax(x, -1))) is False
    assert of(_Block(lambda x: x - x.mean(-1, keepdim=True))) is False
    assert of(_Block(lambda x: x.view(-1, 48))) is None


class _Normed(_Scaled):
    """A feed-forward block that takes a mean over what is cut, as Gemma3n's sparse ones do."""

    def forward(self, hidden):
        gate = self.gate_proj(hidden)
        return self.down_proj(torch.relu(gate - gate.mean(-1, keepdim=True)) * self.up_proj(hidden))


@pytest.mark.parametrize("plan", [pytest.param(None, marks=of_family("olmo_hybrid")), CUT_BLOCKS])
def test_a_plan_whose_pieces_do_not_add_up_is_refused(plan):
    model = make("olmo_hybrid" if plan is None else "llama")
    layer = model.model.layers[1]
    layer.mlp = _Normed(layer.mlp)
    del layer.mlp.factor
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.* add up to it"):
        choose_plan(model, ParallelSizes(2), plan)


class _Capped(_Scaled):
    """A feed-forward block that goes on behind the sum over ranks, as vision adapters do."""

    def forward(self, hidden):
        return torch.tanh(super().forward(hidden))


def test_a_function_of_the_summed_pieces_is_not_refused():
    model = make("llama")
    model.model.layers[1].mlp = _Capped(model.model.layers[1].mlp)
    assert choose_plan(model, ParallelSizes(2), CUT_BLOCKS)[0]


class _NoWeight(nn.Module):
    """A projection that keeps its weight under another name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden)


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.up_proj", "mlp.gate_up_proj"])
def test_projections_without_a_weight_are_refused_by_name(path):
    model = make("phi3" if "gate_up" in path else "llama")
    layer = model.model.layers[0]
    layer.set_submodule(path, _NoWeight(layer.get_submodule(path)))
    with pytest.raises(ValueError, match=f"{path.partition('.')[2]}, a _NoWeight without a weight"):
        choose_plan(model, ParallelSizes(1, 2))


class _NormedRows(nn.Embedding):
    """An embedding that norms what it looks up, as MuseSpark's does."""

    def forward(self, tokens):
        rows = super().forward(tokens)
        return rows * torch.pow(rows.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)


@of_family("olmo_hybrid")
@ranks(2)
def test_an_embedding_that_dtensor_does_not_know_is_refused():
    model = make("olmo_hybrid")
    model.model.embed_tokens.__class__ = _NormedRows
    mesh, dp_cp = meshes(tp=2)
    model = parallelize(model, mesh, dp_cp)
    with pytest.raises(ValueError, match="not supported .*computes with a parameter that is cut"):
        model(input_ids=drawn(2, 8))


@of_family("olmo_hybrid")
@ranks(2)
def test_a_forward_that_reads_a_cut_parameter_is_refused():
    """Gemma4's forward for images reads the embedding, to look up the padding token by itself."""
    kind = type(make("olmo_hybrid"))

    class ReadsRows(kind):
        def forward(self, input_ids, **kwargs):
            rows = torch.where(
                input_ids[..., None] == 2, self.model.embed_tokens.weight[0], self.model.embed_tokens(input_ids)
            )
            return super().forward(inputs_embeds=rows, **kwargs)

    model = make("olmo_hybrid")
    model.__class__ = ReadsRows
    mesh, dp_cp = meshes(tp=2)
    model = parallelize(model, mesh, dp_cp)
    for call in (lambda: model(input_ids=drawn(2, 8)), lambda: causal_lm_loss(model, drawn(2, 8))):
        with pytest.raises(ValueError, match="ReadsRows is not supported .*computes with a parameter that is cut"):
            call()
