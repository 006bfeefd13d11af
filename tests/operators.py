"""Dispatch modes that record torch's operators and the sizes of their results."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """A dispatch mode whose `seen` has the operators in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

    def names(self, namespace: str) -> list[str]:
        return [func._opname for func in self.seen if func.namespace == namespace]


class Largest(TorchDispatchMode):
    """A dispatch mode whose `size` is the largest `measure` of a tensor that an operator returns."""

    def __init__(self, measure: Callable[[torch.Tensor], int]):
        super().__init__()
        self.measure, self.size = measure, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(self.measure(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result
