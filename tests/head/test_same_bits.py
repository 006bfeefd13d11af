"""Operators of the head, of which none sums on a GPU in an order that changes from run to run."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext import head
from megatron_ext.head.row_passes.fixed_order_sums import prefix_sums, sums_of_equals
from megatron_ext.memory.fake_cuda import kernels
from tests.head.as_on_cuda import cuda_branches, plain

aten = torch.ops.aten
# Those that add with atomics on a GPU, and those that torch's deterministic mode refuses there.
BY_CHANCE = {
    aten.index_add,
    aten.index_add_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
    aten.index_reduce,
    aten.index_reduce_,
    aten.put_,
    aten.bincount,
    aten.histc,
    aten.cumsum,
    aten.cumsum_,
    aten.kthvalue,
    aten.median,
    aten.embedding_dense_backward,
}


class NoChance(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        assert packet not in BY_CHANCE or not args[0].is_floating_point(), f"{func} may sum in any order"
        return func(*args, **(kwargs or {}))


T, D, V = 20, 8, 141
LABELS = torch.arange(T) // 5
IDS = torch.arange(T).unsqueeze(1) * torch.tensor([1, 2, 1, 0])  # of each token some twice
BENDS = {"softcap": 2.0, "label_smoothing": 0.1}

# What each takes beside logits, or beside hidden states and weight. Others are read-outs: see `test_functions.py`.
OF_LOGITS = {
    "cross entropy": (head.vocab_parallel_cross_entropy, (LABELS,), BENDS),
    "log-probs": (head.token_log_probs, (LABELS,), {"return_entropy": True, "return_hits": True}),
    "entropy": (head.token_entropy, (), {}),
    "log-softmax": (head.vocab_parallel_log_softmax, (), {}),
    "softmax": (head.vocab_parallel_softmax, (), {}),
}
OTHER_HEAD = torch.randn(T, D), torch.randn(V, D)
OF_HIDDEN = {
    "loss": (head.linear_cross_entropy, (LABELS,), {"cache": 0.5}),
    "loss by default": (head.linear_cross_entropy, (LABELS,), {}),
    "loss, all options": (
        head.linear_cross_entropy,
        (LABELS,),
        {**BENDS, "cache": 0.5, "z_loss": 0.01, "chunk_tokens": 7, "bias": torch.randn(V)},
    ),
    "smoothed": (head.linear_cross_entropy, (LABELS,), {"cache": 1, "label_smoothing": 0.1}),
    "log-probs": (head.linear_log_probs, (LABELS,), {"cache": 1, "return_entropy": True, "return_hits": True}),
}
CALLS = {
    **{f"{name} of logits": call for name, call in OF_LOGITS.items()},
    **{f"{name} of hidden states": call for name, call in OF_HIDDEN.items()},
}


def read_outs(teacher):
    kept = 4 * torch.arange(T + 1), (LABELS.unsqueeze(1) + torch.tensor([0, 50, 90, 120])).flatten()
    return {
        "labels": [head.CrossEntropy(LABELS), head.LogProbs(LABELS), head.IsArgmax(LABELS)],
        "rows": [head.Entropy(), head.MeanLogit(), head.LogSumExp(), head.ZLoss(), head.SumOfSquares()],
        "ids": [head.Gather(IDS), head.TopK(3), head.Sampled(LABELS, 3, 0.9)],
        "kept ids": [head.Kept(LABELS, *kept), head.KeptEntropy(LABELS, *kept)],
        "divergences": [head.KL(teacher), head.JensenShannon(teacher)],
        "ids alone": [head.Gather(IDS)],
        "logits of ids": [head.Gather(IDS, normalised=False)],
        "the largest": [head.TopK(3, normalised=False)],
        "top-k": [head.Sampled(LABELS, 3)],
        "top-k and top-p": [head.Sampled(LABELS, 3, 0.9)],
        "top-p": [head.Sampled(LABELS, top_p=0.9)],
        "forward KL": [head.KL(teacher)],
        "reverse KL": [head.KL(teacher, "reverse")],
        "soft cross entropy": [head.KL(teacher, "cross entropy")],
        "Jensen-Shannon": [head.JensenShannon(teacher)],
        "drafts": [head.TotalVariation(teacher), head.AcceptanceRate(teacher)],
    }


def read(x, *given, **options):
    weight, *more = given if isinstance(given[0], torch.Tensor) else (None, *given)
    return head.Logits(x).read(*more) if weight is None else head.LmHead(weight, **options).read(x, *more)


OTHER_LOGITS = head.Logits(torch.randn(T, V))
CALLS |= {f"reading {name} of logits": (read, found, {}) for name, found in read_outs(OTHER_LOGITS).items()}
OTHERS = head.Teacher(head.LmHead(OTHER_HEAD[1]), OTHER_HEAD[0])
CALLS |= {f"reading {name} of hidden states": (read, found, {}) for name, found in read_outs(OTHERS).items()}
CALLS |= {
    f"bits {bits} of hidden states": (read, (*read_outs(OTHERS)["labels"], head.Entropy()), {"bits": bits})
    for bits in ("batch", "tensor_parallel")
}


def test_every_read_out_of_the_head_is_called():
    classes = {name for name in head.__all__ if name[0].isupper() and hasattr(getattr(head, name), "flatten")}
    read_out = [one for function, more, _ in CALLS.values() if function is read for one in more]
    assert classes <= {kind.__name__ for one in read_out for kind in type(one).__mro__}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are left out; the ordinary run does it")
@pytest.mark.parametrize("side", ["Triton", "plain"])
@pytest.mark.parametrize("name", CALLS)
def test_no_operator_adds_by_chance(name, side, monkeypatch):
    """Triton's kernels have no atomics and are left out here; the other side has no Triton."""
    from triton.runtime.jit import JITFunction

    def leave_out(kernel, *args, **kwargs):
        out = dict(zip(kernel.arg_names, args, strict=False)).get("out_ptr")
        if out is not None and not out.is_floating_point():
            out.zero_()  # columns, by which torch's operators gather

    monkeypatch.setattr(JITFunction, "run", leave_out)
    function, more, options = CALLS[name]
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with cuda_branches(kernels if side == "Triton" else plain), NoChance():
        found = function(*((hidden @ weight.t(),) if "of logits" in name else (hidden, weight)), *more, **options)
        sum(x.sum() for x in tree_leaves(found) if x.requires_grad).backward()
    assert weight.grad is not None


def test_the_kernels_have_no_atomics():
    from megatron_ext.head import kernels

    files = [path for folder in kernels.__path__ for path in Path(folder).rglob("*.py")]
    assert {"label_terms.py", "tiles.py"} <= {path.name for path in files}
    for path in files:
        assert "atomic" not in path.read_text(), path.name


def test_what_adds_by_chance_is_seen():
    with NoChance(), pytest.raises(AssertionError, match="any order"):
        torch.zeros(3).index_add_(0, torch.zeros(2, dtype=torch.int64), torch.ones(2))


@pytest.mark.parametrize("numbers", [1, 63, 64, 65, 128, 5000])
def test_prefix_sums_by_products(numbers):
    """The products add in another order than `cumsum`."""
    x = torch.rand(3, numbers)
    with cuda_branches(), NoChance():
        found = prefix_sums(x, torch.float64)
    torch.testing.assert_close(found, x.double().cumsum(1), rtol=1e-13, atol=0)


def test_sums_of_equals():
    x, ids = torch.randn(5, 37, dtype=torch.float64), torch.randint(9, (5, 37))
    ids[0] = 3
    ids[1] = torch.arange(37)
    want = torch.stack([(x * (ids == ids[:, i : i + 1])).sum(1) for i in range(37)], 1)
    found = sums_of_equals(x, ids)
    torch.testing.assert_close(found, want)
    assert found[1].equal(x[1])
