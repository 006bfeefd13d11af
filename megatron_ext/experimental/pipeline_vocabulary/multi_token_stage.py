"""Multi-token prediction on the last of several stages that share the vocabulary: all its lookups and losses at once.

Layer k of multi-token prediction (MTP) looks up the token ids k positions further on, and predicts the labels k further
on. Both follow from the batch before any layer has run. So the passes of the vocabulary do them for all layers together
with the model's own, as if a micro-batch had P = 1 + layers times as many sequences: one exchange, as without MTP.
"""

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_ext.experimental.pipeline_vocabulary.paused_forward import AskLosses, Losses, ask, differentiable, known
from megatron_ext.megatron.fused_loss.module_calls import call_known


class ModelCall:
    """State of one call of the model, kept in the context of its paused forward step.

    Attributes:
        arguments: the model's arguments, by name.
        hidden: hidden states of all predictions, one after the other `[P S, B, H]`, once the layers of MTP have run.
        embeddings: ids and embeddings for layers of MTP that have not asked for theirs; None before the first asks.
        labels, losses: of all predictions; empty and None before the first is asked for.
    """

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments
        self.hidden: Tensor | None = None
        self.embeddings: list[tuple[Tensor, Tensor]] | None = None
        self.labels: tuple[Tensor, ...] = ()
        self.losses: Losses | None = None

    def further_on(self, tensor_BS: Tensor, layers: int) -> list[Tensor]:
        """Return P tensors `[B, S]`: the tensor itself, and its shift for each layer of MTP."""
        settings = {
            "cp_group": parallel_state.get_context_parallel_group(),
            "packed_seq_params": self.arguments.get("packed_seq_params"),
        }
        found = [tensor_BS]
        for _ in range(layers):
            found.append(call_known(multi_token_prediction.roll_tensor, found[-1], shifts=-1, dims=-1, **settings)[0])
        return found


_under_way: ContextVar[ModelCall] = ContextVar("megatron_ext_model_call")


def watch(model: Any) -> None:
    """Note the arguments of every call of `model`, and the hidden states that its layers of MTP make."""
    signature = inspect.signature(model.forward)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        _under_way.set(ModelCall(signature.bind(*args, **kwargs).arguments))

    def after_layers(module: Any, args: Any, hidden: Any) -> None:
        _under_way.get().hidden = hidden

    model.register_forward_pre_hook(before, with_kwargs=True)
    if getattr(model, "mtp_process", False):
        model.mtp.register_forward_hook(after_layers)


def ids_of_all(ids_BS: Tensor, layers: int) -> Tensor:
    """Return `[P B, S]`: the token ids, and those that the layers of MTP will look up."""
    return torch.cat(_under_way.get().further_on(ids_BS, layers)) if layers else ids_BS


def next_embedding(ids_BS: Tensor, layers: int, batch_dim: int) -> Tensor:
    """Return the embedding that a layer of MTP asks for, of token ids `[B, S]`."""
    call = _under_way.get()
    if call.embeddings is None:
        ids, answer, send = known().further.pop()
        embeddings = differentiable(answer, send).chunk(layers, batch_dim)
        call.embeddings = list(zip(ids.chunk(layers), embeddings, strict=True))
    if not call.embeddings:
        raise ValueError(f"the layers of multi-token prediction ask for more embeddings than they are: {layers}")
    expected, embedding = call.embeddings.pop(0)
    known().expect(ids_BS, expected, "token ids of a layer of multi-token prediction")
    return embedding


def losses_of(hidden: Tensor, labels_BS: Tensor, layers: int) -> tuple[Losses, int]:
    """Return the losses of one prediction, of hidden states `[S, B, H]`, and the prediction's number."""
    call = _under_way.get()
    if call.hidden is None or call.arguments.get("labels") is None:
        raise ValueError(
            "layers of multi-token prediction take losses of the model's labels: call the model with labels"
        )
    parts = call.hidden.detach().chunk(1 + layers)
    if call.losses is None:
        call.labels = tuple(call.further_on(call.arguments["labels"], layers))
        call.losses = ask(AskLosses(torch.cat(parts, 1), torch.cat(call.labels)))
    which = [at for at, part in enumerate(parts) if part.data_ptr() == hidden.data_ptr() and part.shape == hidden.shape]
    if len(which) != 1:
        raise ValueError(
            "a loss is asked of hidden states that are not those of the model's last layer or of a layer of "
            "multi-token prediction: a vocabulary shared over pipeline stages has no other losses"
        )
    known().expect(labels_BS, call.labels[which[0]], "labels of a layer of multi-token prediction")
    return call.losses.part(which[0], 1 + layers), which[0]
