"""Parallel layers, by Megatron's module name: drop-in for `megatron.core.tensor_parallel.layers`."""

from megatron_ext.tensor_parallel.column import ColumnParallelLinear
from megatron_ext.tensor_parallel.deferral import drain_embedding_wgrad_compute
from megatron_ext.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab_size
from megatron_ext.tensor_parallel.functional import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_ext.tensor_parallel.initialization import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
)
from megatron_ext.tensor_parallel.parameters import (
    _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron_ext.tensor_parallel.row import RowParallelLinear

__all__ = [
    "_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS",
    "ColumnParallelLinear",
    "LinearWithFrozenWeight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "_initialize_affine_weight_cpu",
    "_initialize_affine_weight_gpu",
    "copy_tensor_model_parallel_attributes",
    "drain_embedding_wgrad_compute",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "padded_vocab_size",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]
