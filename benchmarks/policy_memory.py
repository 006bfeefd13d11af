"""Peak memory of scoring and of a training step, beside full fp32 logits: `benchmarks.run cpu --only policy`.

The peak is counted on one rank, as bytes of all tensors beyond those alive before. The other way is that of most policy
workers: the model's logits, cast to fp32, a log-softmax over the vocabulary, and a gather.
"""

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.meter import peak_mib
from benchmarks.record import Found, Rows
from megatron_ext.policy import BatchedDataDict, DTensorPolicyWorker, NLLLoss

SIZES = {"rows": 4, "positions": 256, "vocab": 32000}


def model_config(vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )


def batch(rows: int, positions: int, vocab: int) -> BatchedDataDict:
    return BatchedDataDict(
        input_ids=torch.randint(vocab, (rows, positions), generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.full((rows,), positions),
        sample_mask=torch.ones(rows),
        token_mask=torch.ones(rows, positions),
    )


def full_logits(model: torch.nn.Module, data: BatchedDataDict) -> torch.Tensor:
    logits_BSV = model(input_ids=data["input_ids"], use_cache=False).logits.float()
    log_probs_BSV = logits_BSV[:, :-1].log_softmax(-1)
    return log_probs_BSV.gather(-1, data["input_ids"][:, 1:, None])[..., 0]


def measure_policy(rows: int, positions: int, vocab: int) -> Rows:
    """Measure for each way the peak of scoring a micro-batch of `rows`, and of a training step on it."""
    data = batch(rows, positions, vocab)
    config = {
        "model_name": model_config(vocab),
        "precision": "float32",
        "train_global_batch_size": rows,
        "train_micro_batch_size": rows,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
    }
    worker = DTensorPolicyWorker(config, init_reference_model=False)
    model = AutoModelForCausalLM.from_config(model_config(vocab))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def plain_step() -> None:
        optimizer.zero_grad()
        (-full_logits(model, data).mean()).backward()
        optimizer.step()

    def plain_scores() -> None:
        with torch.no_grad():
            full_logits(model, data)

    ways = {
        "full fp32 logits": {"get_logprobs": plain_scores, "train": plain_step},
        "policy worker": {
            "get_logprobs": lambda: worker.get_logprobs(data),
            "train": lambda: worker.train(data, NLLLoss()),
        },
    }
    found: Rows = []
    for way, acts in ways.items():
        for what, act in acts.items():
            act()  # tensors that are made only once exist before the count
            found.append((way, f"peak, {what}", "MiB", [peak_mib(act)]))
    return found


def measure(seconds: float = 0.0) -> Iterator[Found]:
    yield "policy", measure_policy(**SIZES), []
