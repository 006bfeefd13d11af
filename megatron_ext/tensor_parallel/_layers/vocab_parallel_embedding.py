"""`VocabParallelEmbedding`: the table is sharded along the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard, group_size, require_tensor_parallel_group
from megatron_ext.distributed.sizes import check_size
from megatron_ext.numerics.tensors import fault_within, on_host
from megatron_ext.tensor_parallel._layers.distributed_weights import table_of_lookup
from megatron_ext.tensor_parallel._layers.initialization import InitMethod
from megatron_ext.tensor_parallel._layers.sharded_checkpoints import LayerPlacement
from megatron_ext.tensor_parallel._layers.sharded_layer import ShardedLayer, check_config
from megatron_ext.tensor_parallel._replaced_functions import refuse_replaced
from megatron_ext.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def padded_vocab_size(vocab_size: int, tp_size: int, make_vocab_size_divisible_by: int = 1) -> int:
    """Return the smallest size of at least `vocab_size` that `tp_size` ranks can share equally.

    Each share is a multiple of `make_vocab_size_divisible_by` (Megatron-LM pads to 128, for the matmul's sake).

    Raises:
        ValueError: a number is not whole, or too small.
    """
    check_size("vocab_size", vocab_size)
    check_size("tp_size", tp_size, 1)
    check_size("make_vocab_size_divisible_by", make_vocab_size_divisible_by, 1)
    multiple = tp_size * make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(ShardedLayer):
    """Word embeddings, each rank with its `[num_embeddings / R, embedding_dim]` rows of the table.

    From Megatron-LM (https://arxiv.org/abs/1909.08053). Communicates, where R > 1: one all-reduce forward, nothing
    backward; with `reduce_scatter_embeddings` one reduce-scatter forward and one all-gather backward.

    Args:
        num_embeddings: Vocabulary size, over all ranks; divides by R (see `padded_vocab_size`).
        embedding_dim: Size D of the hidden state.
        reduce_scatter_embeddings: Return this rank's slice of the sequence, for sequence parallelism.
        init_method, config, tp_group, pg_collection: As of `ColumnParallelLinear`.

    Raises:
        ValueError: as of `ColumnParallelLinear`, here of `num_embeddings`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: Group = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        self.tp_group = require_tensor_parallel_group(tp_group)
        check_size("num_embeddings", num_embeddings, 1)
        check_size("embedding_dim", embedding_dim)
        check_config(config)
        self.config = config
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = getattr(config, "deterministic_mode", False)
        ranks = group_size(self.tp_group)
        if num_embeddings % ranks:
            raise ValueError(
                f"num_embeddings is {num_embeddings}: every one of the {ranks} tensor-parallel ranks holds an equal "
                f"share of the vocabulary; pad it to {padded_vocab_size(num_embeddings, ranks)} (padded_vocab_size)"
            )
        self.num_embeddings_per_partition = num_embeddings // ranks
        self.vocab = VocabShard.equal(self.num_embeddings_per_partition, self.tp_group)
        self.vocab_start_index, self.vocab_end_index = self.vocab.start, self.vocab.stop
        self._make_weight(self.num_embeddings_per_partition, embedding_dim, 0, init_method)
        self._cut_weight_once_more(pg_collection, sent_ahead=False)  # it is the model's first weight
        del self.config  # not read any more, and a copy of the layer would copy it

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the embeddings of token ids.

        Args:
            input_: integers `[B, S]` (any shape without `reduce_scatter_embeddings`), the same on every rank.

        Returns:
            `[B, S, D]`; with `reduce_scatter_embeddings` `[S/R, B, D]`.

        Raises:
            ValueError: on every rank, if one is given a token id outside the vocabulary (on CUDA, where the host would
                have to wait for the ids, a device-side assert on that rank instead). With `reduce_scatter_embeddings`
                fewer than 2 dims.
            RuntimeError: a function was replaced that Megatron's embedding looks up, and this one does not call.
        """
        refuse_replaced("embeddings")
        fault = token_id_fault(input_, self.num_embeddings)
        if self.reduce_scatter_embeddings and input_.dim() < 2:
            raise ValueError(
                f"input_ is {tuple(input_.shape)}: with reduce_scatter_embeddings it must be [batch, sequence], of "
                f"which each rank gets a slice of the sequence; pass input_[None] for one sequence"
            )
        assert self.weight is not None
        weight = table_of_lookup(self.weight)
        alone = group_size(self.tp_group) == 1
        if alone:
            if fault is not None:
                raise fault
            output = self._look_up(input_, weight)
        elif fault is not None:
            output = weight.new_full((*input_.shape, self.embedding_dim), torch.inf)
        else:
            rows = input_ - self.vocab_start_index
            own = rows.clamp(0, self.num_embeddings_per_partition - 1)
            output = self._look_up(own, weight).masked_fill_((own != rows).unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            output = reduce_scatter_to_sequence_parallel_region(output.transpose(0, 1), group=self.tp_group)
        elif not alone:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        if fault is not None:
            raise fault
        if not alone and on_host(output) and output.numel():
            # A rank that was given wrong ids sends infinity, for every number of every token.
            numbers = output.detach().reshape(-1)
            if numbers[0].item() == torch.inf and (numbers == torch.inf).all():
                raise ValueError(
                    f"input_ holds a token id outside [0, {self.num_embeddings}) on another rank of tp_group: all "
                    "ranks of the group must get the same token ids; broadcast the batch over the group",
                )
        return output

    def _look_up(self, rows: Tensor, weight: Tensor) -> Tensor:
        # On CUDA the gradient of F.embedding adds in no fixed order, that of indexing in a fixed one.
        if self.deterministic_mode:
            return weight[rows.flatten()].view(*rows.shape, self.embedding_dim)  # a 0-d index would make a view
        return F.embedding(rows, weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the table for Megatron's dist_checkpointing, cut along dimension 0; one padded otherwise loads too.

        Raises:
            ValueError: Megatron's dist_checkpointing is not imported.
        """
        key = f"{prefix}weight"
        table = self.state_dict(keep_vars=True)["weight"]
        place = LayerPlacement(sharded_offsets, metadata, self.tp_group)
        return {key: place.tensor(table, key, 0, allow_shape_mismatch=True)}

    def extra_repr(self) -> str:
        ranks = group_size(self.tp_group)
        sent = "forward reduce-scatter, backward all-gather" if self.reduce_scatter_embeddings else "forward all-reduce"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, TP={ranks}, communication={'none' if ranks == 1 else sent}"
        )


def token_id_fault(ids: Tensor, size: int) -> ValueError | None:
    """Return the fault of `ids` outside [0, size), which one rank alone may have been given; see `fault_within`.

    Raises ValueError unless the ids are integers.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"input_ is {kind}: it must be a tensor that holds token ids, int64 or int32; cast it with .long()"
        )
    return fault_within("input_", ids, size, " of all ranks; check the tokenizer, or pass a larger num_embeddings")
