"""Log-probabilities of labels under the distribution that they were sampled from: temperature, top-k, then top-p."""

from torch import Tensor

from megatron_ext.head.checks import filters
from megatron_ext.head.readouts.kept import Kept
from megatron_ext.head.readouts.read_out import LogProbs, ReadOut
from megatron_ext.head.readouts.top_k_filter import TopKFiltered
from megatron_ext.head.readouts.top_p_filter import TopPFiltered


def Sampled(
    labels: Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    ignore_index: int = -100,
    kept: tuple[Tensor, Tensor] | None = None,
) -> ReadOut:
    """The read-out of `sampled_log_probs`, of its arguments: `[...]`, fp32 (fp64 for fp64).

    Communicates, at several ranks, beside the common exchange: with a `top_k` above 4096 a number of each rank; with
    top-p alone one all-gather of the shards, then one exchange of logits a chunk.
    """
    filtered = filters(top_k, top_p)
    if kept is not None:
        if filtered or not isinstance(kept, tuple | list) or len(kept) != 2:
            raise ValueError(
                f"kept is {type(kept).__name__} beside top_k {top_k!r} and top_p {top_p!r}: it must be (offsets, ids), "
                f"and filters off: what is kept has been through them; pass top_k=None and top_p=1.0"
            )
        return Kept(labels, *kept, ignore_index)
    if not filtered:
        return LogProbs(labels, ignore_index)
    if top_k is None or top_k == -1:
        return TopPFiltered(labels, float(top_p), ignore_index)
    return TopKFiltered(labels, top_k, float(top_p), ignore_index)
