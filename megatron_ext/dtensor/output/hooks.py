"""Hooks of others on a model and its lm head, which a fused head would leave out."""

from typing import Any

from torch import nn

from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.stand_ins import HOOKS

_OWN_HOOKS = ("torch.distributed.", "transformers.integrations.", "megatron_ext.")


def is_hooked(model: nn.Module, head: bool = True) -> bool:
    """Return whether hooks wait for a call of the model, or with `head` of its head or a layer inside of an adapter
    there; those of torch's and transformers' parallelism, and ours, do not count."""
    path = output_head_path(model)
    modules = [model, model.get_submodule(path.rpartition(".")[0])]
    modules += model.get_submodule(path).modules() if head else []
    hooks = [hook for module in modules for kind in HOOKS for hook in vars(module)[kind].values()]
    return any(not _module_of(hook).startswith(_OWN_HOOKS) for hook in hooks)


def _module_of(hook: Any) -> str:
    """Return the module that a hook's function is from, of a method or a partial too."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", ""))
