"""Settings of NCCL's rules."""

from dataclasses import dataclass

ORDERS = ("raise", "warn", "ignore")


@dataclass(frozen=True)
class NcclRules:
    """Settings of a job on which NCCL's behaviour depends.

    `eager`: whether the process group was made with `device_id`. If so, messages run on their group's own communicator,
    among its collectives, and each communicator is made with its group. Otherwise each pair of ranks has a communicator
    of its own for messages outside `batch_isend_irecv`, and communicators are made at first use.

    `buffer_bytes`: a message of at most this size may be complete before its receiver has come, and so may the root's
    part of a broadcast and the other ranks' part of a reduce. NCCL has buffers of a few MB; a correct program does not
    need them (0).

    `order`: "raise", "warn" or "ignore" if two ranks launched operations of two communicators in different orders,
    without waiting in between, or if the orders of more communicators form a circle.

    `device_is_set`: whether the job has called `torch.cuda.set_device`; without it object collectives are refused.
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
