"""An output layer with a bias and a softcap of the logits, which GPTModel's own layer lacks."""

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_ext.tensor_parallel.layers import ColumnParallelLinear


class OutputLayer(ColumnParallelLinear):
    """Logits `softcap * tanh(z / softcap)` with `z = hidden @ weight.T + bias`, sharded over the vocabulary.

    `set_output_layer` makes it from `ModuleSpec(OutputLayer, params={"bias": True, "softcap": 30.0})`. The fused head
    applies bias and softcap too. `softcap=None`: logits are not capped. Communicates what `ColumnParallelLinear` does.

    Raises:
        ValueError: `softcap` is not positive.
    """

    def __init__(self, *args, bias: bool = False, softcap: float | None = None, **kwargs):
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap is {softcap!r}: it must be positive, or None for no softcap")
        super().__init__(*args, bias=bias, **kwargs)
        self.softcap = softcap
        if bias:
            self.bias.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """Run `ColumnParallelLinear.forward`, with the layer's transform of logits."""
        logits, bias = super().forward(*args, **kwargs)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap), bias


def is_bent(layer: Any) -> bool:
    """Return whether an output layer's logits are more than a product: it has a bias or a softcap."""
    return any(getattr(layer, name, None) is not None for name in ("bias", "softcap"))


def set_output_layer(model, spec: ModuleSpec) -> None:
    """Give a GPTModel another output layer with the weight of the old one, before the model is wrapped and trained.

    `spec` names the class, which is called as `ColumnParallelLinear` is, and its further arguments. A model without an
    output layer (another pipeline stage) is left as it is. Communicates nothing.
    """
    if not model.post_process:
        return
    old = model.output_layer
    new = build_module(
        spec,
        old.input_size,
        old.output_size,
        config=model.config,
        init_method=model.config.init_method,
        gather_output=old.gather_output,
        skip_weight_param_allocation=True,
        embedding_activation_buffer=old.embedding_activation_buffer,
        grad_output_buffer=old.grad_output_buffer,
        tp_group=old.tp_group,
    )
    new.weight = old.weight
    model.output_layer = new
