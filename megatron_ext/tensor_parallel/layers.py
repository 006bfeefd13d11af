"""Parallel layers, by Megatron's module name: drop-in for `megatron.core.tensor_parallel.layers`."""

from megatron_ext.tensor_parallel._layers.column_parallel import ColumnParallelLinear
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import drain_embedding_wgrad_compute
from megatron_ext.tensor_parallel._layers.initialization import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
)
from megatron_ext.tensor_parallel._layers.megatron_linear_functions import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_ext.tensor_parallel._layers.parameter_attributes import (
    _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS,
    copy_gtp_attributes,
    copy_tensor_model_parallel_attributes,
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron_ext.tensor_parallel._layers.row_parallel import RowParallelLinear
from megatron_ext.tensor_parallel._layers.vocab_parallel_embedding import VocabParallelEmbedding, padded_vocab_size
from megatron_ext.tensor_parallel._random.process_tracker import get_cuda_rng_tracker
from megatron_ext.tensor_parallel._random.rng_tracker import get_expert_parallel_rng_tracker_name
from megatron_ext.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_ext.tensor_parallel.utils import VocabUtility, divide

# Gradient accumulation fusion is always available, since it needs no Apex here.
_grad_accum_fusion_available = True

__all__ = [
    "_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS",
    "ColumnParallelLinear",
    "LinearWithFrozenWeight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "_grad_accum_fusion_available",
    "_initialize_affine_weight_cpu",
    "_initialize_affine_weight_gpu",
    "copy_gtp_attributes",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "divide",
    "drain_embedding_wgrad_compute",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_expert_parallel_rng_tracker_name",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "padded_vocab_size",
    "param_is_not_gtp_duplicate",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]
