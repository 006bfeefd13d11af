"""Tiny policies, batches for them, and the unsharded truth that workers are compared with."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_ext.policy import BatchedDataDict
from megatron_ext.policy.config import import_from_path
from megatron_ext.policy.losses import valid_counts
from tests.dtensor.models import SIZES
from tests.gpt import forget_megatron

VOCAB = SIZES["vocab_size"]
LAYOUTS = {
    "dp": {},
    "tp": {"tp": 2},
    "tp_sp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "cp_tp_sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


def tiny_model(**overrides: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES | {"tie_word_embeddings": False} | overrides)


def tiny_config(
    model: Any = None, *, tp: int = 1, cp: int = 1, experts: int = 1, sequence_parallel=False, **overrides: Any
) -> dict:
    return {
        "model_name": model or tiny_model(),
        "seed": 3,
        "precision": "float32",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
        "max_grad_norm": 0.05,
        "dtensor_cfg": {
            "tensor_parallel_size": tp,
            "context_parallel_size": cp,
            "expert_parallel_size": experts,
            "sequence_parallel": sequence_parallel,
            **overrides.pop("dtensor_cfg", {}),
        },
        "megatron_cfg": {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "sequence_parallel": sequence_parallel,
        },
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}},
        **overrides,
    }


def batching(kind: str, tokens: int = 40) -> dict:
    """The configuration's entry for this kind of micro-batches."""
    key = {"dynamic": "dynamic_batching", "packed": "sequence_packing"}.get(kind)
    return {} if key is None else {key: {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}}


def tiny_batch(rows: int = 8, positions: int = 13, seed: int = 0) -> BatchedDataDict:
    """Right-padded rows of different lengths; some rows and tokens don't count. Log-probs and advantages are drawn."""
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    lengths = torch.tensor([positions, *(draw.randint(2, positions) for _ in range(rows - 1))])
    inside_BS = torch.arange(positions) < lengths[:, None]

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return scale * torch.randn(rows, positions, generator=generator) + shift

    sample_mask = torch.ones(rows)
    sample_mask[rows // 3] = 0
    return BatchedDataDict(
        input_ids=torch.randint(VOCAB, (rows, positions), generator=generator) * inside_BS,
        input_lengths=lengths,
        sample_mask=sample_mask,
        token_mask=inside_BS * (torch.rand(rows, positions, generator=generator) < 0.8).long(),
        advantages=normal(1.0),
        prev_logprobs=normal(0.2, -5.6),
        generation_logprobs=normal(0.2, -5.6),
        reference_policy_logprobs=normal(0.2, -5.6),
    )


def inside(data: BatchedDataDict) -> Tensor:
    """bool `[B, S]`: what is a token and no padding."""
    return torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]


def with_teacher(data: BatchedDataDict, k: int = 3) -> BatchedDataDict:
    """The batch, with the `k` largest logits of a teacher at each position."""
    top = torch.randn(*data["input_ids"].shape, VOCAB, generator=torch.Generator().manual_seed(5)).topk(k)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top
    return data


def counts_for(loss_fn: Any, data: BatchedDataDict) -> list[Tensor]:
    """Rows and tokens that a loss divides by, of a batch that is whole."""
    return [torch.tensor(n) for n in valid_counts(data, getattr(loss_fn, "unit", 1))]


def shard(data: BatchedDataDict, worker: Any) -> BatchedDataDict:
    """The rows of `data` that a worker gets."""
    batch_size = worker.settings.global_batch_size if data.size % worker.settings.global_batch_size == 0 else None
    return data.shard_by_batch_size(worker.dp_size, batch_size)[worker.dp_rank]


@contextmanager
def ended(worker: Any) -> Iterator[Any]:
    """`worker`, which is shut down afterwards."""
    try:
        yield worker
    finally:
        end_worker(worker)


def end_worker(worker: Any) -> None:
    """Shut `worker` down, and reset what Megatron's models set for all that come after them."""
    worker.shutdown()
    forget_megatron()


def plain_model(config: Any, seed: int = 3, kind: Any = AutoModelForCausalLM) -> nn.Module:
    """The model as one process builds it, with transformers' eager attention."""
    torch.manual_seed(seed)
    model = kind.from_config(config).float()
    model.config._attn_implementation = "eager"
    return model


def plain_log_probs(model: nn.Module, data: BatchedDataDict, temperature: float = 1.0) -> Tensor:
    """`[B, S]` of every token, from logits; 0 for the first and for padding."""
    logits_BSV = model(input_ids=data["input_ids"], use_cache=False).logits / temperature
    found = logits_BSV[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return F.pad(found, (1, 0)) * inside(data)


def plain_train(config: dict, data: BatchedDataDict, loss_fn: Any) -> tuple[list[float], dict, dict, list[float]]:
    """Results of one process: losses, the clipped gradients of the last step, the updated weights, and the gradients'
    norms before they were clipped."""
    model = plain_model(config["model_name"])
    optimizer = import_from_path(config["optimizer"]["name"])(model.parameters(), **config["optimizer"]["kwargs"])
    losses, norms = [], []
    for i in range(data.size // config["train_global_batch_size"]):
        batch = data.get_batch(i, config["train_global_batch_size"])
        loss, _ = loss_fn(plain_log_probs(model, batch), batch, *counts_for(loss_fn, batch))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"]).item())
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}, norms


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: on a mesh of one rank `full_tensor()` is the model's own memory."""
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()}


def exported(worker: Any) -> dict[str, Tensor]:
    """The weights as a generator gets them, by transformers' names."""
    return {name: export.make() for name, export in worker.backend.exports().items()}


def gradients_of_steps(worker: Any) -> dict[str, Tensor]:
    """A dict that each step of the worker's optimizer fills anew with the whole gradients that it takes, by name."""
    found: dict[str, Tensor] = {}

    def take(*_: Any) -> None:
        named = worker.model.named_parameters()
        found.update(whole({name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in named}))

    worker.optimizer.register_step_pre_hook(take)
    return found


def check_trains(worker: Any, config: dict, data: BatchedDataDict, loss_fn: Any, tolerance: float = 3e-5) -> None:
    """Log-probabilities, and losses, norms and weights of `train`, are those that one process finds."""
    with torch.no_grad():
        true_BS = plain_log_probs(plain_model(config["model_name"]), data)
    mine = shard(data, worker)
    wanted = shard(BatchedDataDict(true=true_BS), worker)["true"]
    torch.testing.assert_close(worker.get_logprobs(mine)["logprobs"], wanted, rtol=2e-5, atol=2e-5)
    losses, _, weights, norms = plain_train(config, data, loss_fn)
    found = worker.train(mine, loss_fn)
    torch.testing.assert_close(found["global_loss"].tolist(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["grad_norm"].tolist(), norms, rtol=1e-4, atol=0.0)
    updated = {name: x for name, x in exported(worker).items() if name in weights}  # and no buffers
    assert largest_error(updated, weights) < tolerance


def held_by(worker: Any) -> dict[str, Tensor]:
    """Copies of a worker's weights, whole, and of its optimizer's state."""
    state = [x for s in worker.optimizer.state.values() for x in s.values()]
    return whole(worker.return_state_dict() | dict(enumerate(state)))


@contextmanager
def unchanged(worker: Any) -> Iterator[None]:
    """Checks that a worker's weights and optimizer state do not change inside."""
    before = held_by(worker)
    yield
    torch.testing.assert_close(held_by(worker), before, rtol=0, atol=0)


def largest_error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative, of the worst tensor; NaN if one has it."""
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    return torch.stack([(found[name] - x).norm() / x.norm() for name, x in true.items()]).max().item()
