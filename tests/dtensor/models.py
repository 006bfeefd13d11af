"""Tiny transformers models, and what one process makes of them: the truth for every layout."""

import copy

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97  # odd: shards are uneven
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
WINDOWED = {"sliding_window": 5}
GEMMA3 = {
    **SIZES,
    **WINDOWED,
    "head_dim": 8,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window_pattern": 2,
}


def _gemma3_multimodal(tied):
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**GEMMA3, tie_word_embeddings=tied).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=1,
        tie_word_embeddings=tied,
    )
    return Gemma3ForConditionalGeneration(config)


MAKERS = {
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)),
    "qwen2": lambda tied: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, **WINDOWED, use_sliding_window=True, max_window_layers=0, tie_word_embeddings=tied)
    ),
    "qwen3": lambda tied: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied)),
    "gemma3": lambda tied: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3, tie_word_embeddings=tied)),
    "gemma3_multimodal": _gemma3_multimodal,
}


def make(name, tied=False):
    """The same model on every rank. Norm weights are random: ones would hide what is done to them."""
    torch.manual_seed(1)
    model = MAKERS[name](tied)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.train()


def copy_of(model):
    return copy.deepcopy(model)
