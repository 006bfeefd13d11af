"""The heads whose bytes are counted: Megatron-Core's, transformers' and ours, as functions of the same arguments."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.head import linear_cross_entropy
from megatron_ext.head.checks import Cache
from megatron_ext.memory.byte_counter import ByteCounter, fake_world, one_rank_of
from megatron_ext.memory.fake_cuda import cuda_rank_of
from megatron_ext.memory.sizes import Sizes
from megatron_ext.memory.step_time import LaunchCounter

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def peak_bytes(
    sizes: Sizes, build: Callable[[Sizes, Group], Head], *, on_cuda: bool = True, launches: LaunchCounter | None = None
) -> int:
    """Count the peak bytes of forward and backward beyond hidden states and weight; both gradients are included.

    The head's code runs on fake tensors; with `on_cuda` these claim to be on CUDA, and `launches` counts the launches.
    """
    counter, launched = (ByteCounter(), lambda *_: None) if launches is None else (launches, launches.kernel)
    world = fake_world(1) if sizes.ranks == 1 else nullcontext()  # Megatron-Core's head needs a group even of one rank
    rank = cuda_rank_of(sizes.ranks, launched) if on_cuda else one_rank_of(sizes.ranks)
    with world, rank as group, torch.autograd.set_multithreading_enabled(False):
        rows = sizes.tokens // sizes.ranks if sizes.sequence_parallel else sizes.tokens
        x = torch.empty(rows, sizes.width, dtype=sizes.dtype, requires_grad=True)
        w = torch.empty(sizes.columns, sizes.width, dtype=sizes.dtype, requires_grad=True)
        labels = torch.empty(sizes.tokens, dtype=torch.int64)
        head = build(sizes, group)
        with _megatrons_buffer(), counter:
            loss = head(x, w, labels)
            torch.autograd.grad(loss, [x, w], torch.empty_like(loss))
    return counter.peak_bytes


@contextmanager
def _megatrons_buffer() -> Iterator[None]:
    """Make Megatron, if it is imported, gather into fake tensors; its own buffers need a GPU."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        yield
        return
    held: dict[tuple[Any, ...], Tensor] = {}

    def get_tensor(shape: Any, dtype: torch.dtype, name: str, *_: Any) -> Tensor:
        return held.setdefault((name, dtype, *shape), torch.empty(shape, dtype=dtype))

    with (
        mock.patch.object(state, "_GLOBAL_MEMORY_BUFFER", SimpleNamespace(get_tensor=get_tensor)),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        yield


def stock(sizes: Sizes) -> dict[str, Callable[[Sizes, Group], Head]]:
    """Return the heads of other installed packages that can be sharded over `sizes.ranks`."""
    found: dict[str, Callable[[Sizes, Group], Head]] = {}
    if importlib.util.find_spec("megatron") is not None:
        found["Megatron-Core"] = megatron
    if sizes.ranks == 1 and importlib.util.find_spec("transformers") is not None:
        found["transformers"] = transformers
    return found


def ours(cache: Cache, sizes: Sizes, group: Group) -> Head:
    """Return our head with `cache`."""
    layout: Any = "sequence" if sizes.sequence_parallel else "replicated"
    return partial(linear_cross_entropy, tp_group=group, hidden_layout=layout, cache=cache)


def transformers(sizes: Sizes, group: Group) -> Head:
    """Return transformers' output layer and causal loss, which converts logits to fp32."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    def head(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, w)[None]
        loss: Tensor = ForCausalLMLoss(logits, labels[None], sizes.vocab)
        return loss

    return head


def megatron(sizes: Any, group: Group, fused: bool = False) -> Head:
    """Return Megatron-Core's output layer and cross entropy; `sizes` has the attributes width, vocab, ranks and dtype.

    A `group` of None is the default group, which must exist even for one rank.
    """
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    group = dist.group.WORLD if group is None else group
    config = ModelParallelConfig(
        tensor_model_parallel_size=sizes.ranks,
        params_dtype=sizes.dtype,
        use_cpu_initialization=True,
        sequence_parallel=getattr(sizes, "sequence_parallel", False),
    )
    layer = ColumnParallelLinear(
        sizes.width,
        sizes.vocab,
        config=config,
        init_method=lambda weight: None,
        bias=False,
        skip_weight_param_allocation=True,
        tp_group=group,
    )

    def head(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Tensor:
        with megatrons_group(group):
            logits_T1V, _ = layer(x_TD.unsqueeze(1), weight=w_VD)
            labels_T1 = labels_T.unsqueeze(1)
            if fused:
                return fused_vocab_parallel_cross_entropy(logits_T1V, labels_T1, group).squeeze(1)
            return vocab_parallel_cross_entropy(logits_T1V, labels_T1).squeeze(1)

    return head


@contextmanager
def megatrons_group(group: Group) -> Iterator[None]:
    """Make `group` Megatron's tensor-parallel group inside the context."""
    from megatron.core import parallel_state

    before = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    try:
        yield
    finally:
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = before
