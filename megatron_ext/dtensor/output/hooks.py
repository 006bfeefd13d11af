"""Hooks of others on a model and its lm head, which a fused head would leave out."""

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.stand_ins import HOOKS

_OWN_HOOKS = ("torch.distributed.", "transformers.integrations.", "megatron_ext.")
_OWN_OF_ALL = ("torch.", *_OWN_HOOKS)  # as those of torch's counter of operations


def is_hooked(model: nn.Module, head: bool = True) -> bool:
    """Return whether hooks wait for a call of the model or of any module, for gradients of its head, or with `head` for
    a call of that or a layer inside of an adapter there; those of torch's and transformers' parallelism, and ours, do
    not count."""
    path = output_head_path(model)
    around, layers = [model, model.get_submodule(path.rpartition(".")[0])], list(model.get_submodule(path).modules())
    hooks: list[Any] = []
    of_all: list[Any] = []
    for kind in HOOKS:
        for module in around + (layers if head or kind in HOOKS[2:] else []):
            hooks += vars(module)[kind].values()
        of_all += getattr(torch_module, f"_global{kind}").values()
    own, own_of_all = (_OWN_HOOKS, hooks), (_OWN_OF_ALL, of_all)
    return any(not _module_of(hook).startswith(homes) for homes, some in (own, own_of_all) for hook in some)


def _module_of(hook: Any) -> str:
    """Return the module that a hook's function is from, of a method or a partial too."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", ""))
