"""The head's CUDA branches on fake tensors: every operator fits, and nothing waits for the device.

They have shapes, dtypes and devices, and autograd has no engine for them: functions are applied by hand, forward and
backward.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks.meter import one_rank_of
from megatron_ext import linear_cross_entropy, linear_log_probs, token_entropy, vocab_parallel_cross_entropy
from megatron_ext.head import Entropy, LmHead, LogProbs, LoRA, distributions
from megatron_ext.head.engine.linear import LinearHead
from tests.devices import GPU
from tests.head.as_on_cuda import rehearsal
from tests.waits import NoWait

T, D, V = 20, 16, 40
BENDS = {"softcap": 2.0, "temperature": 0.7}
EVERYTHING = {**BENDS, "label_smoothing": 0.1, "z_loss": 0.01}


def apply(function, *args):
    """Forward, and backward with a gradient for every result that can have one."""
    if function is LinearHead:
        args = (*args[:2], True, *args[3:])  # a backward follows
    ctx = SimpleNamespace(  # what autograd gives a function
        needs_input_grad=[isinstance(x, Tensor) and x.is_floating_point() for x in args],
        save_for_backward=lambda *tensors: setattr(ctx, "saved_tensors", tensors),
        mark_non_differentiable=lambda *tensors: None,
        set_materialize_grads=lambda value: None,
    )
    results = function.forward(ctx, *args)
    each = results if isinstance(results, tuple) else (results,)
    grads = [torch.empty_like(x) if x is not None and x.is_floating_point() else None for x in each]
    for x, need, grad in zip(args, ctx.needs_input_grad, function.backward(ctx, *grads), strict=True):
        if need and grad is not None:
            assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)
    return results


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device=GPU)


def linear(function, cache, chunk_tokens, options, with_bias=False, fused=False, lora=False):
    def call(dtype, group, layout):
        ranks = 1 if group is None or layout == "replicated" else group.size()
        hidden, weight = empty(T // ranks, D, dtype=dtype), empty(V, D, dtype=dtype)
        if fused:
            weight.main_grad = empty(V, D, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        more = {"bias": empty(V, dtype=dtype) if with_bias else None, "gradient_accumulation_fusion": fused}
        if lora:
            more["lora"] = [LoRA(empty(3, D, dtype=torch.float32), empty(V, 3, dtype=torch.float32), 2.0)] * 2
        labels = torch.zeros(T, dtype=torch.int64, device=GPU)
        function(hidden, weight, labels, group, layout, cache=cache, chunk_tokens=chunk_tokens, **more, **options)

    return call


def fused_log_probs(hidden, weight, labels, group, layout, **options):
    if hidden.dtype == torch.bfloat16:
        head = LmHead(weight, group, layout, fused_epilogue=True, **options)
        head.read(hidden, LogProbs(labels), Entropy())


def on(shapes, function, *more, **options):
    def call(dtype, group, layout):
        tensors = [empty(*shape, dtype=dtype) for shape in shapes]
        function(*tensors, *(make(dtype) for make in more), tp_group=group, **options)

    return call


on_logits, on_hidden = partial(on, [(T, V)]), partial(on, [(T, D), (V, D)])


def labels(dtype):
    return torch.zeros(T, dtype=torch.int64, device=GPU)


def ids(dtype):
    return torch.zeros(T, 3, dtype=torch.int64, device=GPU)


def logits(dtype):
    return empty(T, V, dtype=dtype)


pytestmark = pytest.mark.gpu  # torch built without CUDA cannot fake all of it
DTYPES, RANKS = [torch.bfloat16], [(2, "replicated"), (2, "sequence")]
if GPU == "cuda":
    DTYPES, RANKS = [torch.float64, torch.float32, torch.bfloat16], [(1, "replicated"), *RANKS]

READ_BOTH = {"return_entropy": True, "return_hits": True}
CALLS = {
    "loss": linear(linear_cross_entropy, 1, None, {}),
    "loss, all options": linear(linear_cross_entropy, 0.5, 7, EVERYTHING, with_bias=True),
    "loss, recomputed": linear(linear_cross_entropy, 0, 7, EVERYTHING, with_bias=True, fused=True),
    "loss, main_grad": linear(linear_cross_entropy, 1, None, {}, fused=True),
    "log-probs": linear(linear_log_probs, 0.5, 7, {**BENDS, **READ_BOTH}),
    "log-probs, main_grad": linear(linear_log_probs, 0, 7, READ_BOTH, with_bias=True, fused=True),
    "loss, lora": linear(linear_cross_entropy, 0.5, 7, EVERYTHING, with_bias=True, fused=True, lora=True),
    "log-probs, lora": linear(linear_log_probs, 1, None, READ_BOTH, lora=True),
    "log-probs, fused epilogue": linear(fused_log_probs, 0.5, None, {}, with_bias=True, fused=True),
    "loss of logits": on_logits(vocab_parallel_cross_entropy, labels, **EVERYTHING),
    "loss into logits": on_logits(vocab_parallel_cross_entropy, labels, gradient_into_logits=True, reduction="mean"),
    "entropy": on_logits(token_entropy, **BENDS),
    "gathered": on_logits(distributions.gather_log_probs, ids, return_entropy=True, chunk_tokens=7),
    "largest": on_logits(distributions.vocab_topk, k=3),
    "top-k": on_logits(distributions.sampled_log_probs, labels, top_k=3, top_p=0.9),
    "top-p": on_logits(distributions.sampled_log_probs, labels, top_p=0.9, chunk_tokens=7),
    "softmax": on_logits(distributions.vocab_parallel_log_softmax),
    "divergence": on_logits(distributions.kl_divergence, logits, direction="reverse"),
    "hidden, gathered": on_hidden(distributions.linear_gather_log_probs, ids, chunk_tokens=7),
    "hidden, top-p": on_hidden(distributions.linear_sampled_log_probs, labels, top_k=3, top_p=0.9),
}


@pytest.mark.rehearsed
@pytest.mark.parametrize("ranks, layout", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_branch_fits_and_nothing_waits(dtype, ranks, layout, monkeypatch):
    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(apply))
    with one_rank_of(ranks) as group, torch.no_grad(), NoWait():
        for name, call in CALLS.items():
            if layout == "replicated" or (name.startswith("lo") and "logits" not in name):
                call(dtype, group, layout)


@pytest.mark.parametrize(
    "waits",
    [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x.tolist(), lambda x: x.cpu()],
    ids=["item", "bool", "nonzero", "tolist", "cpu"],
)
def test_what_waits_for_a_gpu_fails_in_a_rehearsal_too(waits):
    x = torch.arange(3.0)
    with rehearsal():
        torch.cuda.set_sync_debug_mode("error")
        try:
            x.add(1).sum()
            with pytest.raises(AssertionError, match="reads values"):
                waits(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits(x)


def test_a_number_in_one_element_waits():
    """An assignment copies it; `fill_` does not."""
    with FakeTensorMode(), torch.no_grad(), NoWait():
        x = torch.empty(2, device=GPU)
        x[0].fill_(1.0)
        x[:] = 1.0
        with pytest.raises(AssertionError, match="blocking"):
            x[0] = 1.0
