"""Transform of hidden states and logits around a model's lm head, measured on the model's own forward.

Families scale logits (Granite, Cohere), cap them (Gemma2) or leave them alone, each under names of its own. Instead of
knowing the names, the forward of the model runs once with a decoder that returns given numbers and a head that passes
them on; what comes out says what is done to them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ext.dtensor.decoder import output_head_path, text_model_path
from megatron_ext.dtensor.output.stand_ins import HOOKS, SampleDecoder, stub_of
from megatron_ext.head.adapters.peft_layers import unwrapped

# Small ones for the scale, large ones for the cap, and some between that tell other functions from both.
_PROBE = (1e-3, -1e-3, 0.1, -0.7, 2.0, -5.0, 11.0, -30.0, 70.0, -200.0, 1e30, -1e30)
# Of classes that wrap a whole causal LM, those that hand its logits on as they are.
_TRANSPARENT = ("Gemma3ForConditionalGeneration",)

_OWN_HOOKS = ("torch.distributed.", "transformers.integrations.", "megatron_ext.")


class HeadRule(NamedTuple):
    """The logits are `softcap * tanh(x / softcap)` of `x = scale * (hidden @ weight.T)`, or `x` itself."""

    scale: float = 1.0
    softcap: float | None = None

    def facts(self, temperature: float) -> dict[str, Any]:
        """Return the keywords of the head's functions, for logits that are divided by `temperature`."""
        return {"softcap": self.softcap, "temperature": temperature / self.scale}


def head_rule(model: nn.Module) -> HeadRule | None:
    """Return what `model`, on any device (also meta), makes of hidden states; None: it is not understood."""
    try:
        path = output_head_path(model)
        owner = model.get_submodule(path.rpartition(".")[0])
        head: Any = model.get_submodule(path)
        if owner is not model and not any(cls.__name__ in _TRANSPARENT for cls in type(model).__mro__):
            return None
        head, _ = unwrapped(head)
        if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
            return None
        probe = torch.tensor(_PROBE, dtype=torch.float64, device="cpu")
        rule = _measured(_through(owner, path.rpartition(".")[2], probe), probe)
    except Exception:  # a forward that needs more than a decoder and a head may raise anything
        return None
    # A scale before the head would leave its bias alone, one behind it would not.
    return None if rule is not None and rule.scale != 1 and head.bias is not None else rule


def why_unknown(model: nn.Module, name: str) -> str:
    """Why there is no rule of `model`, called `name`."""
    try:
        unwrapped(model.get_submodule(output_head_path(model)))
    except ValueError as fault:
        return str(fault)
    return f"what {name} does to its logits is not known here"


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


def _through(owner: nn.Module, head: str, x: Tensor) -> Tensor:
    """Return what the forward of `owner` makes of hidden states `x` `[N]`, if its head is the identity."""
    stub = stub_of(owner)
    stub._modules[text_model_path(owner).partition(".")[0]] = SampleDecoder(x[None, None])
    stub._modules[head] = nn.Identity()
    with torch.no_grad():
        logits: Tensor = stub.forward(input_ids=x.new_zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    if logits.shape != (1, 1, len(x)):
        raise ValueError(f"logits of {list(logits.shape)} for one token")
    return logits[0, 0].double()


def _measured(y: Tensor, x: Tensor) -> HeadRule | None:
    scale, largest = (y[0] / x[0]).item(), y[-2].item()
    if largest >= 1e20:
        rule, expected = HeadRule(scale), scale * x
    else:
        rule, expected = HeadRule(1.0, largest), largest * torch.tanh(x / largest)
    # Forwards that go through fp32 round there.
    known = rule.scale > 0 and bool(torch.isfinite(y).all()) and torch.allclose(y, expected, rtol=1e-6, atol=0.0)
    return rule if known else None
