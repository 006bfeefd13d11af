"""Tiny transformers models, what one process makes of them, and the meshes that they are sharded over."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor import _parallelize_model, causal_lm_loss
from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output import hidden_states_or_logits
from megatron_ext.dtensor.output.reads import say_once
from megatron_ext.sequence.next_token import next_tokens
from tests.left_behind import cached_with_groups

VOCAB = 97  # odd: shards are uneven
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
}
WINDOW = 5
GEMMA3 = SIZES | {
    "head_dim": 8,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,  # transformers 4.51 and 5 say in two ways that one layer is windowed and one is not
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def _multimodal(tied):
    config = transformers.Gemma3Config(
        text_config=family_config("gemma3", tied).to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=1,
        tie_word_embeddings=tied,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _with_images(name):
    """The class for images and text of a family, with a tiny vision tower."""

    def made(tied):
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
        vision |= {"out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16}
        text, prefix = family_config(name, tied).to_dict(), MORE[name][0]
        config = getattr(transformers, f"{prefix}Config")
        config = config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
        return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)

    return made


MOE = SIZES | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Names of transformers' classes without "Config" and "ForCausalLM", and what makes them tiny. What a family has of its
# own is on: windows, caps, multipliers, sinks, layers without positions, experts beside dense layers.
BASIC = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 8}),
    "gemma3": ("Gemma3", GEMMA3),
}
NAMES = (*BASIC, "gemma3_multimodal")
FAMILIES = {
    "mistral": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "phi3": ("Phi3", SIZES | {"sliding_window": WINDOW, "resid_pdrop": 0.0}),
    "gemma2": ("Gemma2", GEMMA3 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "glm4": ("Glm4", SIZES | {"head_dim": 8, "attention_bias": True}),
    "olmo2": ("Olmo2", SIZES),
    "granite": (
        "Granite",
        SIZES
        | {
            "embedding_multiplier": 3.0,
            "logits_scaling": 7.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3", SIZES | {"no_rope_layers": [1, 0]}),
    "apertus": ("Apertus", SIZES),
    "nemotron": ("Nemotron", SIZES | {"head_dim": 8}),
    "cohere": ("Cohere", SIZES | {"logit_scale": 0.3, "use_qk_norm": True}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 8, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40}),
    "deepseek_v3": (
        "DeepseekV3",
        SIZES
        | LATENT
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
}


# Families that the table has beside these: some follow from their structure alike, some are not understood.
MORE = {
    "gemma": ("Gemma", SIZES | {"head_dim": 8}),
    "cohere2": ("Cohere2", SIZES | {"sliding_window": WINDOW, "logit_scale": 0.3}),
    "starcoder2": (
        "Starcoder2",
        SIZES | {"sliding_window": WINDOW, "residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "seed_oss": (
        "SeedOss",
        SIZES | {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "olmoe": ("Olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4Moe",
        MOE | {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "llama4": (
        "Llama4",
        SIZES
        | {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8,
        },
    ),
    "qwen3_next": ("Qwen3Next", MOE | LINEAR | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 40}),
    "qwen3_5": ("Qwen3_5", SIZES | LINEAR),
    "qwen3_5_moe": ("Qwen3_5Moe", MOE | LINEAR | {"shared_expert_intermediate_size": 40}),
    "olmo_hybrid": ("OlmoHybrid", SIZES | LINEAR),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        SIZES
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_d_head": 8,
            "mamba_chunk_size": 8,
            "logits_scaling": 3.0,
        },
    ),
    "inkling2": (
        "Inkling2",
        {name: value for name, value in SIZES.items() if name != "intermediate_size"}
        | {
            "head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "unpadded_vocab_size": VOCAB,
            "rel_extent": 16,
            "d_rel": 4,
            "eos_token_id": None,
        },
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}
        | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
}


def family_config(name, tied=False, **overrides):
    prefix, options = (BASIC | FAMILIES | MORE)[name]
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    return config(**options | overrides, tie_word_embeddings=tied)


def _class_name(prefix):
    return f"{prefix}{'LMHeadModel' if prefix == 'GPT2' else 'ForCausalLM'}"


def _family(name):
    prefix, _ = (BASIC | FAMILIES | MORE)[name]
    return lambda tied: getattr(transformers, _class_name(prefix))(family_config(name, tied))


# transformers 4.51 lacks some, and has two whose attention is outside of its interface. The names do not import the
# classes: imports of all of them would take a third of a second of every process of ranks.
CLASS_NAMES = set(transformers.__all__)
STACKED = _class_name("GptOss") in CLASS_NAMES  # whether experts are one parameter
OLD_ATTENTION = () if STACKED else ("nemotron", "qwen2_moe")
FAMILIES = {name: family for name, family in FAMILIES.items() if name not in OLD_ATTENTION}
FAMILIES, MORE = (
    {name: family for name, family in families.items() if _class_name(family[0]) in CLASS_NAMES}
    for families in (FAMILIES, MORE)
)


def of_family(name):
    """Mark of a test whose family an older transformers does not have."""
    return pytest.mark.skipif(name not in FAMILIES | MORE, reason=f"this transformers has no {name}")


HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "granite_moe_hybrid", "inkling2")
MIXTURES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "llama4")
MIXTURES += ("qwen3_next", "qwen3_5_moe", "granite_moe_hybrid", "inkling2")
WITH_IMAGES = {f"{name}_multimodal": _with_images(name) for name in ("qwen3_5", "qwen3_5_moe") if name in MORE}
_MAKERS = {name: _family(name) for name in (*BASIC, *FAMILIES, *MORE)}
_MAKERS |= {"gemma3_multimodal": _multimodal} | WITH_IMAGES


def drawn(*shape):
    """Token ids, the same on every rank."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(3))


def batch(rows=2, tokens=9):
    """Token ids and labels as transformers takes them, some of which are no target."""
    ids = drawn(rows, tokens)
    labels = ids.clone()
    labels[0, :4] = labels[-1, 7:] = -100
    return {"input_ids": ids, "labels": labels}


def make(kind, tied=False):
    """The same model on every rank. Biases and norm weights are not left at 0 and 1, which hide errors."""
    torch.manual_seed(1)
    model = _MAKERS[kind](tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.float().train()


def logits_proof(model):
    """The proof that what is read from hidden states equals what is read from the logits of `model`."""
    given = {"input_ids": drawn(2, 9), "use_cache": False}
    return hidden_states_or_logits._decision(model, output_head_path(model), given)[0]


@cached_with_groups
def meshes(dp=1, cp=1, tp=1):
    """The ranks of this world as a mesh, and its data- and context-parallel ranks as one dim."""
    mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    return mesh, mesh["dp", "cp"]._flatten("dp_cp")


def parallelize(model, mesh, dp_cp, param_dtype=torch.float32, **options):
    return _parallelize_model(model, dp_cp, mesh["tp"], param_dtype, cp_mesh=mesh["cp"], **options)


def documents(tokens, cu_seqlens):
    """The rows or packed documents of `tokens`, each `[1, length]`."""
    return tokens.split(1) if cu_seqlens is None else tokens.split(cu_seqlens.diff().tolist(), 1)


def reference(name, tied, tokens, cu_seqlens=None):
    """transformers' own eager attention, document by document: logits of all, gradients of the mean next-token loss."""
    model = make(name, tied)
    text = model.config.get_text_config()
    model.config._attn_implementation = text._attn_implementation = "eager"
    logits = [model(input_ids=x, use_cache=False).logits for x in documents(tokens, cu_seqlens)]
    losses = [
        F.cross_entropy(z[0, :-1], x[0, 1:], reduction="none")
        for z, x in zip(logits, documents(tokens, cu_seqlens), strict=True)
    ]
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return torch.cat(logits, 1 if cu_seqlens is not None else 0).detach(), loss.item(), gradients


def error(found, true, scale=0.0):
    """Relative, of `found`; `scale` is a norm below which there is nothing but rounding to compare with."""
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return ((found - true).norm() / max(true.norm(), scale)).item()


def loss_and_gradients(model, way="use_fused_loss", **given):
    """The loss of `model(**given)`, or by another way, and its gradients by name, of which the model keeps none."""
    loss = mean_loss(way, model, given)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, gradients


def mean_loss(way, model, given):
    """The loss of a batch by the model's own fused forward, or as a loop of one's own reads it from hidden states."""
    if way == "use_fused_loss":
        return model(**given).loss
    losses = causal_lm_loss(model, given["input_ids"], labels=given["labels"])
    return losses.sum() / (next_tokens(given["labels"]) != -100).sum()


def assert_same(found, expected, tolerance=3e-6):
    """Losses with their gradients by name, as `loss_and_gradients` gives them."""
    assert error(found[0], expected[0]) <= tolerance
    assert all(error(found[1][name], gradient) <= tolerance for name, gradient in expected[1].items())


def check_step(model, loss, expected, gradients, tolerance=3e-6):
    """A loss and the gradients that it leaves in `model` are these; the model keeps none."""
    assert error(loss, expected) <= tolerance
    loss.backward()
    check_gradients(model, gradients, tolerance)
    model.zero_grad()


@contextlib.contextmanager
def told(words):
    """A warning that is given once, as if none had been given yet."""
    say_once.cache_clear()
    with pytest.warns(UserWarning, match=words):
        yield


_OF_GATES = ("in_proj_a.weight", "in_proj_ba.weight")
_OF_BLOCK = ("up_proj.weight",)
_SUMMED_WITH = {
    "bias": ("weight",),
    "dt_bias": _OF_GATES,
    "A_log": _OF_GATES,
    "alpha_p": _OF_BLOCK,
    "alpha_n": _OF_BLOCK,
}


def check_gradients(model, gradients, tolerance=3e-6):
    """Every parameter's gradient against `gradients`, a dict by name."""
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    errors = {}
    for name, true in gradients.items():
        # A bias's gradient may be a sum in which most cancels: its rounding is that of what was summed.
        layer, _, kind = name.replace(".act_fn.", ".").rpartition(".")
        summed = [gradients[key] for part in _SUMMED_WITH.get(kind, ()) if (key := f"{layer}.{part}") in gradients]
        errors[name] = error(found[name], true, max((x.norm() for x in summed), default=0.0))
    assert len(errors) == len(gradients)
    assert all(e <= tolerance for e in errors.values()), sorted(errors.items(), key=lambda item: -item[1])[:5]
    for name in found.keys() - gradients.keys():  # the vision tower
        assert found[name] is None, name
