"""What `bits` asks for and cannot have."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.fixed_bits.leaves import LEAVES, leaves_fault
from megatron_ext.head.validation.option_checks import Bits


def bits_fault(bits: Bits, shard: VocabShard, ranks: int, hidden: Tensor, readouts: Sequence[Any]) -> ValueError | None:
    """What is wrong with this rank's shard, given bits that are not "fast".

    Raises:
        ValueError: what every rank sees: the device, the number of ranks, or a read-out that has no such bits.
    """
    if hidden.device.type not in ("cpu", "meta"):
        raise ValueError(
            f'bits is "{bits}" and hidden is on {hidden.device}: on CUDA only bits="fast" can be had, whose bits are '
            f"the same in each run with the same shapes, and may depend on the number of tokens; pass that, or turn "
            f"Megatron's batch_invariant_mode off, where that asked for other bits"
        )
    if bits != "tensor_parallel":
        return None
    if LEAVES % ranks:
        raise ValueError(f'bits is "tensor_parallel" over {ranks} ranks: it must be 1, 2, 4 or 8; use bits="batch"')
    for readout in readouts:
        if readout.needs_logits:
            raise ValueError(
                f'bits is "tensor_parallel" and {type(readout).__name__} is read: only read-outs of the softmax '
                f"(losses, log-probabilities, entropy, mean, log-sum-exp, z-loss, hits) have these bits; use "
                f'bits="batch"'
            )
    return leaves_fault(shard, ranks)
