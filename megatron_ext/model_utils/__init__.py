"""The names of NeMo-RL's `nemo_rl.distributed.model_utils`, with its parameters, shapes and results.

Change one import, or call `megatron_ext.integrations.nemo_rl.apply()`. Behind the names are `megatron_ext.head` (what
is computed), `megatron_ext.sequence` (which token comes next, and on which rank it lies) and
`megatron_ext.distributed`; nothing is computed or sent in this package. Only the patch of GPTModel needs Megatron-Core,
once it is called. The names and their semantics are those of
https://docs.nvidia.com/nemo/rl/latest/apidocs/nemo_rl/nemo_rl.distributed.model_utils.html
"""

from megatron_ext.model_utils.arguments import TrainingSamplingParams
from megatron_ext.model_utils.functions import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedCrossEntropy,
    DistributedLogprob,
    DistributedLogprobWithSampling,
    _compute_distributed_log_softmax,
    _compute_distributed_log_softmax_with_grad,
    _compute_distributed_softmax,
)
from megatron_ext.model_utils.gpt_model_patch import (
    _gpt_forward_with_linear_ce_fusion,
    patch_gpt_model_forward_for_linear_ce_fusion,
    unpatch_gpt_model_forward_for_linear_ce_fusion,
)
from megatron_ext.model_utils.hidden_states import (
    ChunkedDistributedHiddenStatesToLogprobs,
    from_parallel_hidden_states_to_logprobs,
)
from megatron_ext.model_utils.layouts import (
    AllGatherCPTensor,
    _AllReduceSum,
    _get_tokens_on_this_cp_rank,
    all_to_all_sq2vp,
    all_to_all_vp2sq,
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
)
from megatron_ext.model_utils.logits import (
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from megatron_ext.model_utils.vocabulary import (
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
    vocab_parallel_argmax,
    vocab_parallel_full_log_softmax,
    vocab_parallel_gather_columns,
    vocab_parallel_log_softmax,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "TrainingSamplingParams",
    "_AllReduceSum",
    "_compute_distributed_log_softmax",
    "_compute_distributed_log_softmax_with_grad",
    "_compute_distributed_softmax",
    "_get_tokens_on_this_cp_rank",
    "_gpt_forward_with_linear_ce_fusion",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "unpatch_gpt_model_forward_for_linear_ce_fusion",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]
