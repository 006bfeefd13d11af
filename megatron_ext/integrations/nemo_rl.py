"""`megatron_ext.model_utils` in the place of `nemo_rl.distributed.model_utils`, for all of NeMo-RL's modules.

Both policy workers, their post-processors and the losses then compute with the head: see docs/rl.md. GPTModels that
were patched stay patched after `restore()`: unpatch them by `unpatch_gpt_model_forward_for_linear_ce_fusion`.
"""

from megatron_ext import model_utils
from megatron_ext.integrations.substitution import FrameworkSubstitution, ReplacedName

MODULE = "nemo_rl.distributed.model_utils"
# Names that every known version has; a version may lack the others.
_REQUIRED = {
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_tensor",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "get_logprobs_from_vocab_parallel_logits",
}
# A function of ours that NeMo-RL lacks, and a plain record that NeMo-RL's modules import from elsewhere.
_NOT_THEIRS = {"TrainingSamplingParams", "unpatch_gpt_model_forward_for_linear_ce_fusion"}
_EARLIER = {
    "from_parallel_hidden_states_to_logprobs": (
        "tensor_parallel_hidden_states, output_weight_layer, output_weight, runtime_gather_output, target, "
        "vocab_start_index, vocab_end_index, tp_group, inference_only, cp_group, chunk_size",
    )
}


def _replaced_names() -> list[ReplacedName]:
    return [
        ReplacedName(MODULE, name, getattr(model_utils, name), name in _REQUIRED, known=_EARLIER.get(name, ()))
        for name in model_utils.__all__
        if name not in _NOT_THEIRS
    ]


_substitution = FrameworkSubstitution("nemo_rl", _replaced_names)
apply, report, restore = _substitution.apply, _substitution.report, _substitution.restore
