"""What the layers send, in collectives and bytes: what is needed, and never more than Megatron's own layers."""

import pytest
import torch
from megatron.core.tensor_parallel import layers as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.tensor_parallel import layers as ours
from tests.gpt import model_parallel, tiny_config
from tests.ranks import ranks
from tests.tensor_parallel.sharded import build

pytestmark = pytest.mark.slow

S, B, D, N = 8, 3, 16, 24
FLOAT = 4  # bytes


class Sent(TorchDispatchMode):
    """Collectives, and the bytes of the tensors that this rank gives to them."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # All-reduce works in place; the others take the output first and the input after it.
            given = args[0] if func._opname.strip("_") == "allreduce" else args[1]
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(given) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def traffic(layer, x):
    """((collectives, bytes) forward, the same backward)."""
    with Sent() as forward:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
    with Sent() as backward:
        y.backward(torch.ones_like(y))
    return (forward.calls, forward.bytes), (backward.calls, backward.bytes)


# Bytes that one rank gives: an all-gather's are its slice, a reduce-scatter's and an all-reduce's the whole tensor.
X, Y = S * B * D * FLOAT, S * B * N * FLOAT
EXPECTED = {
    ("column", False): ((0, 0), (1, X)),
    ("column", True): ((1, X // 2), (2, X // 2 + X)),
    ("row", False): ((1, Y), (0, 0)),
    ("row", True): ((1, Y), (1, Y // 2)),
    ("embedding", False): ((1, X), (0, 0)),
    ("embedding", True): ((1, X), (1, X // 2)),
}
CASES = [
    (kind, sequence_parallel, wanted)
    for kind, sequence_parallel in EXPECTED
    for wanted in ("all gradients", "no input gradient", "frozen weight")
    if kind != "embedding" or wanted == "all gradients"
]


@ranks(2, rules="gloo")  # its operators are counted
@pytest.mark.parametrize("kind,sequence_parallel,wanted", CASES)
def test_collectives_and_bytes(kind, sequence_parallel, wanted):
    with model_parallel(tp=2):
        results = []
        scattered = {"reduce_scatter_embeddings": sequence_parallel} if kind == "embedding" else {}
        sizes = (N, D) if kind == "embedding" else (D, N)
        config = tiny_config(sequence_parallel=sequence_parallel)
        for package in (ours, stock):
            layer = build(kind, *sizes, package=package, config=config, **scattered)
            layer.weight.requires_grad_(wanted != "frozen weight")
            if kind == "embedding":
                x = torch.randint(N, (B, S))
            else:
                shape = (S // 2 if sequence_parallel and kind == "column" else S, B, D // 2 if kind == "row" else D)
                x = torch.randn(shape, requires_grad=wanted != "no input gradient")
            results.append(traffic(layer, x))
    forward, backward = EXPECTED[kind, sequence_parallel]
    if kind == "column" and wanted == "no input gradient":
        backward = (1, X // 2) if sequence_parallel else (0, 0)
    if kind == "column" and wanted == "frozen weight" and sequence_parallel:
        backward = (1, X)
    mine, theirs = results
    assert mine == (forward, backward)
    for a, b in zip(mine, theirs, strict=True):
        assert a[0] <= b[0]
        assert a[1] <= b[1]
