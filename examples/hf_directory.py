"""Causal language models of Hugging Face and their tokenizers, new ones or from a directory."""

from pathlib import Path
from typing import Any

import numpy as np
import text
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # these files are written and read in a moment


def new_model(hidden_size: int, layers: int, vocab_size: int, tied: bool, seed: int) -> nn.Module:
    """Make a small Llama with heads of 16 channels, of which two share keys and values; `seed` gives its weights."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 16,
        num_key_value_heads=hidden_size // 32,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def new_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`; its id 0 ends a document."""
    _, tokenizer = text.tokenize(texts, vocab_size)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=text.END_OF_DOCUMENT)


def load(directory: str) -> tuple[nn.Module, Any]:
    """Load the model, in fp32, and the tokenizer that transformers or our `save_pretrained` has written.

    Raises:
        ValueError: the directory has no model and tokenizer that can be loaded.
    """
    if not (Path(directory) / "config.json").is_file():
        raise ValueError(f"--model is {directory!r}, which has no config.json; give a Hugging Face model's directory")
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model is {directory!r}, of which no model and tokenizer can be loaded: {error}") from None


def tokenize(texts: list[str], tokenizer: Any) -> np.ndarray:
    """Return the tokens of all documents as one int32 array, each followed by the end token if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.array([*ids, *end], dtype=np.int32) for ids in encoded])
