"""NeMo-RL's names: they are all there, with its parameters in its order, and compute and send nothing by themselves."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from megatron_ext import model_utils

FUNCTIONS = {
    "_compute_distributed_log_softmax": "vocab_parallel_logits, group",
    "_compute_distributed_log_softmax_with_grad": "vocab_parallel_logits, group",
    "_compute_distributed_softmax": "vocab_parallel_logits, group",
    "dtensor_from_parallel_logits_to_logprobs": (
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, "
        "seq_index=None, chunk_size=None, sampling_params=None"
    ),
    "from_parallel_logits_to_logprobs": (
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, "
        "cp_group=None, chunk_size=None, sampling_params=None"
    ),
    "from_parallel_logits_to_logprobs_packed_sequences": (
        "vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, vocab_start_index, vocab_end_index, group, "
        "inference_only=False, cp_group=None, chunk_size=None, sampling_params=None, target_is_pre_rolled=False"
    ),
    "_get_tokens_on_this_cp_rank": "input_ids, cp_rank, cp_size, seq_dim=1",
    "allgather_cp_sharded_tensor": "tensor, cp_group, seq_dim=1",
    "get_logprobs_from_vocab_parallel_logits": (
        "vocab_parallel_logits, input_ids, seq_index=None, chunk_size=None, sampling_params=None"
    ),
    "get_next_token_logprobs_from_logits": (
        "input_ids, next_token_logits, seq_index=None, vocab_parallel_rank=None, vocab_parallel_group=None, "
        "context_parallel_group=None, sampling_params=None, chunk_size=None"
    ),
    "distributed_vocab_topk": (
        "vocab_parallel_logits, k, tp_group, *, vocab_start_index, vocab_end_index, chunk_size=None"
    ),
    "gather_logits_at_global_indices": (
        "vocab_parallel_logits, global_indices, tp_group=None, cp_group=None, *, vocab_start_index, vocab_end_index, "
        "chunk_size=None"
    ),
    "get_distillation_topk_logprobs_from_logits": (
        "student_logits, teacher_topk_logits, teacher_topk_indices, zero_outside_topk, calculate_entropy, "
        "vocab_parallel_rank=None, vocab_parallel_group=None, context_parallel_group=None"
    ),
    "from_parallel_hidden_states_to_logprobs": (
        "tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target, "
        "vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None"
    ),
    "_gpt_forward_with_linear_ce_fusion": (
        "self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None, "
        "packed_seq_params=None, extra_block_kwargs=None, runtime_gather_output=None, *, inference_params=None, "
        "loss_mask=None, padding_mask=None, is_spec_decode=None, return_logprobs_for_linear_ce_fusion=False"
    ),
    "cp_load_balanced_to_contiguous": "x, *, cp_group=None, seq_dim=1",
    "cp_shift_next": "x, cp_group=None, *, fill",
    "group_all_reduce_sum": "x, group",
    "group_all_reduce_sum_with_grad": "x, group",
    "vocab_parallel_argmax": "logits, *, tp_group=None",
    "vocab_parallel_full_log_softmax": "logits, temperature, *, tp_group=None",
    "vocab_parallel_gather_columns": "logits, column_indices, *, tp_group=None",
    "vocab_parallel_log_softmax": "logits, temperature, *, tp_group=None",
    "all_to_all_vp2sq": "vocab_parallel_logits, tp_group",
    "all_to_all_sq2vp": "seq_parallel_logits, tp_group",
}
CLASSES = {
    "DistributedLogprob": (
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False"
    ),
    "DistributedCrossEntropy": "student_logits, target_logits, group, inference_only=False",
    "ChunkedDistributedLogprob": (
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False"
    ),
    "DistributedLogprobWithSampling": "vocab_parallel_logits, target, tp_group, top_k, top_p, inference_only=False",
    "ChunkedDistributedLogprobWithSampling": (
        "vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only=False"
    ),
    "ChunkedDistributedGatherLogprob": (
        "vocab_parallel_logits, global_indices, vocab_start_index, vocab_end_index, chunk_size, tp_group, "
        "inference_only=False"
    ),
    "ChunkedDistributedEntropy": "vocab_parallel_logits, chunk_size, tp_group, inference_only=False",
    "ChunkedDistributedHiddenStatesToLogprobs": (
        "tensor_parallel_hidden_states, target, output_weight_layer, vocab_start_index, vocab_end_index, chunk_size, "
        "tp_group, inference_only=False"
    ),
    "AllGatherCPTensor": "tensor, cp_group, seq_dim=1",
    "_AllReduceSum": "x, group",
}


@pytest.mark.parametrize("name", FUNCTIONS | CLASSES)
def test_parameters(name):
    """Ours begin with NeMo-RL's; what comes after them is keyword-only or has a default."""
    ours, context, wanted = getattr(model_utils, name), name in CLASSES, (FUNCTIONS | CLASSES)[name]
    assert not context or issubclass(ours, torch.autograd.Function)
    parameters = [*inspect.signature(ours.forward if context else ours).parameters.values()][context:]
    count = len([word for word in wanted.split(", ") if word != "*"])
    bare = [p.replace(annotation=p.empty) for p in parameters[:count]]
    assert str(inspect.Signature(bare))[1:-1] == wanted
    assert all(p.default is not p.empty for p in parameters[count:]), "a caller of NeMo-RL's does not know of it"


def test_the_patch_has_its_one_option():
    option = inspect.signature(model_utils.patch_gpt_model_forward_for_linear_ce_fusion).parameters["chunk_size"]
    assert option.kind is option.KEYWORD_ONLY


FILES = sorted(Path(model_utils.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_nothing_is_computed_or_sent_here(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, (ast.For, ast.While)), f"line {node.lineno}: a loop"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rsplit(".", 1)[-1]
            ours = called.startswith("head.")
            assert ours or last not in ("softmax", "log_softmax", "logsumexp", "exp", "matmul"), f"{called} computes"
            assert not called.startswith(("dist.", "torch.distributed.")), f"{called} communicates"
