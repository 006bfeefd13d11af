"""The gradient of logits, made and kept in forward, of a read-out whose upstream gradient is a factor of each token.

Where nothing is exchanged, a chunk's own statistics say what its read-out's gradient is, while the logits of student
and teacher are there: it is written over the student's. Backward makes no logits then, and the factors g commute with
the products' other sides, as in `linear.py`:

    dx = g * (U @ W)        dW = U.T @ (g * x)

Legend: T tokens, t of a chunk, D hidden size, V columns, K statistics. U: the gradient where g is 1.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import chunk_sizes, matmul
from megatron_ext.head.call.matmul import WeightSums
from megatron_ext.head.engine.chunked.sources import ComputedLogits
from megatron_ext.head.engine.plan import Plan
from megatron_ext.numerics import cpu_products, matrices
from megatron_ext.numerics.matrices import accumulation_dtype
from megatron_ext.numerics.readable_values import has_values


class KeptGradient:
    """U of the first tokens, and which of them have none: `unit_TV` of the hidden states' dtype, `bad_T` bool.

    A row that is not finite is kept as 0, so that it does no harm where its factor is 0, and `bad`.
    """

    def __init__(self, plan: Plan, source: ComputedLogits, unit_TV: Tensor, bad_T: Tensor):
        self._plan, self._source, self.unit_TV, self.bad_T = plan, source, unit_TV, bad_T
        self.tokens = unit_TV.shape[0]

    def chunks(self) -> list[slice]:
        """Return the chunks of all tokens: none has kept ones and others. On CUDA as many at a time as where dW is
        summed, since a read-out has dozens of launches a chunk."""
        parts = slice(0, self.tokens), slice(self.tokens, self._plan.tokens)
        x_TD, w_VD = self._source.x_TD, self._source.w_VD
        tokens = self._plan.call.chunk_tokens or (chunk_sizes.summed_tokens(w_VD) if x_TD.is_cuda else None)
        options = tokens, w_VD.shape[0], x_TD, 0
        return [rows for part in parts for rows in chunk_sizes.product_chunks(part, *options)]

    def write(self, rows: slice, readout: Any, raw_tV: Any, logits: list[Tensor], stats_Kt: Tensor) -> None:
        """U of a chunk that `readout` has scanned, in the memory of its logits; `raw_tV`: before bias and softcap."""
        if rows.stop > self.tokens:
            return
        out_tV, tokens = logits[0], rows.stop - rows.start
        (value_t, *_), saved = readout.results(None, stats_Kt.unsqueeze(0), stats_Kt)
        readout.pull(saved, slice(0, tokens), logits, torch.ones_like(value_t), out_tV, True)
        out_tV[:, self._plan.call.counted :] = 0
        transform = self._source.transform
        if transform.changes:
            transform.pull(raw_tV, out_tV)
        if not has_values(value_t) or value_t.is_cuda or not value_t.isfinite().all():
            bad_t = ~out_tV.sum(1, dtype=accumulation_dtype(out_tV.dtype)).isfinite()
            self.bad_T[rows] = bad_t
            out_tV.masked_fill_(bad_t.unsqueeze(1), 0)
        if transform.changes or matrices.widens(self._source.x_TD, transform.rounds):
            self.unit_TV[rows] = out_tV

    def add_products(self, grad_T: Tensor | None, out: tuple[Tensor | None, WeightSums, Tensor | None]) -> None:
        """Write dx of the kept tokens, and add what they give to dW and db: `out`, each None where it is not wanted."""
        kept, (dx_TD, sums, total_V), x_TD = self.tokens, out, self._source.x_TD
        g_T = x_TD.new_zeros(kept) if grad_T is None else grad_T[:kept]
        g_T = g_T.to(accumulation_dtype(x_TD.dtype))
        g_T1 = g_T.masked_fill(self.bad_T & (g_T != 0), torch.nan).unsqueeze(1)
        if dx_TD is not None:
            dx_TD[:kept] = matmul.add_product(None, self.unit_TV, self._source.w_VD).mul_(g_T1)
        if sums.wanted:
            # Hidden states of tokens that do not count may be NaN.
            scaled_TD = (x_TD[:kept] * g_T1).masked_fill_(g_T1 == 0, 0).to(x_TD.dtype)
            sums.add(self.unit_TV, scaled_TD)
        if total_V is not None:
            total_V += cpu_products.mm(self.unit_TV.t(), g_T1.to(self.unit_TV.dtype)).squeeze(1)


def of(plan: Plan, source: ComputedLogits) -> KeptGradient | None:
    """Return the memory for the gradients of a call whose logits `source` makes; None: nothing is kept."""
    call, (x_TD, w_VD) = plan.call, (source.x_TD, source.w_VD)
    if len(plan.readouts) != 1 or not plan.readouts[0].by_factor or call.ranks != 1 or call.fixed:
        return None
    if torch.compiler.is_compiling():  # which does not take an output of forward in whose memory its products lie
        return None
    tokens = chunk_sizes.kept_tokens(call, plan.tokens, w_VD.shape[0], x_TD)
    if not tokens:
        return None
    source.memory_TV = matrices.new_matrix(x_TD, tokens, w_VD.shape[0])
    return KeptGradient(plan, source, source.memory_TV, torch.zeros(tokens, dtype=torch.bool, device=x_TD.device))
