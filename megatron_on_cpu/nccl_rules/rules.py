"""Settings of NCCL's rules."""

from dataclasses import dataclass

ORDERS = ("raise", "warn", "ignore")


@dataclass(frozen=True)
class NcclRules:
    """Settings of a job that NCCL's behaviour depends on.

    `eager`: the process group was made with `device_id`. Messages then run on their group's own communicator, among its
    collectives, and each communicator is made with its group. Otherwise (False) each pair of ranks has a communicator
    of its own for messages outside `batch_isend_irecv`, and communicators are made at first use.

    `buffer_bytes`: a message of at most so many bytes may be complete before its receiver has come, as may the root's
    part of a broadcast and the others' of a reduce. NCCL has buffers of a few MB; a program that is right does not
    need them (0).

    `order`: what happens where two ranks launched operations of two communicators in different orders, without waiting
    in between, or orders of more communicators go round: "raise", "warn" or "ignore".

    `device_is_set`: the job has called `torch.cuda.set_device`, without which object collectives are refused.
    """

    eager: bool = False
    buffer_bytes: int = 0
    order: str = "warn"
    device_is_set: bool = False

    def __post_init__(self) -> None:
        if self.buffer_bytes < 0:
            raise ValueError(f"buffer_bytes={self.buffer_bytes} must not be negative; 0 is NCCL without buffers")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r} must be one of {', '.join(map(repr, ORDERS))}")
