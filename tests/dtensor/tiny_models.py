"""Any causal model of transformers, built tiny: its config made small by the names of its attributes."""

import contextlib
import copy
import itertools
import re

import torch
import transformers

from tests.dtensor.models import MORE, VOCAB

MOST_PARAMETERS = 20_000_000
# By the last word of an attribute of a config, what makes it small; an attribute that is 0 or None stays so.
SMALL = {
    r"(mamba_n_heads|mamba_num_heads|n_mamba_heads|mamba_d_state|state_size|mamba_d_head|mamba_head_?dim)$": 8,
    r"(attention_hidden_size)$": 64,
    r"(num_kv_shared_layers)$": 0,
    r"(vocab_size(_per_layer_input)?|pad_vocab_size|n_words)$": VOCAB,
    r"(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|model_dim|dim_model|emb_dim|embedding_dim)$": 32,
    r"(n_embed|encoder_hash_byte_group_vocab|embedding_size|lru_width|ple_embed_dim|ngram_vocab_size_base)$": 32,
    r"(moe_intermediate_size|shared_experts?_intermediate_size|expert_ffn_hidden_size|shared_intermediate_size)$": 24,
    r"(intermediate_size(_mlp)?|ffn_dim|d_ff|inner_dim|d_inner|dim_ff|n_inner|ffn_hidden_size|hidden_dim)$": 48,
    r"(num_hidden_layers|n_layers?|num_layers|num_blocks|num_(de|en)coder_layers|(de|en)coder_layers|depth)$": 2,
    r"(num_key_value_heads|num_kv_heads|multi_query_group_num|kv_n_heads|num_query_groups)$": 2,
    r"(num_attention_heads|n_heads?|num_heads|attention_heads|linear_num_(key|value)_heads)$": 4,
    r"(attention_head_dim|kv_channels|qk_rope_head_dim|qk_nope_head_dim|v_head_dim)$": 8,
    r"(qk_head_dim|q_lora_rank|kv_lora_rank|o_lora_rank|adapter_rank|hc_lowrank|laurel_rank)$": 16,
    r"(head_dim|hidden_size_per_layer_input|rotary_dim)$": 8,
    r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|zero_expert_num)$": 4,
    r"(num_experts_per_tok|num_experts_per_token|moe_k|top_k_experts|moe_topk|moe_top_k)$": 2,
    r"((^|_)n_groups?|expert_group|topk_group|ngroups|first_k_dense_replace)$": 1,
    r"(max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length)$": 128,
    r"(sliding_window|attention_window|attention_chunk_size|attention_window_size|chunk_size|chunk_length)$": 8,
}
# What takes the place of None.
UNSAID = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "vocabulary_map": {"<image>": 5},
    "mlp_layer_types": ["dense", "sparse"],
}
ZERO = r"(dropout|drop|pdrop|dropout_rate|layerdrop|dropout_prob|dropout_p|router_jitter_noise|aux_loss_prob)$"
LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attn_layers")

ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LOCAL = {"vocab_size": VOCAB, "hidden_size": 32, "hidden_size_global": 32, "num_attention_heads": 4, "head_dim": 8}
_LOCAL |= {"num_key_value_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
_IMAGES = {"vision_config": {"image_size": 8, "patch_size": 4}}
_CODES = {"base_channels": 32, "channel_multiplier": [1], "embed_dim": 8}
# Arguments of configs that no rule makes small, or whose defaults make no model; of those inside of others too.
OWN = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "BlipConfig": _IMAGES,
    "BltConfig": {"patch_in_forward": False, "encoder_hash_byte_group_vocab": 64, "max_position_embeddings": 128}
    | {f"{part}_config": _LOCAL for part in ("patcher", "encoder", "decoder", "global")},
    "ChameleonConfig": {"vq_config": _CODES | {"num_embeddings": 16, "resolution": 8, "attn_resolutions": None}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "CohereCompassConfig": {
        "text_config": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    },
    "GraniteMoeHybridConfig": MORE["granite_moe_hybrid"][1] if "granite_moe_hybrid" in MORE else {},
    "DbrxConfig": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "Dots3NoteTextConfig": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "Emu3Config": {
        "vq_config": _CODES | {"codebook_size": 16, "latent_channels": 8, "attn_resolutions": [8]},
        "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6},
    },
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "Florence2Config": {
        "vision_config": {name: 4 * [size] for name, size in (("embed_dim", 16), ("num_heads", 2), ("num_groups", 2))}
        | {"depths": [1, 1, 1, 1], "projection_dim": 32},
    },
    "GitConfig": _IMAGES,
    "Glm4vMoeTextConfig": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    "Granite4VisionConfig": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "IdeficsConfig": _IMAGES | {"use_resampler": False},
    "JanusConfig": {
        "vision_config": {"projection_dim": 32, "num_image_tokens": 4},
        "vq_config": _CODES
        | {"num_embeddings": 16, "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4},
    },
    "Kosmos2Config": _IMAGES | {"latent_query_num": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "n_groups": 1},
    "Mistral4Config": {"num_key_value_heads": 4, "head_dim": 16, "qk_head_dim": 16},
    "Pix2StructTextConfig": {"d_kv": 8},
    "Pix2StructVisionConfig": {"d_kv": 8},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "full_attention"],
        "use_cache": False,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "ReformerConfig": {
        "hash_seed": 1,
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "num_buckets": 2,
    },
    "Step3p7TextConfig": {"sliding_window": 8},
    "UdopConfig": {"decoder_start_token_id": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 4, "mamba_dt_rank": 4},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "xLSTMConfig": {"mode": "train", "return_last_states": True, "hidden_size": 64, "num_heads": 4, "chunk_size": 8}
    | {"embedding_dim": 64, "num_hidden_layers": 2, "num_blocks": 2, "qk_dim_factor": 1.0},
}


_PIXELS = {"pixel_values": torch.ones(2, 3, 8, 8)}
# Arguments beside token ids and labels without which a forward of a class raises.
INPUTS = {
    "BlipForConditionalGeneration": _PIXELS,
    "GitForCausalLM": _PIXELS,
    "IdeficsForVisionText2Text": {
        "pixel_values": torch.ones(2, 1, 3, 8, 8),
        "image_attention_mask": torch.ones(2, 24, 1, dtype=torch.long),
    },
    "Kosmos2ForConditionalGeneration": _PIXELS
    | {"image_embeds_position_mask": (torch.arange(24) < 4).long().expand(2, 24)},
    "Molmo2ForConditionalGeneration": {"mm_token_type_ids": torch.zeros(2, 24, dtype=torch.long)},
    "Pix2StructForConditionalGeneration": {"flattened_patches": torch.ones(2, 4, 34)},
    "UdopForConditionalGeneration": {"bbox": torch.zeros(2, 24, 4)},
}


def small_value(config, name, layers):
    """The attribute `name` of a config, made small; None where it stays as it is."""
    value = vars(config)[name]
    if value is None:
        return UNSAID.get(name)
    if name == "num_key_value_heads" and value == getattr(config, "num_attention_heads", 0):
        return 4
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return 0.0 if value and re.search(ZERO, name) else None
    if isinstance(value, int) and value:
        small = next((small for pattern, small in SMALL.items() if re.search(pattern, name)), None)
        return layers if small == 2 and re.search(r"layers?$|num_blocks$|depth$", name) else small
    if isinstance(value, list) and name in LAYER_KINDS:
        return (list(dict.fromkeys(value)) * layers)[:layers]
    if name == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
        return value | {"mrope_section": [2, 1, 1]}
    return None


def shrink(config, layers=2, pad=None):
    """`config` with each size small, and each dropout 0."""
    for name, value in sorted(vars(config).items(), key=lambda item: item[0] != "num_key_value_heads"):
        if isinstance(value, transformers.PreTrainedConfig):
            _with(shrink(value, layers, pad), OWN.get(type(value).__name__, {}))
        elif (small := small_value(config, name, layers)) is not None:
            _set(config, name, small)
        elif name.endswith("token_id") and isinstance(value, int):
            _set(config, name, pad if name == "pad_token_id" else 1)
    return config


def small_arguments(config, layers=2, pad=None):
    """Arguments with which the class of `config` makes a small config, whose derived values fit the small sizes."""
    found = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            found[name] = small_arguments(value, layers, pad) | OWN.get(type(value).__name__, {})
        elif name not in LAYER_KINDS and (small := small_value(config, name, layers)) is not None:
            found[name] = small
        elif name.endswith("token_id") and isinstance(value, int):
            found[name] = pad if name == "pad_token_id" else 1
    return found


def _set(config, name, value):
    with contextlib.suppress(Exception):
        setattr(config, name, value)


def _with(config, own):
    for name, value in own.items():
        if not isinstance(value, dict):
            _set(config, name, value)
    return config


def _configs(kind):
    """Ways to a small config of a class of models, the likeliest first."""
    config = kind.config_class
    own = OWN.get(config.__name__, {})
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    for layers, pad in itertools.product((2, 4, 8), (None, 1)):
        yield lambda layers=layers, pad=pad: _with(shrink(config(**own), layers, pad), own)
        yield lambda layers=layers, pad=pad: config(**small_arguments(config(), layers, pad) | own)
        yield lambda pad=pad: config(**sizes | {"pad_token_id": pad} | own)
        yield lambda pad=pad: shrink(config(**sizes | {"pad_token_id": pad} | own), 2, pad)


def tiny(kind):
    """A tiny model of a class of transformers; a ValueError that says why it cannot be built, or called with text."""
    faults = []
    for make in _configs(kind):
        try:
            torch.manual_seed(1)
            config = make()
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count / 1e6:.0f} million parameters")
            model = kind(config).train()
            copy.deepcopy(model)(**batch(model))
            return model
        except Exception as fault:
            said = str(fault).strip().splitlines()[:1] or [""]
            faults.append(f"{type(fault).__name__}: {said[0][:80]}")
    raise ValueError(faults[0])


def batch(model):
    """Token ids and labels, some of which are no target."""
    codebooks = getattr(model.config, "num_codebooks", None)
    if codebooks and isinstance(model.get_input_embeddings(), torch.nn.ModuleList):  # Musicgen: a row for each of them
        ids = torch.randint(2, VOCAB, (2 * codebooks, 24), generator=torch.Generator().manual_seed(3))
        return {"input_ids": ids, "labels": ids.view(2, codebooks, 24).transpose(1, 2).contiguous()}
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(2, min(rows, VOCAB), (2, 24), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :4] = labels[-1, 20:] = -100
    return {"input_ids": ids, "labels": labels, **INPUTS.get(type(model).__name__, {})}
