"""Batches for context-parallel training, by the names and signatures of NeMo Automodel's `cp_utils`.

There are two ways to give every rank its part of the sequences, both in the zigzag layout:

- `make_cp_batch_and_ctx`: for rows of one length. The batch becomes this rank's part when a context is entered; inside,
  causal `F.scaled_dot_product_attention` sees the keys of all ranks.
- `make_cp_batch_for_te`: for documents packed in rows. They become one line of tokens with cumulative lengths, for
  Transformer Engine's attention or for `megatron_ext.sequence.attention.attend`.

transformers 5 mistakes the positions of a part for several documents, and builds a mask that the context refuses:
prepare its models with `megatron_ext.dtensor.use_attention(model, cp_group)` or `_parallelize_model(..., cp_mesh=...)`.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_ext.sequence.context_parallel_buffers import sharded
from megatron_ext.sequence.thd import check_shapes, stack_lines, to_thd
from megatron_ext.sequence.zigzag import demand, thd_partition_indices

_ROTATE_METHODS = (None, "allgather", "alltoall")
_REQUIRED = ("input_ids", "labels", "seq_lens", "seq_lens_padded")


class _TrainContext(AbstractContextManager):
    """Contexts entered together, by `with context:` or `with context():`, as NeMo's recipes write it."""

    def __init__(self, contexts: Sequence[AbstractContextManager] = ()):
        self._contexts, self._entered = contexts, contextlib.ExitStack()

    def __call__(self) -> "_TrainContext":
        return self

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.__exit__(*raised)


def _build_position_ids(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Give `batch` its `position_ids`, int64 `[1, S]` on `device`, unless it has some. Return `batch` itself."""
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1], device=device)[None]
    return batch


def get_train_context(
    enable_loss_parallel: bool, enable_compiled_autograd: bool, cp_context: AbstractContextManager | None = None
) -> _TrainContext:
    """Make one context, to be entered once, of the contexts for a training step (forward and backward).

    Args:
        enable_loss_parallel: torch's `loss_parallel`, for cross entropy of logits that are vocab-sharded DTensors.
        enable_compiled_autograd: compile the backward pass too.
        cp_context: a context from `create_context_parallel_ctx`.

    Returns:
        A context manager, which may be called first: `with context():` is `with context:`.
    """
    contexts: list[AbstractContextManager] = []
    if enable_loss_parallel:
        from torch.distributed.tensor.parallel import loss_parallel

        contexts.append(loss_parallel())
    if enable_compiled_autograd:
        from torch._dynamo.utils import maybe_enable_compiled_autograd

        contexts.append(maybe_enable_compiled_autograd(True))
    if cp_context is not None:
        contexts.append(cp_context)
    return _TrainContext(contexts)


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str | None = None,
) -> AbstractContextManager[None]:
    """Make a context, to be entered once, in which whole tensors become this rank's part in the zigzag layout.

    The tensors change in place; memory that they share with other tensors does not. Inside,
    `F.scaled_dot_product_attention` without a mask, causal or not, is attention over the sequences of all ranks, on CPU
    and GPU: keys and values are gathered (`megatron_ext.sequence.attention`). If activations are recomputed, run
    backward inside too. torch's own `context_parallel` has the same purpose, but runs causal attention on GPUs only.

    Args:
        cp_mesh: 1-D, the ranks that share each sequence.
        cp_buffers: tensors of equal length S along their sequence dim, the same on all ranks of `cp_mesh`.
        cp_seq_dims: the sequence dim of each buffer.
        cp_no_restore_buffers: the buffers that stay this rank's part afterwards; the others become whole again.
        cp_rotate_method: "allgather", "alltoall" or None, as in torch; results are the same.

    Communicates: nothing itself; each attention one all-gather, backward one reduce-scatter.

    Raises:
        ValueError: S is no multiple of 2W (torch silently uses another layout then), lengths differ, a buffer requires
            grad, the lists do not fit each other, an unknown `cp_rotate_method`. From attention: a mask, another number
            of keys than of queries, or a function that computes attention without SDPA
            (`torch.nn.MultiheadAttention`, `flex_attention`).
    """
    if cp_rotate_method not in _ROTATE_METHODS:
        raise ValueError(f"cp_rotate_method is {cp_rotate_method!r}: it must be one of {_ROTATE_METHODS}")
    return sharded(cp_buffers, cp_seq_dims, cp_no_restore_buffers, cp_mesh.get_group())


def make_cp_batch_and_ctx(
    device_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> tuple[AbstractContextManager, dict[str, Any]]:
    """Make a context, and the batch that becomes this rank's part of the sequences when the context is entered.

        context, batch = make_cp_batch_and_ctx(device_mesh, batch)
        with context:  # or context(), as NeMo's recipes write it
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])

    Args:
        device_mesh: a mesh; the ranks of its dim "cp" share each sequence. None, or no such dim: no sequence is shared.
        batch: `input_ids` `[B, S]`; optional `labels` `[B, S]` (the target of each position, shifted already: a part
            cannot be shifted), `position_ids` `[B or 1, S]` and `attention_mask` `[B, S]`. Whole sequences, the same on
            all "cp" ranks.
        loss_mask: `[B, S]`, becomes this rank's part as well; None with `use_te`.
        use_te: make the batch with `make_cp_batch_for_te`, which gets the arguments after this one.

    Returns:
        With several "cp" ranks: the context, and a new dict of the same tensors, with `position_ids`, and without the
        attention mask, which causal attention does not need. The tensors change when the context is entered, and all
        except `position_ids` stay this rank's part afterwards. With `use_te`: an empty context, and a batch that is
        this rank's part already. Else: an empty context, and `batch` itself.

    Communicates: nothing itself; see `create_context_parallel_ctx`.

    Raises:
        ValueError: S is no multiple of 2W, lengths differ, `attention_mask` hides more than padding at the end of rows,
            or `loss_mask` comes with `use_te`. From attention that is not causal: the mask hides padding.
        KeyError: no `input_ids`.
    """
    cp_mesh = device_mesh["cp"] if device_mesh is not None and "cp" in (device_mesh.mesh_dim_names or ()) else None
    if use_te:
        if loss_mask is not None:
            raise ValueError(
                "loss_mask came with use_te=True: only the batch becomes lines of documents; give tokens that do not "
                "count the label -100"
            )
        te_batch = make_cp_batch_for_te(cp_mesh, batch, "thd", padding_token_id, num_chunks, seq_lens_padding_value)
        return _TrainContext(), te_batch
    if cp_mesh is None or cp_mesh.size() == 1:
        return _TrainContext(), batch
    _require(batch, _REQUIRED[:1])
    batch = _build_position_ids(dict(batch), batch["input_ids"].device)
    attention_mask = batch.pop("attention_mask", None)
    if attention_mask is not None:
        _check_only_padding_behind(attention_mask, batch["input_ids"])
    per_token = [batch["input_ids"], batch.get("labels"), loss_mask]
    passing = [x for x in per_token if x is not None]
    buffers = [*passing, batch["position_ids"]]
    context = sharded(buffers, [1] * len(buffers), set(passing), cp_mesh.get_group(), attention_mask)
    return get_train_context(False, False, context), batch


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: Mapping[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> dict[str, Any]:
    """Make one line of documents from a batch of packed rows, and return this rank's part of every document.

    Args:
        cp_mesh: 1-D, the ranks that share each document; None: this rank has whole documents.
        batch: integers unless said otherwise, the same on all ranks of `cp_mesh`; other keys are left out.

            - `input_ids`: `[B, S]`, or embeddings `[B, S, D]` of any dtype (differentiable).
            - `labels`: `[B, S]`, the target of each position, shifted already.
            - `position_ids` (optional): `[B or 1, S]`. Without them positions count from 0 in each document.
            - `seq_lens`, `seq_lens_padded`: `[B, N]`, each document's length without and with its padding.
        padding_token_id: a token that `padding_mask` marks as padding wherever it is.
        num_chunks: the number of groups into which rows are cut, each a line of its own.
        seq_lens_padding_value: the value that fills up `seq_lens` of rows with fewer documents, and `cu_seqlens` of
            chunks with fewer documents.

    Returns:
        This rank's part of the line, T = B * S / W tokens; with several chunks T is that over their number, and each
        tensor has a leading dim:

        - `input_ids`, `labels`, `position_ids`: `[T]` (embeddings `[T, D]`).
        - `padding_mask`: bool `[T]`, True for padding after a document's tokens, and for `padding_token_id`.
        - `cu_seqlens`, `cu_seqlens_padded`: int32 `[documents + 1]`, of the whole line.
        - `max_seqlen`: int32 `[]`, the longest document's length with padding.
        - `qkv_format`: "thd".

    Communicates: nothing. On CUDA the number of documents is read back: one host synchronisation a chunk.

    Raises:
        ValueError: another `qkv_format`; shapes or lengths that do not fit each other; documents whose padded lengths
            are no multiple of 2W; a batch that `num_chunks` does not divide. Values are checked on CPU; on CUDA a wrong
            value stops the device.
        KeyError: one of `input_ids`, `labels`, `seq_lens`, `seq_lens_padded` is missing.
    """
    if qkv_format != "thd":
        raise ValueError(f"qkv_format is {qkv_format!r}: only 'thd' is made here; pass qkv_format='thd'")
    _require(batch, _REQUIRED)
    check_shapes(batch)
    rows = batch["input_ids"].shape[0]
    if num_chunks < 1 or rows % num_chunks or not rows:
        raise ValueError(f"num_chunks is {num_chunks}: it must be at least 1 and divide the batch of {rows} rows")
    rowwise = {name: batch[name] for name in _REQUIRED}
    if batch.get("position_ids") is not None:
        rowwise["position_ids"] = batch["position_ids"].expand(rows, -1)
    size = rows // num_chunks
    lines = []
    for start in range(0, rows, size):
        chunk = {name: x[start : start + size] for name, x in rowwise.items()}
        line = to_thd(chunk, padding_token_id, seq_lens_padding_value)
        lines.append(_shard_thd_chunk_for_te(line, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id))
    return lines[0] if num_chunks == 1 else stack_lines(lines, seq_lens_padding_value)


def _shard_thd_chunk_for_te(
    batch: Mapping[str, Any],
    cp_mesh: DeviceMesh | None,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> dict[str, Any]:
    """Return this rank's part of one line of documents, with the entries that `make_cp_batch_for_te` describes.

    `cu_seqlens` may be filled up with `seq_lens_padding_value`. Without `cu_seqlens_padded` documents have no padding;
    without `padding_mask` the mask is made from `padding_token_id`.

    Raises:
        ValueError: `batch` has no `cu_seqlens`, so that it holds rows; lengths that cannot be split over the ranks.
    """
    if batch.get("cu_seqlens") is None:
        raise ValueError(
            "the batch has no cu_seqlens: it has rows, not packed documents; pass it through make_cp_batch_for_te"
        )
    cu_seqlens = batch["cu_seqlens"]
    cu_seqlens_padded = batch.get("cu_seqlens_padded", cu_seqlens)
    known = cu_seqlens_padded[cu_seqlens_padded != seq_lens_padding_value]
    per_token = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    padding_mask = batch.get("padding_mask")
    per_token["padding_mask"] = batch["input_ids"] == padding_token_id if padding_mask is None else padding_mask
    if cp_mesh is not None and cp_mesh.size() > 1:
        index = thd_partition_indices(known, batch["input_ids"].shape[0], cp_mesh.size(), cp_mesh.get_local_rank())
        per_token = {name: x.index_select(0, index) for name, x in per_token.items()}
    return per_token | {
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "cu_seqlens_padded": cu_seqlens_padded.to(torch.int32),
        "max_seqlen": known.diff().max().to(torch.int32),
        "qkv_format": qkv_format,
    }


def _require(batch: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if batch.get(name) is None]
    if missing:
        raise KeyError(f"the batch has no {', '.join(missing)}: it must have {', '.join(names)}; it has {[*batch]}")


def _check_only_padding_behind(attention_mask: Tensor, input_ids: Tensor) -> None:
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}: it must be that of input_ids, "
            f"{list(input_ids.shape)}; leave it out where attention is causal"
        )
    demand(
        (attention_mask[:, :-1] >= attention_mask[:, 1:]).all(),
        lambda _: (
            "attention_mask hides tokens before others that it shows: causal attention of parts hides only padding "
            "behind the tokens of a row; pad there, or call megatron_ext.dtensor.causal_lm_loss, which takes any "
            "padding mask"
        ),
        attention_mask,
    )
