"""Refusals of Transformer Engine's emulation before it replaces anything, and padding in the permutation."""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_on_cpu.transformer_engine import check, compiled_module
from megatron_on_cpu.transformer_engine.experts import permutation_by_mask as by_mask
from megatron_on_cpu.transformer_engine.python_modules import MODULES

LAYERS = "megatron.core.extensions.transformer_engine"


@pytest.fixture
def installed(monkeypatch):
    """Says which version of the Python part is there, None for none, and that nothing of it was imported."""

    def say(version):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: version and SimpleNamespace(name=name))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    for name in (compiled_module.NAME, LAYERS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return say


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0", "2.11.0", "2.20.2", "2.20.0.dev0+0f3c2a1"])
def test_versions_that_are_emulated(installed, version):
    installed(version)
    check()


@pytest.mark.parametrize("version", ["1.13.0", "2.8.0", "2.12.0", "2.19.1", "2.21.0", "3.9.0"])
def test_other_versions(installed, version):
    installed(version)
    with pytest.raises(RuntimeError, match=f"transformer_engine {version} is installed: .* 2.9 to 2.11 and of 2.20"):
        check()


def test_no_version(installed):
    installed(None)
    with pytest.raises(
        ModuleNotFoundError, match="not installed: pip install --no-deps 'transformer_engine>=2.9,<2.12'"
    ):
        check()


def test_kernels_that_are_loaded(installed, monkeypatch):
    installed("2.11.0")
    monkeypatch.setitem(sys.modules, compiled_module.NAME, ModuleType(compiled_module.NAME))
    with pytest.raises(RuntimeError, match="is loaded in this process: .* before Transformer Engine is imported"):
        check()
    monkeypatch.setitem(sys.modules, compiled_module.NAME, compiled_module.compiled_module((2, 11)))
    check()


def test_megatron_that_goes_without(installed, monkeypatch):
    installed("2.11.0")
    for found in (True, False):
        monkeypatch.setitem(sys.modules, LAYERS, SimpleNamespace(HAVE_TE=found))
        if found:
            check()
            continue
        with pytest.raises(RuntimeError, match="found no Transformer Engine; enter it first"):
            check()


def test_padding_inside_of_the_permutation():
    """Transformer Engine 2.20 gives the offsets before the numbers, by place or by name."""
    module = ModuleType("transformer_engine.pytorch.triton.permutation")

    def permute_with_mask_map(
        inp,
        row_id_map,
        probs,
        scale,
        pad_offsets,
        num_tokens,
        num_experts,
        num_out_tokens,
        hidden_size,
        scale_hidden_dim,
    ):
        raise AssertionError("this needs a GPU")

    module.permute_with_mask_map = permute_with_mask_map
    ((_, replacements),) = MODULES[module.__name__](module)
    assert replacements.keys() == {"permute_with_mask_map"}
    permute = replacements["permute_with_mask_map"]
    tokens, mask = torch.arange(8.0).view(4, 2), torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])
    row_map = by_mask.make_row_id_map(mask, 4, 2)
    given, sizes = (tokens, row_map, None, None), (4, 2, 5, 2, 0)
    expected = tokens[[0, 1, 3, 1, 2]]
    named = dict(
        zip(("num_tokens", "num_experts", "num_out_tokens", "hidden_size", "scale_hidden_dim"), sizes, strict=True)
    )
    assert torch.equal(permute(*given, None, *sizes)[0], expected)
    assert torch.equal(permute(*given, pad_offsets=None, **named)[0], expected)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    for call in (lambda: permute(*given, offsets, *sizes), lambda: permute(*given, pad_offsets=offsets, **named)):
        with pytest.raises(NotImplementedError, match="turn moe_router_padding_for_quantization off"):
            call()
