"""Core attention for Megatron's `SelfAttention` and `CrossAttention`, on `F.scaled_dot_product_attention`.

`CoreAttention` takes the place of Megatron's `DotProductAttention` (which forms every score matrix and refuses packing
and context parallelism) or `TEDotProductAttention` (which needs Transformer Engine and CUDA). It runs on CPU and GPU.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_ext.distributed.groups import Group, context_parallel_group, group_rank, group_size
from megatron_ext.numerics.batch_invariance import attention_kernels
from megatron_ext.sequence.attention import Packing, Window, attend, check_mask
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.host_values import HostMemo
from megatron_ext.sequence.zigzag import zigzag_positions

_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")  # names: older versions of Megatron-Core lack the last
_EXCHANGES = (None, "p2p", "all_gather", "a2a", "a2a+p2p")


class CoreAttention(MegatronModule):
    """softmax(scale * q k^T) v, without parameters.

    Without attention dropout the module calls SDPA, whose flash kernels keep no scores; results equal those of
    Megatron's `DotProductAttention` up to rounding. SDPA's dropout draws other random numbers than Megatron's. So with
    dropout (in training, `attention_dropout` > 0) scores are formed and dropped as `DotProductAttention` does it, with
    the same draws and the same memory; results are bitwise equal if Megatron's softmax is the unfused one. Packed
    sequences and context parallelism, which `DotProductAttention` refuses, use SDPA's own dropout.

    Dropout draws under Megatron's RNG tracker, so that tensor-parallel ranks draw different numbers and recomputation
    draws the same ones; under sequence parallelism Megatron's transformer block has forked the tracker already.

    SDPA's softmax of 16-bit inputs is in fp32, whatever `attention_softmax_in_fp32` says.
    `apply_query_key_layer_scaling` guards the range of stored 16-bit scores and cancels in the result; SDPA stores no
    scores and ignores it. A query that sees no key gets zeros here, and the mean of all values in Megatron.

    Context parallelism takes the zigzag layout of `get_batch_on_this_cp_rank` and gathers keys and values, whatever
    `cp_comm_type` says (it names a way to communicate, and does not change results). Communicates: one all-gather over
    the `cp` group, backward one reduce-scatter; nothing without context parallelism.

    Not supported, each a ValueError: attention bias, softmax types with a sink ("off-by-one", "learnable"), qk-clip and
    the logging of the largest score, FP8 attention, packed sequences in another format than "thd".

    Args, as Megatron passes them:
        config: the fields read are `window_size`, `window_attn_skip_freq`, `attention_dropout`, `kv_channels`,
            `context_parallel_size`, `sequence_parallel`, `apply_query_key_layer_scaling`, `attention_softmax_in_fp32`,
            `batch_invariant_mode`, and those of the features that are not supported.
        layer_number: from 1.
        attn_mask_type: the mask type of calls that pass none.
        attention_type: "self" or "cross"; not read, as the tensors' shapes suffice.
        attention_dropout: None: `config.attention_dropout`.
        softmax_scale: None: 1 / sqrt(kv_channels).
        cp_comm_type: None, "p2p", "all_gather", "a2a" or "a2a+p2p".
        pg_collection, model_comm_pgs: an object whose process group `cp` is used; None: Megatron's own group. (The
            second name is that of Megatron-Core 0.14.)

    Raises:
        ValueError: a feature that is not supported; a `window_size` that is neither None nor two integers; an unknown
            `cp_comm_type`; a `cp` group that has not `config.context_parallel_size` ranks.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        model_comm_pgs=None,
    ):
        super().__init__(config=config)
        _check_config(config, cp_comm_type)
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.layer_scaling = max(1, layer_number) if config.apply_query_key_layer_scaling else None
        self.window = _window_of_layer(config, layer_number)
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        self.cp_group = context_parallel_group(getattr(groups, "cp", None))
        if group_size(self.cp_group) != config.context_parallel_size:
            raise ValueError(
                f"config.context_parallel_size is {config.context_parallel_size} and the context-parallel group has "
                f"{group_size(self.cp_group)} ranks: they must agree; initialise parallel_state with that size, or "
                f"pass a pg_collection with a `cp` group"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Compute the attention of one layer, on this rank's heads.

        Args:
            query: `[s, b, h, d]`; packed `[t, h, d]`. Under context parallelism s and t count this rank's tokens.
            key, value: `[s_k, b, g, d]`, packed `[t_k, g, d]`; h is a multiple of g.
            attention_mask: bool, broadcastable to `[b, h, s, keys of all ranks]`, True where a query must not look, or
                None. It hides keys beside those that mask type and window hide. A mask that only repeats "causal" is
                dropped (the comparison is one host synchronisation for each mask on a GPU); with any other mask no
                flash kernel can run. Ignored for packed sequences, whose boundaries hide the same keys.
            attn_mask_type: None: the constructor's. "causal" and "padding_causal" need as many keys as queries, or a
                single query, which is at the last key's position. `causal_bottom_right` takes any number of each; its
                last query is at the last key's position.
            packed_seq_params: Megatron's `PackedSeqParams`. `cu_seqlens_q` and `cu_seqlens_kv` count the tokens of all
                ranks, `cu_seqlens_*_padded` tokens and padding. Its `cp_group` (or `local_cp_size` 1) overrides the
                module's.

        Returns:
            `[s, b, h * d]`, packed `[t, h * d]`. Zeros for queries that see no key and for padding between sequences.

        Raises:
            ValueError: an attention bias; shapes, masks, lengths that do not fit.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is given: this core attention supports no bias; use Transformer Engine's")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal, cp_group = kind.name in _CAUSAL, SequenceParts.of(self.cp_group, packed_seq_params).group
        if packed_seq_params is None or packed_seq_params.qkv_format in (None, "sbhd"):
            mask = _narrowing(attention_mask, query, key, kind, cp_group)
            return self._attend(query, key, value, causal, cp_group, mask=mask).flatten(2)
        if packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f"packed_seq_params.qkv_format is {packed_seq_params.qkv_format!r}: it must be 'thd' or 'sbhd'; "
                f"lay the sequences end to end, [tokens, heads, channels]"
            )
        if any(x.dim() != 3 for x in (query, key, value)):
            raise ValueError(
                f"query is {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}: with packed "
                f"sequences ('thd') they must be [tokens, heads, channels]; remove the batch dim"
            )
        q_packing = Packing.of(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded)
        kv_packing = Packing.of(packed_seq_params.cu_seqlens_kv, packed_seq_params.cu_seqlens_kv_padded)
        if causal and q_packing.lengths != kv_packing.lengths and kind.name != "causal_bottom_right":
            raise ValueError(
                f"the mask type is {kind.name}, with documents of {list(q_packing.lengths)} queries and "
                f"{list(kv_packing.lengths)} keys: they must be equal; pass one cu_seqlens for both"
            )
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        out = self._attend(query, key, value, causal, cp_group, q_packing=q_packing, kv_packing=kv_packing)
        return out.flatten(1)

    def _attend(self, query, key, value, causal: bool, cp_group: Group, **seen: Any) -> Tensor:
        """Return the output `[s, b, h, d]`; `seen`: the arguments of `attend` that hide keys, beside the window."""
        window = Window(self.window.left, 0) if causal else self.window
        dropout = self.attention_dropout if self.training else 0.0
        with self._draws(dropout), attention_kernels(query, self.config):
            if dropout > 0 and group_size(cp_group) == 1 and "mask" in seen:
                return self._drop_as_megatron(query, key, value, window, seen["mask"], dropout)
            return attend(query, key, value, window, cp_group=cp_group, scale=self.scale, dropout=dropout, **seen)

    def _draws(self, dropout: float) -> contextlib.AbstractContextManager:
        """Fork Megatron's RNG tracker for dropout; under sequence parallelism Megatron has forked it already."""
        if dropout == 0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()

    def _drop_as_megatron(self, q_SBHD, k_TBGD, v_TBGD, window: Window, mask: Tensor | None, dropout: float) -> Tensor:
        """Compute attention by explicit scores, with the order of operations and the draws of `DotProductAttention`."""
        queries, batch, heads = q_SBHD.shape[:3]
        keys = k_TBGD.shape[0]
        if heads != k_TBGD.shape[2]:
            k_TBGD, v_TBGD = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k_TBGD, v_TBGD))
        q_NSD, k_NTD, v_NTD = (x.flatten(1, 2).transpose(0, 1) for x in (q_SBHD, k_TBGD, v_TBGD))
        scale = self.scale / (self.layer_scaling or 1)
        scores_NST = torch.baddbmm(q_NSD.new_zeros(()), q_NSD, k_NTD.transpose(1, 2), beta=0, alpha=scale)
        scores_BHST = scores_NST.unflatten(0, (batch, heads))
        if scores_BHST.dtype.itemsize == 2 and self.config.attention_softmax_in_fp32:
            scores_BHST = scores_BHST.float()
        if self.layer_scaling is not None:
            scores_BHST = scores_BHST * self.layer_scaling
        hidden = ~window.visible(keys - queries, queries, keys, q_SBHD.device)
        if mask is not None:
            hidden = hidden | mask
        # Finite, as a row of -inf alone would become NaN. In any other row hidden scores underflow to exact zeros.
        scores_BHST = scores_BHST.masked_fill_(hidden, torch.finfo(scores_BHST.dtype).min)
        probs_BHST = scores_BHST.softmax(-1).to(q_SBHD.dtype)
        if mask is not None:
            probs_BHST = probs_BHST.masked_fill(hidden.all(-1, keepdim=True), 0)
        probs_BHST = F.dropout(probs_BHST, dropout)
        out_NSD = torch.bmm(probs_BHST.flatten(0, 1), v_NTD)
        return out_NSD.unflatten(0, (batch, heads)).permute(2, 0, 1, 3)


def _check_config(config, cp_comm_type: str | None) -> None:
    if cp_comm_type not in _EXCHANGES:
        raise ValueError(f"cp_comm_type is {cp_comm_type!r}: it must be one of {list(_EXCHANGES)}")
    unsupported = {
        "softmax_type": "vanilla",
        "qk_clip": False,
        "log_max_attention_logit": False,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }
    for name, supported in unsupported.items():
        value = getattr(config, name, supported)  # older versions of Megatron-Core lack some of these fields
        if value != supported:
            raise ValueError(
                f"config.{name} is {value!r}: this core attention has only {supported!r}; change it, or put "
                f"TEDotProductAttention into the layer spec"
            )


def _window_of_layer(config, layer_number: int) -> Window:
    """Return the sliding window of a layer; without limits if the config has no window, or excepts this layer."""
    size = config.window_size
    if size is None:
        return Window()
    if not (isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) and n >= -1 for n in size)):
        raise ValueError(
            f"config.window_size is {size!r}: it must be None or two integers (left, right), -1 for no limit on a side"
        )
    skip = getattr(config, "window_attn_skip_freq", None)
    if isinstance(skip, int) and layer_number % skip == 0:
        return Window()
    if isinstance(skip, (tuple, list)) and not skip[layer_number - 1]:
        return Window()
    left, right = (None if n == -1 else n for n in size)
    return Window(left, right)


def _narrowing(mask: Tensor | None, query: Tensor, key: Tensor, kind: AttnMaskType, cp_group: Group) -> Tensor | None:
    """Check the mask's shape and return `mask`; None if the mask type alone hides the same keys."""
    ranks, queries, keys = group_size(cp_group), query.shape[0], key.shape[0]
    causal = kind.name in _CAUSAL
    if causal and queries != keys and queries > 1 and kind.name != "causal_bottom_right":
        raise ValueError(
            f"the mask type is {kind.name}, with {queries} queries and {keys} keys: they must be as many, or there "
            f"must be one query; with a key cache pass attn_mask_type=AttnMaskType.causal_bottom_right"
        )
    if mask is None:
        return None
    check_mask(mask, query, keys * ranks)
    return None if causal and _only_causal(mask, queries, ranks, group_rank(cp_group)) else mask


def _only_causal(mask: Tensor, queries: int, ranks: int, rank: int) -> bool:
    """Return whether the mask hides exactly the later keys; False if its values cannot be read now."""
    fake = torch.compiler.is_compiling() or isinstance(mask, FakeTensor)
    if mask.shape[-2] != queries or queries * ranks != mask.shape[-1] or fake:
        return False
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return _hides_what_lies_ahead(mask, ranks, rank)


@HostMemo
def _hides_what_lies_ahead(mask: Tensor, ranks: int, rank: int) -> bool:
    keys = mask.shape[-1]
    query = zigzag_positions(keys, ranks, rank, mask.device)[:, None]
    return bool((mask == (torch.arange(keys, device=mask.device) > query)).all())
