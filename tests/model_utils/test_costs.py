"""Costs of NeMo-RL's names here: exact FLOPs, bytes and collectives on fake tensors; and rounding in bf16."""

import pytest
import torch

from benchmarks.meter import measure, one_rank_of
from megatron_ext.model_utils import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    from_parallel_hidden_states_to_logprobs,
    from_parallel_logits_to_logprobs,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
)

pytestmark = pytest.mark.slow

B, S, COLUMNS, RANKS = 2, 768, 12288, 4
VOCAB = (0, COLUMNS)
CHUNK = 24


CALLS = {
    "log-prob": lambda z, tokens, ids, group: ChunkedDistributedLogprob.apply(z, tokens, *VOCAB, CHUNK, group),
    "next token": lambda z, tokens, ids, group: from_parallel_logits_to_logprobs(
        z, tokens, *VOCAB, group, chunk_size=CHUNK
    ),
    "entropy": lambda z, tokens, ids, group: ChunkedDistributedEntropy.apply(z, CHUNK, group),
    "gathered log-probs": lambda z, tokens, ids, group: ChunkedDistributedGatherLogprob.apply(
        z, ids, *VOCAB, CHUNK, group
    ),
    "gathered logits": lambda z, tokens, ids, group: gather_logits_at_global_indices(
        z, ids, group, vocab_start_index=0, vocab_end_index=COLUMNS, chunk_size=CHUNK
    ),
    "top-k": lambda z, tokens, ids, group: ChunkedDistributedLogprobWithSampling.apply(
        z, tokens, group, 20, 1.0, CHUNK
    ),
    "top-k and top-p": lambda z, tokens, ids, group: ChunkedDistributedLogprobWithSampling.apply(
        z, tokens, group, 20, 0.9, CHUNK
    ),
    "top-p": lambda z, tokens, ids, group: ChunkedDistributedLogprobWithSampling.apply(
        z, tokens, group, None, 0.9, CHUNK
    ),
}


def on_logits(call, ranks=RANKS, columns=COLUMNS, sliced=False):
    """Costs forward and backward as parts of the bytes of the logits. `sliced`: all but the last of S + 1 positions."""
    with one_rank_of(ranks) as group:
        logits = torch.empty(B, S + sliced, columns, dtype=torch.bfloat16, requires_grad=True)
        held = logits + 0  # not a leaf, as in a model
        held = held[:, :-1] if sliced else held
        tokens, ids = torch.zeros(B, S, dtype=torch.int64), torch.zeros(B, S, 8, dtype=torch.int64)
        with measure() as forward:
            found = call(held, tokens, ids, group)
        with measure() as backward:
            (grad,) = torch.autograd.grad(found, held, torch.ones_like(found))
    assert (grad.dtype, grad.shape) == (torch.bfloat16, (B, S, columns))
    return forward, backward


def check_bytes(forward, backward, columns=COLUMNS):
    """Beyond the logits and their gradient at most a tenth of the logits; NeMo-RL takes 3.5 to 7 times as much."""
    logits = 2 * B * S * columns
    assert forward.peak_bytes <= 0.1 * logits
    assert backward.peak_bytes <= 1.1 * logits


# Both filters go the way of "top-k and top-p"; top-p alone, with its many passes over the columns, takes a minute.
@pytest.mark.parametrize("name", CALLS)
def test_bytes_and_collectives_on_a_slice_of_logits(name):
    """A slice may not be copied. Of top-p alone whole logits."""
    forward, backward = on_logits(CALLS[name], sliced=name != "top-p")
    check_bytes(forward, backward)
    assert forward.collectives.total() <= (2 * (S // CHUNK) if name == "top-p" else 1)
    assert not backward.collectives


@pytest.mark.parametrize("name", ["log-prob", "gathered logits"])
def test_bytes_on_whole_logits(name):
    check_bytes(*on_logits(CALLS[name]))


@pytest.mark.parametrize("chunk", [8 * CHUNK, None])
def test_bytes_of_top_k_50_over_two_ranks(chunk):
    """Candidates that are sent, 50 of each rank for every token, are most of the bytes."""

    def top_50(z, tokens, ids, group):
        return ChunkedDistributedLogprobWithSampling.apply(z, tokens, group, 50, 1.0, chunk)

    check_bytes(*on_logits(top_50, ranks=2, columns=16384), columns=16384)


def test_distillation_sends_once():
    with one_rank_of(RANKS) as group:
        logits = torch.empty(2, 6, 10, dtype=torch.bfloat16, requires_grad=True)
        teacher, ids = torch.empty(2, 6, 3), torch.zeros(2, 6, 3, dtype=torch.int64)
        for zero_outside_topk in (True, False):
            with measure() as costs:
                student, _, entropy = get_distillation_topk_logprobs_from_logits(
                    logits, teacher, ids, zero_outside_topk, True, vocab_parallel_group=group
                )
                (student.sum() if entropy is None else student.sum() + entropy.sum()).backward()
            assert costs.collectives.total() == 1


D = 192


def hidden_costs(frozen=False, layout="sequence", chunk_size=CHUNK):
    with one_rank_of(RANKS) as group:
        rows = S // RANKS if layout == "sequence" else S
        hidden = torch.empty(rows, B, D, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(COLUMNS, D, dtype=torch.bfloat16, requires_grad=not frozen)
        tokens = torch.zeros(B, S, dtype=torch.int64)
        with measure() as costs:
            found = from_parallel_hidden_states_to_logprobs(
                hidden, weight, None, None, tokens, *VOCAB, group, chunk_size=chunk_size, hidden_layout=layout, cache=0
            )
            found.sum().backward()
        return costs


@pytest.mark.parametrize("layout, sent", [("sequence", 4), ("replicated", 2)])
@pytest.mark.parametrize("chunk_size", [None, 128])
def test_collectives_from_hidden_states(layout, sent, chunk_size):
    """NeMo-RL: 9 all-reduces and more forward, 8 and more backward, for 4 chunks."""
    assert hidden_costs(layout=layout, chunk_size=chunk_size).collectives.total() == sent


def test_no_fp32_copy_of_weight_or_logits():
    costs = hidden_costs()
    assert not any(
        dtype == "torch.float32" and torch.Size(shape).numel() >= COLUMNS * D for dtype, shape in costs.largest
    )
    assert costs.peak_bytes <= 2 * COLUMNS * D + 12 * B * S * D + 0.7 * B * S * COLUMNS  # dW, x and dx, chunks


def test_a_frozen_weight_pays_no_weight_gradient():
    matmul = 2 * B * S * D * COLUMNS
    assert hidden_costs(chunk_size=128).flops == 4 * matmul  # nothing kept: the logits twice, dx, dW
    assert hidden_costs(frozen=True, chunk_size=128).flops == 3 * matmul


def test_the_weight_gradient_does_not_lose_digits_to_chunks():
    """NeMo-RL adds the chunks up in bf16: its error grows from 0.0017 with one chunk to 0.02 with 256."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 1, 64, generator=g).bfloat16(), torch.randn(300, 64, generator=g).bfloat16() / 8
    tokens = torch.randint(300, (1, 512), generator=g)

    def dw(call, *leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        return torch.autograd.grad(call(*leaves), leaves[1])[0].double()

    def plain(hidden, weight):
        z = (hidden[:-1, 0] @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
        return z.log_softmax(-1).gather(-1, tokens[0, 1:, None]).sum()

    truth = dw(plain, hidden.double(), weight.double())
    allowed = 1.1 * (dw(plain, hidden, weight) - truth).norm()
    for chunk_size in (2, 512):
        ours = dw(
            lambda x, w, chunk_size=chunk_size: from_parallel_hidden_states_to_logprobs(
                x, w, None, None, tokens, 0, 300, None, chunk_size=chunk_size
            ).sum(),
            hidden,
            weight,
        )
        assert (ours - truth).norm() <= allowed
