"""Memory shared with other processes of this host, released when its owner and all users have ended.

The memory is an anonymous file (Linux's memfd), which others open through the owner's /proc/PID/fd. It has no name that
could be left behind, and is not bounded by the size of /dev/shm, which containers keep small.
"""

import mmap
import os
import platform
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockAddress:
    """Address at which another process finds a block. The inode tells a block from a later user of its descriptor."""

    host: str
    process: int
    descriptor: int
    inode: int
    nbytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.process}/fd/{self.descriptor}"


class SharedBlock:
    """`buffer`, uint8 `[nbytes]`, mapped in this process, and its `address`; open for others until `free()`."""

    def __init__(self, nbytes: int):
        if not hasattr(os, "memfd_create"):
            raise OSError(f"weights in shared memory need Linux, this is {platform.system()}: send them by a broadcast")
        self._descriptor = os.memfd_create("megatron_ext weights")
        try:
            os.posix_fallocate(self._descriptor, 0, max(1, nbytes))  # fails here, not at a later write
            self.buffer = torch.frombuffer(mmap.mmap(self._descriptor, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
        except BaseException:
            os.close(self._descriptor)
            raise
        inode = os.fstat(self._descriptor).st_ino
        self.address = BlockAddress(platform.node(), os.getpid(), self._descriptor, inode, nbytes)

    def free(self) -> None:
        """Close the descriptor: processes that have mapped the memory keep it, and no other can map it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self.buffer = torch.empty(0, dtype=torch.uint8)


def map_block(address: BlockAddress) -> Tensor:
    """Map a block of another process, uint8 `[nbytes]`. Writes to it stay in this process."""
    try:
        descriptor = os.open(address.path, os.O_RDONLY) if address.host == platform.node() else -1
    except OSError:
        descriptor = -1
    try:
        if descriptor < 0 or os.fstat(descriptor).st_ino != address.inode:
            raise ValueError(
                f"the weights that process {address.process} on {address.host} shared cannot be mapped on "
                f"{platform.node()}: they were freed, their owner has died, or this process is not on its host, in "
                f"its container and of its user; ask for new ones, or send them by a broadcast"
            )
        mapped = mmap.mmap(
            descriptor, max(1, address.nbytes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[: address.nbytes]
