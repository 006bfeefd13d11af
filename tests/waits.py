"""Detection, without a GPU, of operations that make the host wait for one."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READ_BACK = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}
FROM_THE_HOST = {aten.lift_fresh, aten.lift_fresh_copy}  # torch.tensor(...), and lists as indices
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}


class NoWait(TorchDispatchMode):
    """A dispatch mode that fails on reads of values, sizes that depend on values, and blocking copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        assert packet not in READ_BACK, f"{func} reads values"
        # A number is passed as an argument of a kernel, without a copy.
        assert packet not in FROM_THE_HOST or not args[0].dim(), f"{func} makes a tensor of values of the host"
        if packet in BY_INDEX:
            found = [x for x in args[1] if x is not None]
            assert all(x.dtype != torch.bool for x in found), f"{func}: a mask decides the size of its result"
            found += args[2:3] if len(args) > 2 else []
            assert all(x.device == args[0].device for x in found), f"{func}: an index of values of the host"
        if packet is aten._to_copy:
            self.check_copy(args[0], kwargs.get("device") or args[0].device, kwargs.get("non_blocking"))
        if packet is aten.copy_:
            self.check_copy(args[1], args[0].device, kwargs.get("non_blocking", len(args) > 2 and args[2]))
        return func(*args, **kwargs)

    @staticmethod
    def check_copy(x: torch.Tensor, device: torch.device, non_blocking) -> None:
        if x.device.type != torch.device(device).type:
            assert torch.device(device).type != "cpu", "a copy to the host, which will read it"
            assert non_blocking, "a blocking copy"
