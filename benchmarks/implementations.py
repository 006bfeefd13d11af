"""All heads that are measured, as functions of the same arguments (hidden states, weight shard, labels) to a loss.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.cases import MEGATRON, Case
from megatron_ext import VocabShard, linear_cross_entropy
from megatron_ext.distributed.groups import Group
from megatron_ext.head import LmHead, LogProbs
from megatron_ext.head.call.chunk_sizes import cached_columns
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.checks import Bits
from megatron_ext.memory.heads import Head, megatron


@dataclass(frozen=True)
class Implementation:
    """A head: `build(case, group)` returns a function `(x_TD, w_VD, labels_T) -> loss`, losses `[T]` or their mean.

    `error_limit`: the largest error that is right, as a multiple of plain PyTorch's in the same dtype.
    `through`: the dtype to which the gradient of its logits is rounded, also in plain PyTorch beside it; None: none.
    `products`: FLOPs of the products divided by NVH; None: they depend on the columns that the default caches.
    `slow`: its time is taken once, so that all heads together do not take too long.
    `foreign`: the head is of a package that may fail here: it is left out then, and the others are measured.
    """

    name: str
    build: Callable[[Case, Group], Head]
    error_limit: float = 1.5
    through: torch.dtype | None = None
    products: float | None = 6.0
    slow: bool = False
    foreign: bool = False


def _ours(name: str, slow: bool = False, products: float | None = 6.0, **options: Any) -> Implementation:
    def build(case: Case, group: Group) -> Head:
        return lambda x, w, y: linear_cross_entropy(x, w, y, group, **options)

    return Implementation(name, build, products=products, slow=slow)


def ours(cache: float | None) -> Implementation:
    """Return our head with this `cache`; None: the default."""
    if cache is None:
        return _ours("ours, default", products=None)
    return _ours(f"ours, cache {cache:g}", slow=0 < cache < 1, products=8 - 2 * cache, cache=cache)


def of_bits(bits: Bits) -> Implementation:
    """Return our head with `bits` and cache 1."""
    return _ours(f"ours, bits {bits}", cache=1, bits=bits)


MEAN = _ours("ours, a mean", reduction="mean")


def fused_epilogue(cache: float) -> Implementation:
    """Return our head with `fused_epilogue`, in which the kernel of the product takes the exponentials of logits."""

    def build(case: Case, group: Group) -> Head:
        return lambda x, w, y: -LmHead(w, group, cache=cache, fused_epilogue=True).read(x, LogProbs(y))

    return Implementation(f"ours, fused epilogue, cache {cache:g}", build, products=8 - 2 * cache)


def kept_by_default(case: Case) -> float:
    """Return the fraction of the columns that the head caches by default."""
    options = ResolvedHead(None, VocabShard(0, case.columns, case.columns))
    like = torch.empty(0, case.width, dtype=case.dtype)
    return cached_columns(options, case.tokens, case.columns, like) / case.columns


def pytorch_chunked(case: Case, group: Group) -> Head:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, w, y: F.linear_cross_entropy(x, w, y, options=options)


def model_of(algorithm: type[torch.autograd.Function]) -> Callable[[Case, Group], Head]:
    def build(case: Case, group: Group) -> Head:
        start = case.columns * (0 if group is None else dist.get_rank(group))
        return lambda x, w, y: algorithm.apply(x, w, y, start, group)

    return build


def liger(case: Case, group: Group) -> Head:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x, w, y: loss(w, x, y)


def liger_hopper(per_token: bool) -> Callable[[Case, Group], Head]:
    """Return Liger's head for Hopper only: of the mean loss with 6 NVH, or per token with 8 and no logits in memory.

    Both take bf16. The mean loss needs tokens that are a multiple of 128 and columns that are a multiple of 256.
    """

    def build(case: Case, group: Group) -> Head:
        from liger_kernel.ops.cutedsl import ops

        if per_token:
            return lambda x, w, y: ops.LigerFusedScaledCrossEntropySM90Function.apply(x, w, y)
        return lambda x, w, y: ops.liger_fused_linear_cross_entropy_sm90(x, w, y)

    return build


def quack(case: Case, group: Group) -> Head:
    """Return QuACK's head, of a mean loss only, in chunks of 4096 tokens as in QuACK's layer."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, w, y: chunked_linear_cross_entropy(x, w, y, chunk_size=4096)


def cut_cross_entropy(case: Case, group: Group) -> Head:
    from cut_cross_entropy import linear_cross_entropy as cce

    return lambda x, w, y: cce(x, w, y)


OURS = [ours(1), ours(0.5), ours(0), ours(None)]
MODELS = [
    Implementation("nemo-rl's algorithm", model_of(peers.NemoRL), slow=True),
    Implementation("verl's algorithm", model_of(peers.Verl), slow=True),
]
# Returns only the mean, made of chunks' means (errors up to 5.2 x were measured); the error of dW is 2.6 x in bf16.
PYTORCH_CHUNKED = Implementation("pytorch chunked", pytorch_chunked, error_limit=6.5, slow=True)
UNFUSED = Implementation(MEGATRON, megatron)
FUSED = Implementation(
    "megatron fused",
    lambda case, group: megatron(case, group, fused=True),
    through=torch.bfloat16,  # whatever the dtype of the logits
    slow=True,
)


def available(case: Case, on_gpu: bool = False) -> tuple[list[Implementation], list[str]]:
    """Return the heads that run this case here, and a line for each head that does not."""
    found, absent = [*OURS], []
    stock = importlib.util.find_spec("megatron") is not None
    if stock:
        found.insert(0, UNFUSED)
    else:
        absent.append("megatron: megatron-core is not installed")
    if on_gpu:  # on a CPU their costs are counted at full size, and times say little more
        found += [fused_epilogue(1), fused_epilogue(0), *MODELS, of_bits("batch"), of_bits("tensor_parallel")]
    if case.ranks == 1:  # on several ranks Megatron's compares alike; the others have no vocabulary shards
        if stock:
            found.append(FUSED)
        if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
            found.append(PYTORCH_CHUNKED)
        else:
            absent.append(f"pytorch chunked: torch {torch.__version__} has no linear_cross_entropy")
        if on_gpu:
            # Their dW is a 16-bit running sum over chunks of tokens: in case A 32 chunks, error 6.9 x, or 64, 10.5 x.
            for name, modules, build, limit in (
                ("liger", ("liger_kernel",), liger, 8.5),
                ("liger, Hopper, mean", ("liger_kernel", "cutlass"), liger_hopper(False), 2.5),
                ("liger, Hopper, per token", ("liger_kernel", "cutlass"), liger_hopper(True), 8.5),
                ("quack", ("quack", "cutlass"), quack, 8.5),
                ("cut-cross-entropy", ("cut_cross_entropy",), cut_cross_entropy, 13.0),
            ):
                missing = [module for module in modules if importlib.util.find_spec(module) is None]
                if missing:
                    absent.append(f"{name}: not installed: {', '.join(missing)}")
                else:
                    found.append(Implementation(name, build, error_limit=limit, slow=True, foreign=True))
    return found, absent
