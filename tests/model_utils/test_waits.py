"""Nothing waits for the GPU: every operation of a call is looked at, on tensors that say they are on one.

They are meta tensors, which show copies between devices, and where ranks communicate fake ones on the CPU.
"""

from contextlib import contextmanager

import pytest
import torch

from benchmarks.meter import one_rank_of
from megatron_ext.head.call import statistics
from megatron_ext.head.readouts import kept, read_out
from megatron_ext.head.row_passes import passes
from megatron_ext.model_utils import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    TrainingSamplingParams,
    distributed_vocab_topk,
    from_parallel_hidden_states_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_distillation_topk_logprobs_from_logits,
    get_next_token_logprobs_from_logits,
)
from megatron_ext.sequence import targets, zigzag
from tests.marks import slow
from tests.waits import NoWait


def on_gpus(monkeypatch):
    """All tensors say that they are on a GPU, and are checked there."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(passes, "triton_passes", lambda: None)  # Triton cannot run on them
    for module in (statistics, read_out, passes, kept):
        monkeypatch.setattr(module, "has_values", lambda x: True)

    assign = torch.Tensor.__setitem__

    def checked(x, index, value):
        """Refuse a number for one element: a GPU alone has it copied; `fill_` takes the number as an argument."""
        assert isinstance(value, torch.Tensor) or x[index].dim(), "a blocking copy of a number"
        assign(x, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", checked)

    def demand(right, message, of):
        torch._assert_async(right, message(""))

    monkeypatch.setattr(zigzag, "demand", demand)
    monkeypatch.setattr(targets, "demand", demand)


@contextmanager
def device_of(ranks):
    if ranks == 1:
        yield "meta", None
        return
    with one_rank_of(ranks) as group:
        yield "cpu", group


B, S, COLUMNS, K, D = 2, 8, 24, 3, 4


def logits(device, batch=B):
    return torch.empty(batch, S, COLUMNS, device=device, dtype=torch.bfloat16, requires_grad=True)


def ids(device, *shape):
    return torch.zeros(*shape, dtype=torch.int64, device=device)


def pack(device, group, places_at=None, ends_at=None):
    places, ends = (torch.arange(0, 12, 4, device=at or device) for at in (places_at, ends_at))
    call = (logits(device, 1), ids(device, 1, S), places, S, 0, COLUMNS, group)
    return from_parallel_logits_to_logprobs_packed_sequences(*call, cu_seqlens=ends if ends_at else None)


def pack_over_cp(device, group, **more):
    tokens = ids(device, 1, S * (1 if group is None else 2))
    call = (logits(device, 1), tokens, ids(device, 3), S, 0, COLUMNS, None)
    return from_parallel_logits_to_logprobs_packed_sequences(*call, cp_group=group, **more)


def sampled(device, group, *sampling):
    call = (logits(device), ids(device, B, S), 0, COLUMNS, group)
    return from_parallel_logits_to_logprobs(*call, sampling_params=TrainingSamplingParams(*sampling))


def distilled(device, group, zero_outside_topk):
    """The teacher's tensors lie on the CPU, where a data loader left them."""
    teacher = torch.zeros(B, S, K), ids("cpu", B, S, K)
    return get_distillation_topk_logprobs_from_logits(
        logits(device), *teacher, zero_outside_topk, True, vocab_parallel_group=group
    )[0]


def from_hidden(device, group, **more):
    hidden = torch.empty(S, 1, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(COLUMNS, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    more |= {"hidden_layout": "replicated", "cache": 0}
    return from_parallel_hidden_states_to_logprobs(
        hidden, weight, None, None, ids(device, 1, S), 0, COLUMNS, group, **more
    )


CALLS = {
    "log-probs": sampled,
    "top-k": lambda device, group: sampled(device, group, K),
    "top-k and top-p": lambda device, group: sampled(device, group, K, 0.9),
    "top-p": lambda device, group: sampled(device, group, None, 0.9),
    "pack": pack,
    "pack, lengths known": lambda device, group: pack(device, group, device, device),
    "pack, lengths on the CPU": lambda device, group: pack(device, group, device, "cpu"),
    "pack, places on the CPU": lambda device, group: pack(device, group, "cpu", device),
    "pack, both on the CPU": lambda device, group: pack(device, group, "cpu", "cpu"),
    "pack over ranks": pack_over_cp,
    "pack over ranks, lengths known": lambda device, group: pack_over_cp(device, group, cu_seqlens=ids(device, 3)),
    "entropy": lambda device, group: ChunkedDistributedEntropy.apply(logits(device), 4, group),
    "gathered": lambda device, group: ChunkedDistributedGatherLogprob.apply(
        logits(device), ids(device, B, S, K), 0, COLUMNS, 4, group
    ),
    "largest": lambda device, group: distributed_vocab_topk(
        logits(device), K, group, vocab_start_index=0, vocab_end_index=COLUMNS
    )[0],
    "distillation": lambda device, group: distilled(device, group, True),
    "distillation over k": lambda device, group: distilled(device, group, False),
    "hidden states": from_hidden,
    "hidden states, pack": lambda device, group: from_hidden(
        device, group, cu_seqlens_padded=ids(device, 3), unpacked_seqlen=S, cu_seqlens=ids(device, 3)
    ),
    "tokens on the CPU": lambda device, group: get_next_token_logprobs_from_logits(
        ids("cpu", B, S), logits(device), vocab_parallel_group=group
    ),
}


# Autocast, which the linear head looks at, has no meta device.
@pytest.mark.parametrize(
    "name, ranks", [*((n, 2) for n in CALLS), *slow(*((n, 1) for n in CALLS if "hidden" not in n))]
)
def test_nothing_waits(name, ranks, monkeypatch):
    with device_of(ranks) as (device, group):
        on_gpus(monkeypatch)
        with NoWait():
            found = CALLS[name](device, group)
            found.backward(torch.empty_like(found))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.cpu(),
        lambda x: x + torch.zeros(2, 2).to("meta"),
        lambda x: x.copy_(torch.zeros(2, 2)),
        lambda x: torch.zeros(2, 2).copy_(x, non_blocking=True),
    ],
)
def test_what_waits_is_seen(waits):
    with NoWait(), pytest.raises(AssertionError):
        waits(torch.empty(2, 2, device="meta"))


def test_a_list_as_an_index_is_seen():
    """Meta tensors do not show such an index; fake ones do."""
    with one_rank_of(2), NoWait(), pytest.raises(AssertionError):
        torch.empty(2, 2)[:, [0, 1]]
