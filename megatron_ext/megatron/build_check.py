"""Check of a script's models, once they are built and before they are trained: which losses would be fused.

    check_models([model])           # language models, or models around them
    stop_when_built(say)            # in a script that builds and trains by itself

A script has built its models when it makes its first optimizer, or runs its first language model. Hooks in torch notice
both, however the script builds its models. A wrapper around the models' constructor lists the models.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron.fused_loss import fusion_decision
from megatron_ext.megatron.fused_loss.fused_region import layers_of
from megatron_ext.megatron.fused_loss.model_methods import models_inside
from megatron_ext.megatron.fusion_report import layers_in_words, name_of
from megatron_ext.replace import Replacement, apply_all, restore_all


@dataclass(frozen=True)
class ModelCheck:
    """The result for one language model.

    Attributes:
        model: its class name, and its virtual pipeline stage if there is one.
        has_output_layer: whether this rank's pipeline stage has the output layer; without it nothing can be fused here.
        losses: how many losses a micro-batch takes from the output layer: one, and one for each layer of
            multi-token prediction.
        why_not: why the fused head would leave the model to Megatron's own loss; None if it would not.
        to_prove: the part of its output layer or loss that is neither Megatron's nor ours, so that the first batch
            decides; None if there is none.
        shared: whether all pipeline stages share its vocabulary, and compute its loss together.
        layers: the number of its tensor-parallel layers, by the package that they come from.
    """

    model: str
    has_output_layer: bool
    losses: int
    why_not: str | None
    layers: Counter[str]
    to_prove: str | None = None
    shared: bool = False

    def __str__(self) -> str:
        if not self.has_output_layer:
            head = "no output layer on this pipeline stage"
        elif self.why_not is not None:
            head = f"left to Megatron's own loss: {self.why_not}"
        elif self.to_prove is not None:
            head = f"the first batch decides: {self.to_prove}"
        else:
            head = f"fused, {self.losses} loss{'es' * (self.losses > 1)} of each micro-batch without logits"
            head += ", the vocabulary shared over pipeline stages" * self.shared
        return f"{self.model}: {head}" + (f"; {layers_in_words(self.layers)}" if self.layers else "")


@dataclass(frozen=True)
class BuildCheck:
    """The results for the language models of this rank, in the order in which the check found them."""

    models: tuple[ModelCheck, ...]

    @property
    def passed(self) -> bool:
        """Return whether there is a model, and no model keeps Megatron's own loss or has to be proved first."""
        return bool(self.models) and all(one.why_not is one.to_prove is None for one in self.models)

    def __str__(self) -> str:
        if not self.models:
            return "fused head: the script has built no language model of Megatron's"
        return "\n".join(f"fused head: {one}" for one in self.models)


def check_models(models: Iterable[Any]) -> BuildCheck:
    """Report what the fused head would do with these models, wrapped or not.

    Nothing is computed, changed or communicated.
    """
    return BuildCheck(tuple(_check(one) for model in models for one in models_inside(model)))


def _check(model: Any) -> ModelCheck:
    layer = fusion_decision.output_layer(model)
    has_output_layer, shared = layer is not None, getattr(layer, "promises", False)
    why_not = fusion_decision.why_not_fused(model) if has_output_layer and not shared else None
    known = shared or not has_output_layer or why_not is not None
    return ModelCheck(
        model=name_of(model),
        has_output_layer=has_output_layer,
        losses=1 + fusion_decision.multi_token_layers(model),
        why_not=why_not,
        layers=layers_of(model),
        to_prove=None if known else fusion_decision.what_is_not_known(model),
        shared=shared,
    )


def stop_when_built(say: Callable[[BuildCheck], None]) -> None:
    """End the script as soon as it has built its models: call `say` with the check, and raise SystemExit.

    The exit code is 0 if the check has passed, 1 if not. A script that builds no model runs to its end. Models built
    before this call are not checked.
    """
    built: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in the order of construction

    def stop() -> None:
        restore_all(watched)
        handle.remove()
        found = check_models([*built])
        say(found)
        raise SystemExit(0 if found.passed else 1)

    def remembering(construct: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            built[self] = None

        return init

    def stopping(construct: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if built:
                stop()
            construct(self, *args, **kwargs)

        return init

    def before_forward(module: Any, inputs: Any) -> None:
        if module in built:
            stop()

    watched = apply_all(
        [
            Replacement(LanguageModule, "__init__", remembering),
            Replacement(torch.optim.Optimizer, "__init__", stopping),
        ]
    )
    handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
