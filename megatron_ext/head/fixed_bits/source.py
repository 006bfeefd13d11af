"""Hidden states, weight and bias of a call leaf by leaf, and what is kept of logits for backward.

What is kept is exponentials relative to the maximum of a leaf, which no rank's shard changes, in the hidden states'
dtype: made again they have the same bits. Where a softcap or an entropy bends the gradient, logits are kept instead. On
a CPU all of a leaf is kept for the first tokens, and backward goes by chunks of tokens. On CUDA the first columns of
each leaf are kept for all tokens, and backward goes by blocks of columns: each row of dW is written once.

Legend: T tokens, t of a chunk, D hidden size, V columns of a leaf or of a block of it.
"""

from torch import Tensor

from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.leaves import leaves_of
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics import fixed_order, matrices
from megatron_ext.numerics.fixed_order import TOKENS
from megatron_ext.numerics.matrices import accumulation_dtype

# What a launch sums at a time on CUDA: a product over columns that ends at a multiple of it goes on in the next one.
_STEP = 64


class Source:
    """Hidden states of all tokens, and weight, of their dtype, and bias leaf by leaf."""

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: ResolvedHead):
        self.x_TD, self.call, self.leaves = fixed_order.aligned(x_TD), call, leaves_of(call)
        self.on_gpu, self.dtype = x_TD.is_cuda, accumulation_dtype(x_TD.dtype)
        self.weights = [leaf.cut(weight_VD) for leaf in self.leaves]
        wide_V = None if bias_V is None else bias_V.to(self.dtype)
        self.biases = [None if wide_V is None else leaf.cut(wide_V) for leaf in self.leaves]
        self.columns = sum(leaf.width for leaf in self.leaves)
        self.keeps_exp = call.softcap is None and not call.expected
        self._whole: Tensor | None = None

    def new_kept(self, share: float) -> list[Tensor]:
        """Room for what is kept of each leaf, `[T, V]` or a part of that: `share` of it."""
        tokens, x_TD = self.x_TD.shape[0], self.x_TD
        if not self.on_gpu:
            kept = tokens if share >= 1 else int(tokens * share) // TOKENS * TOKENS
            return [matrices.new_matrix(x_TD, kept, leaf.width) for leaf in self.leaves]
        dtype = x_TD.dtype if self.keeps_exp else matrices.logit_dtype(x_TD, self.call.rounds)
        share = share * x_TD.element_size() / dtype.itemsize
        widths = [leaf.width if share >= 1 else int(leaf.width * share) // _STEP * _STEP for leaf in self.leaves]
        return [matrices.new_matrix(x_TD, tokens, width, dtype) for width in widths]

    def token_chunks(self, kept: list[Tensor], room: int) -> list[slice]:
        """Tokens at a time in forward. `room`: bytes that a chunk's logits may take on CUDA."""
        tokens, call = self.x_TD.shape[0], self.call
        if not self.on_gpu:
            return chunk_sizes.fixed_chunks(call, tokens, kept[0].shape[0], self.columns)
        width = self.leaves[0].width
        return chunk_sizes.product_chunks(slice(0, tokens), call.chunk_tokens, width, self.x_TD, room)

    def tiles(self, kept: list[Tensor]) -> list[tuple[slice, list[list[slice]]]]:
        """Parts of backward: tokens, and blocks of each leaf's columns. None is kept in part."""
        tokens, call = self.x_TD.shape[0], self.call
        if not self.on_gpu:
            whole = [[slice(0, leaf.width)] for leaf in self.leaves]
            return [(rows, whole) for rows in chunk_sizes.fixed_chunks(call, tokens, kept[0].shape[0], self.columns)]
        blocks = []
        for leaf, kept_TV in zip(self.leaves, kept, strict=True):
            first, rest = kept_TV.shape[1], leaf.width - kept_TV.shape[1]
            found = [slice(0, first)] if first else []
            if rest:
                likes = chunk_sizes.column_blocks(tokens, rest, call.chunk_tokens, self.x_TD, self.x_TD.shape[1])
                step = -(-likes[0].stop // _STEP) * _STEP
                found += [slice(at, min(at + step, leaf.width)) for at in range(first, leaf.width, step)]
            blocks.append(found)
        return [(slice(0, tokens), blocks)]

    def logits(self, rows: slice, at: int, block: slice, out_tV: Tensor | None = None) -> Tensor:
        """Return the logits of a block of leaf `at`, `[t, V]`: new on CUDA, in fp32 or rounded, on a CPU in `out`."""
        out_tV = None if self.on_gpu else out_tV
        return fixed_order.logits(self.x_TD[rows], self.weights[at][block], out_tV, self.call.rounds)

    def room(self, rows: slice, at: int, block: slice) -> Tensor:
        """Memory for a matrix `[t, V]` in the hidden states' dtype: on a CPU the same each time."""
        tokens, width = rows.stop - rows.start, block.stop - block.start
        if self.on_gpu:
            return matrices.new_matrix(self.x_TD, tokens, width)
        if self._whole is None or self._whole.shape[0] < tokens or self._whole.shape[1] != width:
            self._whole = matrices.new_matrix(self.x_TD, tokens, width)
        return self._whole[:tokens]


def part_kept(kept_TV: Tensor, rows: slice, block: slice) -> Tensor | None:
    """Return the part of a tile, if it is kept."""
    if rows.stop > kept_TV.shape[0] or block.stop > kept_TV.shape[1]:
        return None
    return kept_TV[rows, block]
