"""The virtual pipeline stages of this rank's GPTModel as one module, with parameter names of the whole model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_ext.distributed.collectives import broadcast
from megatron_ext.policy.data.agreement_of_ranks import agree

_EXPERTS = ".local_experts."


class Chunks(nn.Module):
    """A module with the weights of `pieces` under the names, and layer and expert numbers, that they have in the whole
    model: checkpoints, optimizers and generators need not know of stages.

    It has no forward: `pieces` compute. Its `to`, `train` and `zero_grad` act on them.

    Args:
        first_expert: the number of this rank's first expert of a layer.
    """

    def __init__(self, pieces: Sequence[GPTModel], first_expert: int = 0):
        super().__init__()
        self.pieces = list(pieces)  # a list registers nothing: the weights get other names
        self.config, self.vocab_size = pieces[0].config, pieces[0].vocab_size
        self._second: list[Tensor] = []  # registered under their name in the first stage
        for piece in pieces:
            for name, parameter in piece.named_parameters():
                whole_name = _whole_name(piece, name, first_expert)
                self._register(whole_name, parameter)
                if whole_name != name and name == "output_layer.weight":
                    self._second.append(parameter)

    def is_second_copy(self, parameter: Tensor) -> bool:
        """Return whether this is the last stage's copy of tied word embeddings, which the first stage has too."""
        return any(parameter is second for second in self._second)

    def _register(self, name: str, parameter: nn.Parameter) -> None:
        *path, leaf = name.split(".")
        place: nn.Module = self
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(leaf, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for piece in self.pieces:
            piece._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Self:
        for piece in self.pieces:
            piece.train(mode)
        return super().train(mode)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for number, piece in enumerate(self.pieces):
            for name, buffer in piece.named_buffers(*args, **kwargs):
                yield f"{number}.{name}", buffer


def _whole_name(piece: Any, name: str, first_expert: int) -> str:
    if name == "output_layer.weight" and piece.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    if not name.startswith("decoder.layers."):
        return name
    _, _, layer, rest = name.split(".", 3)
    number = piece.decoder.layers[int(layer)].layer_number - 1
    if _EXPERTS in rest:
        before, after = rest.split(_EXPERTS)
        expert, _, last = after.partition(".")
        rest = f"{before}{_EXPERTS}{first_expert + int(expert)}.{last}"
    return f"decoder.layers.{number}.{rest}"


class WeightOrigin(NamedTuple):
    """Origin of a whole weight: the pipeline's stage, and for an expert the expert-parallel rank."""

    shape: torch.Size
    stage: int
    expert_rank: int | None


def is_expert(name: str) -> bool:
    return _EXPERTS in name


def catalogue(model: Chunks) -> dict[str, WeightOrigin]:
    """Return on every rank the origin of every weight of the whole model, in the model's order."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()

    def own() -> dict[str, WeightOrigin]:
        found = {}
        for name, parameter in model.named_parameters():
            part, dim = laid_out(name, parameter, parameter)
            shape = list(part.shape)
            if dim is not None:
                shape[dim] *= tp
            if not model.is_second_copy(parameter):
                found[name] = WeightOrigin(torch.Size(shape), stage, expert_rank if is_expert(name) else None)
        return found

    everywhere: dict[str, WeightOrigin] = {}
    for found in agree(own):
        everywhere |= {name: place for name, place in found.items() if name not in everywhere}
    return dict(sorted(everywhere.items(), key=lambda item: _position(item[0])))


def from_owner(own: Tensor | None, place: WeightOrigin, device: torch.device) -> Tensor:
    """Return a whole weight on every rank. `own`: the weight, on the ranks of its stage that have it; else None.

    Communicates: an expert is broadcast over its stage's expert-parallel ranks, and every weight over the stages,
    unless there is only one.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    x = torch.empty(place.shape, device=device) if own is None else own.detach().contiguous()
    if place.expert_rank is not None and stage == place.stage:
        x = broadcast(x, parallel_state.get_expert_model_parallel_group(), place.expert_rank)
    return broadcast(x, parallel_state.get_pipeline_model_parallel_group(), place.stage)


def _position(name: str) -> tuple[int, int]:
    """Sort key of a name: embeddings first, then the layers, each with its experts last, then all other parameters."""
    if name.startswith("embedding."):
        return -1, 0
    if not name.startswith("decoder.layers."):
        return 1 << 30, 0
    expert = name.partition(_EXPERTS)[2].partition(".")[0]
    return int(name.split(".")[2]), int(expert) + 1 if expert else 0


def run_pipeline(
    pieces: list[GPTModel],
    passes: int,
    shape: tuple[int, ...],
    run: Callable[[GPTModel, int], Tensor],
    use: Callable[[Tensor, int], Tensor | None],
) -> None:
    """Run all passes through all stages, forward and (with gradients) backward, by Megatron's own schedule.

    Args:
        pieces: the pieces of this rank, in the order of their layers.
        passes: the number of micro-batches, equal on all ranks; with virtual stages a multiple of the pipeline's size.
        shape: rows and positions of every micro-batch, read with virtual stages only; else shapes are sent along.
        run: runs a piece on a micro-batch, and returns hidden states `[S, B, D]`, or the last stage's output.
        use: called with that output, on the last stage alone; returns the loss to differentiate, or None.

    Communicates: hidden states and their gradients between neighbouring stages, and their shapes.
    """

    def forward_step(numbers: Iterator[int], piece: GPTModel) -> tuple[Tensor, Any]:
        number = next(numbers)
        output = run(piece, number)

        def loss(found: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Undo the schedule's division by the number of micro-batches; it also divides by the tokens, here 1."""
            value = use(found, number)
            value = found.new_zeros(()) if value is None else value * passes
            return value, torch.ones((), dtype=torch.int, device=found.device), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(passes)) for _ in pieces],
        model=pieces,
        num_microbatches=passes,
        seq_length=shape[1],
        micro_batch_size=shape[0],
        forward_only=not torch.is_grad_enabled(),
    )


def build_pieces(make: Callable[..., GPTModel], virtual_stages: int) -> list[GPTModel]:
    """Make this rank's pieces; `make` gets `pre_process`, `post_process` and `vp_stage`."""
    pieces = []
    for stage in range(virtual_stages):
        which = {"vp_stage": stage} if virtual_stages > 1 else {}
        if which:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **which)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **which)
        pieces.append(make(pre_process=first, post_process=last, vp_stage=stage if which else None))
    return pieces


def is_sharded(parameter: Tensor) -> bool:
    """Return whether tensor-parallel ranks hold parts of the parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def laid_out(name: str, parameter: Tensor, x: Tensor) -> tuple[Tensor, int | None]:
    """View `x`, shaped like this rank's part of a weight, as part of a tensor cut along one dim; return view and dim.

    Each rank has a part of both halves of a gated projection: the halves become a dim of their own. None: not cut.
    """
    if name.endswith("linear_fc1.weight"):
        x = x.view(2, -1, *x.shape[1:])
        return x, None if is_expert(name) else 1
    if is_expert(name) or not is_sharded(parameter):
        return x, None
    return x, cast(Any, parameter).partition_dim
