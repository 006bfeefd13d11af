"""What needs a package that is not installed says so in one sentence; the rest runs without it (test_layout.py)."""

import subprocess
import sys

import pytest


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "package, use, said",
    [
        slow("megatron", "megatron_ext.substitute_tensor_parallel()", "needs Megatron-Core"),
        slow("megatron", "model_utils.patch_gpt_model_forward_for_linear_ce_fusion()", "needs Megatron-Core"),
        slow("megatron", "policy.MegatronPolicyWorker({})", "needs Megatron-Core"),
        ("transformers", "factories.model_factories(None)", "needs transformers >= 4.51"),
        slow("accelerate", "policy.DTensorPolicyWorker._build_model(None)", "needs accelerate"),
        slow("ray", "policy.RayPolicy({}, 1)", "needs Ray"),
    ],
)
def test_what_is_missing_is_named(package, use, said):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import megatron_ext\n"
        "from megatron_ext import model_utils, policy\n"
        "from megatron_ext.policy import factories\n"
        "try:\n"
        f"    {use}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stdout.count("\n") == 1
