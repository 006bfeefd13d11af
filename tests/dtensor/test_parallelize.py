import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaForCausalLM

import megatron_ext.dtensor
from megatron_ext.dtensor import (
    RotaryEmbedParallel,
    _parallelize_llama,
    causal_lm_loss,
    get_hf_tp_plan,
    get_logprobs_from_vocab_parallel_logits,
    translate_parallel_style,
)
from megatron_ext.dtensor.layers import ParallelSizes, Unknown, check_attention
from megatron_ext.dtensor.plans import choose_plan
from megatron_ext.dtensor.styles import FusedColwise
from tests.dtensor.models import (
    FAMILIES,
    check_gradients,
    drawn,
    error,
    family_config,
    make,
    meshes,
    parallelize,
    reference,
)
from tests.ranks import ranks


def check_trains_as(reference_of, model, tokens):
    """Loss through the head and every gradient."""
    _, loss, gradients = reference_of
    found = causal_lm_loss(model, tokens)[:, :-1].mean()
    assert found.item() == pytest.approx(loss, rel=3e-6)
    found.backward()
    check_gradients(model, gradients)


PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.rotary_emb": RotaryEmbedParallel(use_local_output=True),
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def make_plan():
    return PLAN


@pytest.mark.parametrize("plan", [PLAN, f"{__name__}.PLAN", f"{__name__}.make_plan"], ids=["dict", "name", "function"])
@ranks(2)
def test_custom_plans(plan):
    tokens = drawn(2, 16)
    model = parallelize(make("llama", True), *meshes(tp=2), custom_parallel_plan=plan)
    assert not any(p.is_shard() for p in _tp_placements(model.model.layers[0].self_attn.q_proj.weight))
    assert any(p.is_shard() for p in _tp_placements(model.model.layers[0].mlp.up_proj.weight))
    check_trains_as(reference("llama", True, tokens), model, tokens)


def _tp_placements(parameter):
    mesh = parameter.device_mesh
    return parameter.placements[1:] if mesh.ndim == 2 else []


@pytest.mark.parametrize(
    "plan,message",
    [
        ("nowhere.PLAN", "cannot be imported"),
        (f"{__name__}.NOTHING", "cannot be imported"),
        ("PLAN", "cannot be imported"),
        ("math.pi", "must map module names"),
        ([], "must map module names"),
        ({"lm_head": "diagonal"}, "'diagonal' is unknown"),
        ({"lm_head": 3}, "lm_head.*int"),
    ],
)
def test_bad_plans(plan, message):
    with pytest.raises(ValueError, match=message):
        choose_plan(make("llama"), ParallelSizes(), plan)


class Wired(LlamaForCausalLM):
    """A Llama with a wire that is nowhere else, between its layers."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.wire = torch.nn.Parameter(torch.zeros(1))


def _wired():
    model = make("llama")
    wired = Wired(model.config)
    wired.load_state_dict(model.state_dict(), strict=False)
    return wired


@ranks(2)
def test_a_model_with_transformers_own_plan():
    """The model keeps transformers' plan and attention, because not all its parts are understood."""
    tokens = drawn(2, 16)
    mesh, dp_cp = meshes(tp=2)
    model = parallelize(_wired(), mesh, dp_cp)
    assert model.config._attn_implementation != "megatron_ext"
    logits = model(input_ids=tokens, use_cache=False).logits
    assert isinstance(logits, DTensor)
    true_logits, _, gradients = reference("llama", False, tokens)
    true = torch.nn.functional.log_softmax(true_logits[:, :-1], -1).gather(2, tokens[:, 1:, None])[..., 0]
    assert error(get_logprobs_from_vocab_parallel_logits(logits, tokens), true) < 3e-6
    check_trains_as((None, -true.mean().item(), gradients), model, tokens)
    with pytest.raises(ValueError, match="sequence parallelism of Wired .*wire in a layer is not known here"):
        parallelize(_wired(), mesh, dp_cp, sequence_parallel=True)
    with pytest.raises(ValueError, match="expert parallelism of LlamaForCausalLM, which has no experts"):
        parallelize(make("llama"), mesh, dp_cp, expert_parallel=True)


def _linear(name, inputs, outputs):
    """A change of a module: another linear layer in the place of one."""
    return lambda module: setattr(module, name, torch.nn.Linear(inputs, outputs))


def _own(name, *shape):
    return lambda module: setattr(module, name, torch.nn.Parameter(torch.zeros(shape)))


def _value(name, value):
    return lambda module: setattr(module, name, value)


# A family, one of its modules, a change of that, and what is said of it.
ODD_PARTS = [
    ("llama", "model", _linear("wire", 2, 2), "wire beside the layers"),
    ("llama", "model.config", _value("layer_types", ["full_attention", "spiral"]), "layers of type spiral"),
    ("llama", "model.config", _value("attention_chunk_size", 4), "attention in chunks"),
    ("llama", "model.layers.1.self_attn", _value("is_causal", False), "a layer without causal self_attn"),
    ("llama", "model.layers.1", _own("scale", 32), "scale in a layer"),
    ("llama", "model.layers.1.input_layernorm", _own("weight", 8), "input_layernorm, a LlamaRMSNorm, in a layer"),
    ("llama", "model.layers.1.self_attn", _own("scale", 32), "scale in LlamaAttention"),
    ("llama", "model.layers.1.self_attn", _value("head_dim", None), "LlamaAttention without head_dim"),
    ("llama", "model.layers.1.self_attn", _linear("gate", 32, 32), "LlamaAttention of gate, k_proj, o_proj"),
    ("llama", "model.layers.1.self_attn", _linear("o_proj", 40, 32), "LlamaAttention with an o_proj of 40 inputs"),
    (
        "llama",
        "model.layers.1.self_attn",
        _linear("q_proj", 32, 40),
        "Llama.* with projections .*'q_proj': 40",
    ),
    ("llama", "model.layers.1.mlp", _linear("wire", 2, 2), "LlamaMLP of down_proj, gate_proj, up_proj, wire"),
    ("llama", "model.layers.1.mlp", _own("scale", 48), "LlamaMLP of down_proj, gate_proj, scale, up_proj"),
    ("phi3", "model.layers.1.self_attn", _linear("qkv_proj", 32, 72), "Phi3Attention with a qkv_proj of size 72"),
    ("qwen3", "model.layers.1.self_attn.q_norm", _own("weight", 3), r"q_norm with weights of shape \[\(3,\)\]"),
]


@ranks(2)
def test_parts_that_are_not_understood_are_named():
    mesh, dp_cp = meshes(tp=2)
    for name, path, change, said in ODD_PARTS:
        model = make(name)
        module = model
        for part in path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        change(module)
        with pytest.raises(
            ValueError, match=f"sequence parallelism of .* is not supported .{said}.* is not known here"
        ):
            parallelize(model, mesh, dp_cp, sequence_parallel=True)


class _Reordered(nn.Linear):
    """A `qkv_proj` whose module cuts keys off first: so does the attention that it is given to."""

    def forward(self, hidden):
        q, k, v = super().forward(hidden).tensor_split([self.out_features // 2, 3 * self.out_features // 4], -1)
        return torch.cat([k, q, v], -1)


def _attention_of(model, keys_first):
    """Gives each attention a forward of its own, which computes the same, or cuts its fused projection otherwise."""
    for layer in model.model.layers:
        kind = type(layer.self_attn)

        def forward(own, *args, **kwargs):
            return type(own).__mro__[1].forward(own, *args, **kwargs)

        layer.self_attn.__class__ = type("Own", (kind,), {"forward": forward})
        if keys_first:
            layer.self_attn.qkv_proj.__class__ = _Reordered
    return model


@ranks(2)
def test_fused_attention_is_understood_by_what_it_computes():
    """A forward with another source text is cut if it computes the same, and refused if it does not."""
    tokens = drawn(2, 16)
    model = parallelize(_attention_of(make("phi3"), False), *meshes(tp=2), sequence_parallel=True)
    check_trains_as(reference("phi3", False, tokens), model, tokens)
    with pytest.raises(ValueError, match="Own, which cuts its qkv_proj in a way"):
        parallelize(_attention_of(make("phi3"), True), *meshes(tp=2), sequence_parallel=True)


@ranks(1)
def test_a_mask_of_the_same_name_is_not_transformers_own(monkeypatch):
    model = make("llama")
    check_attention(model)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None)
    with pytest.raises(Unknown, match="masks made by create_causal_mask"):
        check_attention(model)


@pytest.mark.parametrize("name", [name for name in ("qwen2_moe", "deepseek_v3") if name in FAMILIES])
@ranks(2)
def test_shared_experts_are_sharded(name):
    model = parallelize(make(name), *meshes(tp=2))
    weights = [p for n, p in model.named_parameters() if ".shared_expert." in n or ".shared_experts." in n]
    assert len(weights) in (3, 6)  # of one layer, or of both
    assert all(any(placement.is_shard() for placement in _tp_placements(weight)) for weight in weights)


@ranks(2)
def test_only_token_ids_may_be_positional():
    model, tokens = parallelize(make("llama"), *meshes(tp=2), sequence_parallel=True), drawn(2, 16)
    by_place, by_name = (found.logits.full_tensor() for found in (model(tokens), model(input_ids=tokens)))
    assert torch.equal(by_place, by_name)
    with pytest.raises(ValueError, match="2 positional arguments: only input_ids may be one"):
        model(tokens, torch.ones_like(tokens))


@ranks(2)
def test_models_without_a_plan_are_told_what_is_missing():
    mesh, dp_cp = meshes(tp=2)
    with pytest.raises(ValueError, match="tensor parallelism of GPT2LMHeadModel is not supported .*embed_tokens"):
        parallelize(make("gpt2"), mesh, dp_cp)
    mesh, dp_cp = meshes(cp=2)
    with pytest.raises(ValueError, match="context parallelism of Wired .*data parallel alone"):
        parallelize(_wired(), mesh, dp_cp)
    with pytest.raises(ValueError, match="lacks ranks of cp_mesh"):
        parallelize(make("llama"), mesh, mesh["dp"])
    mesh, dp_cp = meshes(tp=2)
    model = LlamaForCausalLM(family_config("llama", num_key_value_heads=1))
    with pytest.raises(ValueError, match="num_key_value_heads is 1"):
        parallelize(model, mesh, dp_cp)
    for name, draws in (
        ("phi3", "resid_pdrop"),
        ("mixtral", "router_jitter_noise"),
        ("deepseek_v3", "attention_dropout"),
    ):
        model = make(name)
        setattr(model.config, draws, 0.1)
        with pytest.raises(ValueError, match=f"{draws} is 0.1: tensor-parallel ranks would draw different numbers"):
            parallelize(model, mesh, dp_cp)


@ranks(2)
def test_any_model_is_data_parallel():
    """One whose layers lie elsewhere, too; its log-probabilities come through its logits."""
    mesh, dp_cp = meshes(dp=2)
    model, tokens = parallelize(make("gpt2", True), mesh, dp_cp), drawn(2, 16)
    assert all(isinstance(layer, FSDPModule) for layer in model.transformer.h)
    causal_lm_loss(model, tokens[mesh["dp"].get_local_rank()][None])[:, :-1].mean().backward()
    check_gradients(model, reference("gpt2", True, tokens)[2])


def _other(what):
    """A Llama that differs from `make("llama")` in one thing, and options."""
    model, options = make("llama"), {}
    if what == "weights":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    elif what == "class or parameters":
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    elif what == "plan":
        options["custom_parallel_plan"] = dict(reversed(PLAN.items()))
    else:
        options["activation_checkpointing"] = True
    return model, options


@pytest.mark.parametrize("what", ["class or parameters", "weights", "plan", "options"])
@ranks(2)
def test_ranks_that_differ_are_refused_on_every_rank(what):
    """The refusal comes before any parameter is sharded; then the same call with equal models goes on."""
    mesh, dp_cp = meshes(tp=2)
    same = {"custom_parallel_plan": PLAN} if what == "plan" else {}
    model, options = _other(what) if torch.distributed.get_rank() else (make("llama"), {})
    with pytest.raises(ValueError, match=f"parallelize: ranks differ in the .*{what}, so that"):
        parallelize(model, mesh, dp_cp, **same | options)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    parallelize(make("llama"), mesh, dp_cp, **same)


@ranks(2)
def test_what_one_rank_refuses_is_refused_on_every_rank():
    plan = {"lm_head": "diagonal"} if torch.distributed.get_rank() else PLAN
    said = "'diagonal' is unknown" if torch.distributed.get_rank() else "another rank refused"
    with pytest.raises(ValueError, match=said):
        parallelize(make("llama"), *meshes(tp=2), custom_parallel_plan=plan)


@ranks(2)
def test_a_model_is_made_parallel_once():
    mesh, dp_cp = meshes(tp=2)
    model = parallelize(make("llama"), mesh, dp_cp)
    with pytest.raises(ValueError, match="LlamaForCausalLM has parameters that are DTensors: it is parallel already"):
        parallelize(model, mesh, dp_cp)
    check_trains_as(reference("llama", False, drawn(2, 8)), model, drawn(2, 8))


@pytest.mark.parametrize("name", ["llama", "gemma3_multimodal"])
@ranks(2)
def test_a_second_model_of_the_same_config_is_left_alone(name):
    """A policy and its reference, say: one is made parallel, the other attends as before."""
    tokens = drawn(2, 16)
    mesh, dp_cp = meshes(tp=2)
    policy = make(name)
    state, before = policy.state_dict(), policy.config.to_json_string()
    other = type(policy)(policy.config)
    other.load_state_dict(state)
    expected = other(input_ids=tokens).logits
    config = other.config
    parallelize(policy, mesh, dp_cp, sequence_parallel=True)
    assert config.to_json_string() == before
    assert torch.equal(other(input_ids=tokens).logits, expected)
    assert error(policy(input_ids=tokens).logits, expected) < 3e-6
    third = parallelize(type(other)(config), mesh, dp_cp)
    assert third.config is not config


def test_plans_by_name():
    model = make("llama")
    model._tp_plan = {
        "lm_head": "colwise",
        "model.layers.*.wire": "rowwise",
        "model.layers.*.whole": "replicate",
        "model.layers.*.experts": "moe_tp_experts",
        "model.layers.*.experts.down_proj": "rowwise",  # a parameter: our style of the experts cuts it
    }
    plan = get_hf_tp_plan(model)
    assert {name for name in plan if "experts" in name or "whole" in name} == {"model.layers.*.experts"}
    assert isinstance(plan["model.layers.*.wire"], RowwiseParallel)
    assert isinstance(plan["model.layers.*.self_attn.q_proj"], ColwiseParallel)
    assert isinstance(plan["model.embed_tokens"], RowwiseParallel)
    assert plan["lm_head"].use_local_output is False
    with pytest.raises(ValueError, match="unknown: it must be one of .*'colwise'"):
        translate_parallel_style("sideways")
    functions = megatron_ext.dtensor.PARALLIZE_FUNCTIONS
    assert functions[LlamaForCausalLM] is _parallelize_llama
    assert len(functions) == 5


@ranks(2)
def test_fused_projection_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"parts of sizes \[3, 5\]: they must be multiples of the 2 tensor-parallel"):
        FusedColwise((3, 5))._apply(torch.nn.Linear(4, 8), meshes(tp=2)[0]["tp"])
