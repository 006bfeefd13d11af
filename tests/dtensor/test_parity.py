"""All models in all layouts against one process that runs transformers' own attention: logits and every gradient."""

import itertools

import pytest
import torch

from megatron_ext.dtensor import causal_lm_loss, get_grad_norm
from megatron_ext.sequence.parts import SequenceParts
from tests.dtensor.models import NAMES, VOCAB, check_gradients, error, make, meshes, parallelize, reference
from tests.ranks import ranks

CU_SEQLENS = [0, 8, 12, 28, 32]  # multiples of 2W for two context-parallel ranks
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "cp2_packed": {"cp": 2, "packed": True},
}
LARGE_LAYOUTS = {
    "dp2_tp2": {"dp": 2, "tp": 2},
    "cp2_tp2_sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2_tp2_sp_packed": {"cp": 2, "tp": 2, "sequence_parallel": True, "packed": True},
}
# What each model does differently is seen in one of these already.
QUICK = {
    ("llama", "dp2", False),
    ("llama", "tp2_sp", True),
    ("llama", "cp2", False),
    ("qwen2", "tp2_sp", False),
    ("qwen2", "cp2", True),
    ("qwen3", "tp2", False),
    ("qwen3", "tp2_sp", False),
    ("gemma3", "tp2_sp", True),
    ("gemma3", "cp2_packed", False),
    ("gemma3_multimodal", "tp2_sp", True),
}


def _check(name, tied, dp=1, cp=1, tp=1, packed=False, checkpointing=False, **options):
    mesh, dp_cp = meshes(dp, cp, tp)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, VOCAB, (1, 32) if packed else (2, 16), generator=generator)
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
    check_gradients(model, gradients)
    norm = get_grad_norm(model.parameters(), dp_cp.get_group(), mesh["tp"].get_group())
    true_norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm().item()
    assert norm == pytest.approx(true_norm, rel=2e-6)
    if tied:
        weights = [
            p for n, p in model.named_parameters(remove_duplicate=False) if "embed_tokens" in n or "lm_head" in n
        ]
        assert len(weights) == 2
        assert weights[0] is weights[1]


def _cells(layouts):
    return [
        pytest.param(
            *cell,
            marks=[] if cell in QUICK else pytest.mark.slow,
            id=f"{cell[0]}-{cell[1]}-{'tied' if cell[2] else 'untied'}",
        )
        for cell in itertools.product(NAMES, layouts, (False, True))
    ]


@pytest.mark.parametrize("name,layout,tied", _cells(LAYOUTS))
@ranks(2)
def test_two_ranks(name, layout, tied):
    _check(name, tied, **LAYOUTS[layout])


@pytest.mark.parametrize("name,layout,tied", _cells(LARGE_LAYOUTS))
@ranks(4)
def test_four_ranks(name, layout, tied):
    _check(name, tied, **LARGE_LAYOUTS[layout])


@pytest.mark.parametrize("name", [pytest.param("llama"), *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])])
@ranks(2)
def test_activation_checkpointing(name):
    _check(name, True, **LAYOUTS["tp2_sp"], checkpointing=True)
    _check(name, False, **LAYOUTS["cp2_packed"], checkpointing=True)


@ranks(1)
def test_one_rank():
    _check("gemma3", False, checkpointing=True)
    _check("llama", True, packed=True)
