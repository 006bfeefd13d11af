"""On a GPU no operator of the head sums in an order that changes from run to run."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext import linear_cross_entropy, linear_log_probs, vocab_parallel_cross_entropy
from tests.head.as_on_cuda import cuda_branches, twin_of

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


CALLS = {
    "loss": (linear_cross_entropy, {"cache": 0.5}),
    "loss, all options": (
        linear_cross_entropy,
        {"cache": 0.5, "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.01, "chunk_tokens": 7},
    ),
    "smoothed": (linear_cross_entropy, {"cache": 1, "label_smoothing": 0.1}),
    "log-probs": (linear_log_probs, {"cache": 1, "return_entropy": True, "return_hits": True}),
    "loss of logits": (vocab_parallel_cross_entropy, {"label_smoothing": 0.1, "softcap": 2.0}),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are left out; the ordinary run does it")
@pytest.mark.parametrize("side", ["Triton", "plain"])
@pytest.mark.parametrize("name", CALLS)
def test_no_operator_adds_by_chance(name, side, monkeypatch):
    """With Triton's passes, whose kernels have no atomics and are left out here, and without Triton."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: None)
    function, options = CALLS[name]
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((20, 8), (41, 8), (41,)))
    labels = torch.arange(20) // 5
    with cuda_branches(twin_of if side == "Triton" else lambda plain: plain), NoChance():
        if function is vocab_parallel_cross_entropy:
            found = function(hidden @ weight.t() + bias, labels, **options)
        else:
            found = function(hidden, weight, labels, bias=bias, **options)
        found = found[:2] if isinstance(found, tuple) else (found,)
        sum(x.sum() for x in found).backward()
    assert weight.grad is not None


def test_the_kernels_have_no_atomics():
    from megatron_ext.head import kernels

    for path in (file for folder in kernels.__path__ for file in os.scandir(folder) if file.name.endswith(".py")):
        with open(path) as file:
            assert "atomic" not in file.read(), path.name


def test_what_adds_by_chance_is_seen():
    with NoChance(), pytest.raises(AssertionError, match="any order"):
        torch.zeros(3).index_add_(0, torch.zeros(2, dtype=torch.int64), torch.ones(2))
