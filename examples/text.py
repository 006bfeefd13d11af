"""Real text without a download: Python's documentation and standard library, and a byte-level BPE trained on them.

Tokens are kept under `runs/text/`, in a folder named after the text and the vocabulary, so that only the first run
tokenizes. The same text gives the same tokens, always.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from filelock import FileLock  # torch depends on it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

CACHE = Path("runs/text")
END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCAB = 256 + 1  # every byte, and the end of a document
NOT_PROSE = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}


def documents(files: list[str] | None = None) -> list[str]:
    """Return the text of each document: of `files`, or if there are none of Python's documentation and sources."""
    if files:
        paths = [Path(file) for file in files]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in sorted(library.rglob("*.py")) if not NOT_PROSE & {*path.relative_to(library).parts}]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return texts if files else [topics[name] for name in sorted(topics)] + texts


def tokenize(texts: list[str], vocab_size: int) -> tuple[np.ndarray, Tokenizer]:
    """Train a byte-level BPE on `texts`; return all documents' tokens, one int32 array, and the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*encoding.ids, end], dtype=np.int32) for encoding in encodings]), tokenizer


def load_tokens(files: list[str] | None, vocab_size: int) -> np.ndarray:
    """Return the text as token ids below `vocab_size`, int32 [number of tokens], from the cache or newly made.

    Ranks may call this function at the same time: one makes the tokens, the others wait for its lock.
    """
    texts = documents(files)
    digest = hashlib.sha256(f"{vocab_size}\0".encode() + "\0".join(texts).encode(errors="replace")).hexdigest()[:16]
    folder = CACHE / digest
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "tokens.npy").exists():
            tokens, tokenizer = tokenize(texts, vocab_size)
            tokenizer.save(str(folder / "tokenizer.json"))
            np.save(folder / "unfinished.npy", tokens)
            os.replace(folder / "unfinished.npy", folder / "tokens.npy")  # so the file is complete whenever it exists
    return np.load(folder / "tokens.npy", mmap_mode="r")


def mock_tokens(vocab_size: int) -> np.ndarray:
    """Return ids that count upwards, again and again, in the place of a text: int32 [2^18]."""
    return np.arange(2**18, dtype=np.int32) % vocab_size


class Samples:
    """Samples of `seq_length + 1` consecutive tokens; each pass over the text has its own random order.

    Sample i depends on the text, the length and the seed alone: a run that knows how many samples it has consumed goes
    on with the next one, on any number of ranks.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, seed: int):
        self.tokens, self.seq_length, self.seed = tokens, seq_length, seed
        self.per_epoch = (len(tokens) - 1) // seq_length
        if self.per_epoch < 1:
            raise ValueError(
                f"the text has {len(tokens)} tokens, fewer than seq_length + 1 = {seq_length + 1}: "
                "give --data more text, or choose a shorter --seq-length"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, i: int) -> Tensor:  # int64 [seq_length + 1]
        epoch, position = divmod(i, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.per_epoch, generator=generator)
        start = int(self._order[position]) * self.seq_length
        return torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))

    def microbatches(self, start: int, count: int, size: int, replica: int, replicas: int) -> Iterator[Tensor]:
        """Yield `count` micro-batches, int64 [size, seq_length + 1]: the replica's part of the samples from `start`."""
        for microbatch in range(count):
            first = start + (microbatch * replicas + replica) * size
            yield torch.stack([self[first + i] for i in range(size)])
