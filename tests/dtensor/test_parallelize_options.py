"""Dtypes, devices and other options of `parallelize`, each beside the whole model."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from megatron_ext.dtensor import (
    _parallelize_llama,
    causal_lm_loss,
    clip_grad_by_total_norm_,
    get_grad_norm,
    tie_word_embeddings,
)
from tests.dtensor.models import drawn, error, make, meshes, parallelize, reference
from tests.dtensor.test_parallelize import check_trains_as
from tests.marks import slow
from tests.ranks import ranks


@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)])
@ranks(2)
def test_mixed_precision(sequence_parallel):
    """bf16 matmuls without autocast, fp32 master weights, gradients and results; as near as one process in bf16 is."""
    tokens = drawn(2, 16)
    _, true_loss, gradients = reference("qwen3", False, tokens)
    plain = make("qwen3").bfloat16()
    logits = plain(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    baseline = {name: error(p.grad.float(), gradients[name]) for name, p in plain.named_parameters()}

    model = parallelize(make("qwen3"), *meshes(tp=2), torch.bfloat16, sequence_parallel=sequence_parallel)
    found = causal_lm_loss(model, tokens)[:, :-1].mean()
    assert found.dtype == torch.float32
    assert abs(found.item() - true_loss) <= max(2 * abs(loss.item() - true_loss), 2e-2 * true_loss)
    found.backward()
    errors = {}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        errors[name] = error(parameter.grad, gradients[name]) / baseline[name]
    assert all(e < 2.5 for e in errors.values()), errors
    assert sum(errors.values()) / len(errors) < 1.2, errors
    logits = model(input_ids=tokens).logits
    assert logits.dtype == torch.float32


@ranks(2)
def test_cpu_offload():
    tokens = drawn(2, 16)
    mesh, dp_cp = meshes(dp=2)
    model = parallelize(make("llama", True), mesh, dp_cp, cpu_offload=True)
    assert isinstance(model._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)
    check_trains_as(reference("llama", True, tokens), model, tokens)
    norm = get_grad_norm(model.parameters(), dp_cp.get_group(), mesh["tp"].get_group())
    clip_grad_by_total_norm_(model.parameters(), norm / 2, norm)
    assert get_grad_norm(model.parameters(), dp_cp.get_group()) == pytest.approx(norm / 2, rel=1e-5)


@pytest.mark.parametrize("tied, tp", [(True, 2), *slow((False, 2), (True, 1))])
@ranks(2)
def test_from_the_meta_device(tied, tp):
    """Empty models on all ranks, weights from rank 0 alone; tied ones are one parameter again, and stay so."""
    from accelerate import init_empty_weights

    tokens = drawn(2, 16)
    full = make("gemma3", tied).state_dict()
    with init_empty_weights():
        empty = make("gemma3", tied)
    model = parallelize(empty, *meshes(dp=2 // tp, tp=tp))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if torch.distributed.get_rank() == 0 else {}, options=options)
    tie_word_embeddings(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    check_trains_as(reference("gemma3", tied, tokens), model, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = causal_lm_loss(model, tokens).sum().item()
    optimizer.step()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert causal_lm_loss(model, tokens).sum().item() < before


@ranks(2)
def test_frozen_parameters_stay_frozen():
    model = make("qwen3")
    model.model.requires_grad_(False)
    parallelize(model, *meshes(tp=2), sequence_parallel=True)
    causal_lm_loss(model, drawn(2, 16)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]


@ranks(2)
def test_the_functions_of_one_family():
    tokens = drawn(2, 16)
    mesh, dp_cp = meshes(tp=2)
    model = make("llama")
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=torch.float32)
    assert _parallelize_llama(model, dp_cp, mesh["tp"], policy, OffloadPolicy(), True, True) is model
    check_trains_as(reference("llama", False, tokens), model, tokens)


@ranks(2)
def test_layers_are_wrapped_where_they_recompute():
    mesh, dp_cp = meshes(tp=2)
    for recomputes in (False, True):
        model = parallelize(make("llama"), mesh, dp_cp, activation_checkpointing=recomputes)
        assert [hasattr(layer, "_checkpoint_wrapped_module") for layer in model.model.layers] == [recomputes] * 2
