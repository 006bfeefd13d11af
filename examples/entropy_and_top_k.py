"""Entropy, log-probabilities and likeliest tokens of a Hugging Face model, read from hidden states without logits.

    python examples/entropy_and_top_k.py                               # a tiny Llama of bytes, drawn at random
    python examples/entropy_and_top_k.py --model DIRECTORY --top-k 20  # a model and its tokenizer, as they were saved

All of them come from one pass over this file's text. Next to each stands the same from the model's own logits, and the
largest difference of a token. A model that scales or caps its logits needs `LmHead.of(..., logit_scale=, softcap=)`.
"""

import argparse
import sys
from pathlib import Path

import hf_directory
import torch
from torch import Tensor, nn

from megatron_ext import Entropy, LmHead, LogProbs, TopK

NAMES = ("entropy", "log-probability of the next token", "log-probabilities of the likeliest")


def from_hidden_states(model: nn.Module, tokens_1S: Tensor, k: int) -> tuple[Tensor, ...]:
    """`[S - 1]` entropies and log-probabilities, `[S - 1, k]` log-probabilities and ids of the likeliest."""
    hidden_SD = model.base_model(tokens_1S).last_hidden_state[0]
    head, readouts = LmHead.of(model.get_output_embeddings()), (Entropy(), LogProbs(tokens_1S[0, 1:]), TopK(k))
    entropy_S, log_probs_S, (values_SK, ids_SK) = head.read(hidden_SD[:-1], *readouts)
    return entropy_S, log_probs_S, values_SK, ids_SK


def from_logits(model: nn.Module, tokens_1S: Tensor, k: int) -> tuple[Tensor, ...]:
    """The same from the model's logits."""
    log_probs_SV = model(tokens_1S).logits[0, :-1].float().log_softmax(-1)
    of_labels_S = log_probs_SV.gather(-1, tokens_1S[0, 1:, None]).squeeze(-1)
    return -(log_probs_SV.exp() * log_probs_SV).sum(-1), of_labels_S, *log_probs_SV.topk(k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIRECTORY", help="of a causal language model and its tokenizer")
    parser.add_argument("--top-k", type=int, default=5, metavar="K")
    args = parser.parse_args()
    text = Path(__file__).read_text()
    try:
        if args.model:
            model, tokenizer = hf_directory.load(args.model)
            tokens_1S = tokenizer(text, return_tensors="pt").input_ids
        else:
            model = hf_directory.new_model(hidden_size=64, layers=2, vocab_size=256, tied=False, seed=0)
            tokens_1S = torch.tensor([list(text.encode())])
        with torch.no_grad():
            ours, stock = (read(model.eval(), tokens_1S, args.top_k) for read in (from_hidden_states, from_logits))
    except ValueError as error:
        sys.exit(f"entropy_and_top_k.py: {error}")
    print(f"{tokens_1S.shape[1]} tokens, means".ljust(36), f"{'hidden states':>14}{'logits':>14}{'apart':>14}", sep="")
    for name, a, b in zip(NAMES, ours, stock, strict=False):
        print(f"{name:<36}{a.mean():>14.6f}{b.mean():>14.6f}{(a - b).abs().max():>14.0e}")
    print(f"tokens with the same {args.top_k} likeliest ids: {(ours[3] == stock[3]).all(-1).sum()} of {len(ours[3])}")


if __name__ == "__main__":
    main()
