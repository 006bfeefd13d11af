"""One cell of the tables of models and layouts: a model in a layout against one process."""

import pytest
import torch

from megatron_ext.dtensor import causal_lm_loss, get_grad_norm
from megatron_ext.dtensor.replicated_parameters import unequal_gradients
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.dtensor.models import check_gradients, drawn, error, make, meshes, parallelize, reference
from tests.ranks import ranks

CU_SEQLENS = [0, 8, 12, 28, 32]  # multiples of 2W for two context-parallel ranks


def check(name, tied, dp=1, cp=1, tp=1, packed=False, checkpointing=False, tolerance=3e-6, **options):
    """Logits, loss, every gradient and their norm, against one process with transformers' own attention."""
    mesh, dp_cp = meshes(dp, cp, tp)
    tokens = drawn(*((1, 32) if packed else (2, 16)))
    cu_seqlens = torch.tensor(CU_SEQLENS) if packed else None
    logits, true_loss, gradients = reference(name, tied, tokens, cu_seqlens)

    model = parallelize(make(name, tied), mesh, dp_cp, activation_checkpointing=checkpointing, **options)
    mine = slice(None) if dp == 1 else slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    parts = SequenceParts(mesh["cp"].get_group(), cu_seqlens)
    with torch.no_grad():
        found = model(input_ids=parts.split(tokens[mine], 1), **({"cu_seqlens": cu_seqlens} if packed else {})).logits
    assert error(found, parts.split(logits[mine], 1)) <= 3e-6

    loss = causal_lm_loss(model, tokens[mine], cu_seqlens=cu_seqlens)
    targets = tokens.numel() - (len(CU_SEQLENS) - 1 if packed else len(tokens))
    (loss.sum() / targets * dp).backward()
    if dp == 1:
        assert loss.sum().item() / targets == pytest.approx(true_loss, rel=3e-6)
    check_gradients(model, gradients, tolerance)
    norm = get_grad_norm(model.parameters(), dp_cp.get_group(), mesh["tp"].get_group())
    true_norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm().item()
    assert norm == pytest.approx(true_norm, rel=2e-6)
    assert _is_tied(model) == _is_tied(make(name, tied))
    assert not unequal_gradients(model, mesh["tp"].get_group())


def _is_tied(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@ranks(2, 4)
def check_tied_and_not(name, layout):
    for tied in (False, True):
        check(name, tied, tolerance=5e-6, **layout)
