"""Sizes of an lm head on one rank: given, or read from a Hugging Face config or a Megatron script's arguments."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one training step of a head.

    `tokens`: the tokens of a micro-batch, before sequence parallelism splits them; `width`: the hidden size; `vocab`:
    the whole padded vocabulary, of which each of `ranks` holds a shard; `dtype`: the dtype of hidden states and weight.
    """

    tokens: int
    width: int
    vocab: int
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for option, value in (
            ("--tokens", self.tokens),
            ("--hidden", self.width),
            ("--vocab", self.vocab),
            ("--tp", self.ranks),
        ):
            if value < 1:
                raise ValueError(f"{option} is {value}: it must be at least 1; pass the job's number")
        if self.vocab % self.ranks:
            raise ValueError(
                f"--vocab is {self.vocab}: it must be a multiple of --tp, {self.ranks}; pass the padded vocabulary"
            )
        if self.sequence_parallel and self.tokens % self.ranks:
            raise ValueError(
                f"--tokens is {self.tokens}: with sequence parallelism it must be a multiple of --tp, {self.ranks}; "
                "pass the tokens of a whole micro-batch"
            )

    @property
    def columns(self) -> int:
        """Return the number of words in a rank's shard."""
        return self.vocab // self.ranks

    def __str__(self) -> str:
        layout = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"{self.tokens} tokens, hidden size {self.width}, vocabulary {self.vocab} over {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}{layout}, {_NAMES[self.dtype]}"
        )


def of_config(name: str) -> dict[str, Any]:
    """Read hidden size, vocabulary and dtype from the config of a model of transformers, in a folder or by name.

    Raises:
        ValueError: transformers is not installed, or finds no config, or the config lacks these sizes.
    """
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"--model is {name!r}, whose config cannot be read; its own code is never run: pass --hidden and --vocab "
            f"instead. {error}"
        ) from error
    found = {"width": getattr(config, "hidden_size", None), "vocab": getattr(config, "vocab_size", None)}
    if None in found.values():
        raise ValueError(
            f"--model is {name!r}: its {type(config).__name__} must have hidden_size and vocab_size; pass --hidden "
            "and --vocab instead"
        )
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # "torch_dtype" up to transformers 4.55
    dtype = getattr(config, name, None)
    return found | ({"dtype": dtype} if dtype in _NAMES else {})


def of_megatron_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the sizes that a Megatron script would take from its arguments, and the flags that do not concern sizes.

    Raises:
        ValueError: a flag lacks its number.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag in (
        *("hidden-size", "seq-length", "padded-vocab-size", "vocab-size"),
        *("tensor-model-parallel-size", "context-parallel-size", "micro-batch-size", "make-vocab-size-divisible-by"),
    ):
        parser.add_argument(f"--{flag}", type=int)
    for flag in ("bf16", "fp16", "sequence-parallel"):
        parser.add_argument(f"--{flag}", action="store_true")
    try:
        given, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"--megatron: {error}") from error
    ranks = given.tensor_model_parallel_size or 1
    found = {
        "width": given.hidden_size,
        "vocab": given.padded_vocab_size,
        "ranks": ranks,
        "dtype": DTYPES["bf16" if given.bf16 else "fp16" if given.fp16 else "fp32"],
        "sequence_parallel": given.sequence_parallel and ranks > 1,
    }
    if given.seq_length is not None:
        found["tokens"] = given.seq_length * (given.micro_batch_size or 1) // (given.context_parallel_size or 1)
    if found["vocab"] is None and given.vocab_size is not None:  # padded as Megatron does it
        multiple = (given.make_vocab_size_divisible_by or 128) * ranks
        found["vocab"] = -(-given.vocab_size // multiple) * multiple
    ignored = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return {name: value for name, value in found.items() if value is not None}, ignored
