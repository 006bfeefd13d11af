"""This stage's rows of the embedding and of the output layer, where all pipeline stages share them.

With p stages and t tensor-parallel ranks each rank holds V/(p t) rows: rank r of the tensor-parallel group on stage s
has piece r p + s of the vocabulary, a part of what Megatron's own layers would give rank r.
"""

from typing import Any, NamedTuple

from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_ext.distributed.groups import VocabShard
from megatron_ext.experimental.pipeline_vocabulary import multi_token_stage
from megatron_ext.experimental.pipeline_vocabulary.groups import PipelineGroups
from megatron_ext.experimental.pipeline_vocabulary.paused_forward import AskEmbedding, AskLosses, ask, differentiable
from megatron_ext.megatron.fused_loss.module_calls import Hooks
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits, Terms, promise_logits
from megatron_ext.megatron.fusion_report import ModelFusion
from megatron_ext.tensor_parallel._layers.sharded_checkpoints import LayerPlacement


class SharedRows(nn.Module):
    """`[V/(p t), H]` rows of a vocabulary of `size` token ids.

    Called with a function, `rows(compute)` is `compute(weight)`: a call of the module, so that hooks which gather
    parameters run.
    """

    def __init__(self, weight: nn.Parameter, size: int, groups: PipelineGroups):
        super().__init__()
        self.weight, self.stage = weight, groups.stage
        start = (parallel_state.get_tensor_model_parallel_rank() * groups.stages + groups.stage) * weight.shape[0]
        self.vocab = VocabShard(start, start + weight.shape[0], size)
        self.pieces = parallel_state.get_tensor_model_parallel_world_size() * groups.stages

    def forward(self, input_: Any, *_: Any, **__: Any) -> Any:
        return input_(self.weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the entry of Megatron's dist_checkpointing, as of Megatron's own layer, cut into more pieces."""
        key = f"{prefix}weight"
        weight = self.state_dict(keep_vars=True)["weight"]
        pieces = {0: (self.vocab.start // self.vocab.columns, self.pieces)}
        # A job that loads the table may pad it to another size.
        return {key: LayerPlacement(sharded_offsets, metadata).pieces(weight, key, pieces, allow_shape_mismatch=True)}


class SharedEmbedding(SharedRows):
    """Stand-in for a model's `word_embeddings`, which looks token ids up in all stages' rows.

    The first stage's model asks for all embeddings, the last stage's `mtp_layers` layers of multi-token prediction
    for theirs.
    """

    def __init__(self, *rows: Any, in_slices: bool, mtp_layers: int):
        super().__init__(*rows)
        self.reduce_scatter_embeddings = in_slices  # under sequence parallelism: [S/R, B, H]
        self.mtp_layers = mtp_layers

    def forward(self, input_: Any, *_: Any, **__: Any) -> Any:
        """Return the embeddings `[B, S, H]` of token ids `[B, S]`; for a function see `SharedRows`."""
        if not isinstance(input_, Tensor):
            return super().forward(input_)
        if self.stage > 0:
            batch_dim = 1 if self.reduce_scatter_embeddings else 0
            return multi_token_stage.next_embedding(input_, self.mtp_layers, batch_dim)
        return differentiable(*ask(AskEmbedding(multi_token_stage.ids_of_all(input_, self.mtp_layers))))


class SharedOutputLayer(SharedRows):
    """Stand-in for a model's `output_layer`. On the last stage it promises logits, which the loss redeems.

    `tied`: the rows are the embedding's, whose parameter is not this module's.
    """

    gather_output = False
    skip_bias_add = False
    bias = None
    promises = True  # the fused head stays out: see `fused_region.region_of`

    def __init__(self, weight: nn.Parameter, *rows: Any, tied: bool, config: Any):
        super().__init__(weight, *rows)
        self.tied = tied
        self.mtp_layers = config.mtp_num_layers or 0
        if tied:
            del self.weight
            object.__setattr__(self, "weight", weight)
        self.sequence_parallel = config.sequence_parallel
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.output_size_per_partition = self.vocab.columns
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.counters: ModelFusion | None = None  # of the model whose losses these are

    def forward(
        self, input_: Any, weight: Any = None, runtime_gather_output: bool | None = None, *_: Any, **__: Any
    ) -> Any:
        """Return promised logits of hidden states, and None; for a function see `SharedRows`."""
        if not isinstance(input_, Tensor):
            return super().forward(input_)
        if weight is not None and weight is not self.weight:
            raise ValueError(
                "the output layer was given another weight than its own: over a vocabulary shared by pipeline stages "
                "it has the embedding's rows or its own; build the model without that, or train without sharing"
            )
        return promise_logits(self, input_, None, runtime_gather_output, _no_logits, _NO_HOOKS), None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {} if self.tied else super().sharded_state_dict(*args, **kwargs)

    def losses(self, labels_BS: Tensor, logits: Any, *_: Any, **__: Any) -> Tensor:
        """Compute the losses `[B, S]`, fp32, in place of the model's `compute_language_model_loss`."""
        changed = not isinstance(logits, PromisedLogits) or logits.terms.made is not None
        if changed or logits.terms.scale != 1:
            raise ValueError(
                "the logits were changed before the loss: a vocabulary shared over pipeline stages has none"
            )
        if self.counters is not None:
            self.counters.losses_fused += 1
        hidden = logits.terms.hidden
        if self.mtp_layers:
            found, which = multi_token_stage.losses_of(hidden, labels_BS, self.mtp_layers)
        else:
            found, which = ask(AskLosses(hidden.detach(), labels_BS)), 0
        if found.hits is not None:
            logits.terms.hits = labels_BS, found.hits

        def dx(grad_BS: Tensor) -> Tensor:
            unit_dx, own_SB = found.unit_dx, found.send(which, grad_BS)  # of this rank's part of the sequence
            assert unit_dx is not None
            return (unit_dx * own_SB.unsqueeze(-1)).to(unit_dx.dtype)

        return differentiable(found.loss, dx, hidden)


class Sharing(NamedTuple):
    """Sharing of a model's vocabulary, on all of the model's chunks on this stage."""

    groups: PipelineGroups
    embedding: SharedEmbedding
    output: SharedOutputLayer


_NO_HOOKS = Hooks({}, {})  # type: ignore[arg-type]


def _no_logits(terms: Terms, hidden: Tensor) -> Tensor:
    raise ValueError(
        "logits were asked for, and a vocabulary that is shared over pipeline stages gives only losses: call the "
        "model with labels, or train without sharing"
    )
