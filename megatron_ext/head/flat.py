"""Leading dims made one, and given back."""

from torch import Tensor


class Flat:
    """The leading dims of logits `[..., V]` as one, in the order of their strides: transposed ones are not copied."""

    def __init__(self, logits: Tensor):
        self.shape, strides = logits.shape[:-1], logits.stride()
        self.order = sorted(range(len(self.shape)), key=lambda dim: -strides[dim])
        self.back = sorted(range(len(self.order)), key=self.order.__getitem__)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, ...]` of a tensor with the same leading dims."""
        behind = range(len(self.order), x.dim())
        return x.permute(*self.order, *behind).reshape(self.shape.numel(), *x.shape[len(self.order) :])

    def up(self, x_T: Tensor) -> Tensor:
        """The tensor whose leading dims were made one."""
        x = x_T.reshape(*(self.shape[dim] for dim in self.order), *x_T.shape[1:])
        return x.permute(*self.back, *range(len(self.order), x.dim()))
