"""Messages of one sentence where a package is not installed; the rest runs without the package (test_layout.py)."""

import pytest
import torch

from tests.programs import alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages, uses",
    [
        (
            ["megatron"],
            {
                "megatron_ext.substitute_tensor_parallel()": "needs Megatron-Core",
                "model_utils.patch_gpt_model_forward_for_linear_ce_fusion()": "needs Megatron-Core",
                "policy.MegatronPolicyWorker({})": "needs Megatron-Core",
            },
        ),
        (["transformers"], {"model_factories.model_factories(None)": "needs transformers >= 4.51"}),
        (
            ["accelerate", "ray"],
            {
                "dtensor.DTensorBackend.build_model(None)": "needs accelerate",
                "policy.RayPolicy({}, 1)": "needs Ray",
            },
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_missing_is_named(packages, uses):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
        "import megatron_ext\n"
        "from megatron_ext import model_utils, policy\n"
        "from megatron_ext.policy.backend import dtensor, model_factories\n"
    )
    for use in uses:
        code += f"try:\n    {use}\nexcept ImportError as error:\n    print(error)\n"
    done = alone("-c", code)
    assert len(done.stdout.splitlines()) == len(uses), "each says one sentence"
    for said, wanted in zip(done.stdout.splitlines(), uses.values(), strict=True):
        assert wanted in said


@pytest.mark.slow
def test_all_names_at_once_without_megatron():
    """`from megatron_ext import *` asks for those that need it as well."""
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megatron_ext import *\n"
        "print(linear_cross_entropy.__name__)\n"
        "try:\n    restore_tensor_parallel()\nexcept ImportError as error:\n    print(error)\n"
    )
    done = alone("-c", code)
    name, error = done.stdout.splitlines()
    assert name == "linear_cross_entropy"
    assert "needs Megatron-Core" in error


def test_the_head_says_that_a_gpu_has_no_triton(monkeypatch):
    from megatron_ext.head.row_passes import passes

    passes._without_triton.cache_clear()
    monkeypatch.setattr(passes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(passes, "triton_passes", passes.triton_passes.__wrapped__)
    monkeypatch.setattr(passes, "_interpreted", lambda: True)  # a CPU tensor goes the way of a CUDA tensor then
    with pytest.warns(UserWarning, match="Triton is not installed: the head reads each row"):
        assert passes.passes_of(torch.zeros(1)) is passes.PYTORCH
