"""Run by `make dist` with the python of an environment that has the wheel and torch, and nothing of this tree.

The program checks that every file is in the wheel, that modules which need only torch can be imported, that others name
the missing package, and that a loss with its gradients equals PyTorch's.
"""

import importlib
import importlib.metadata
import re
from pathlib import Path

import torch

import megatron_ext
from megatron_ext import linear_cross_entropy, token_log_probs

TREE = Path(__file__).resolve().parents[1]
WITH_TORCH_ALONE = [
    "megatron_ext.dtensor",
    "megatron_ext.head",
    "megatron_ext.integrations",
    "megatron_ext.losses",
    "megatron_ext.model_utils",
    "megatron_ext.policy",
    "megatron_ext.tensor_parallel",
    "megatron_on_cpu",
]


def check_is_installed() -> None:
    place = Path(megatron_ext.__file__).resolve().parent
    assert place.parent != TREE, f"{place} is the source tree, not the wheel"
    packages = (TREE / "megatron_ext", TREE / "megatron_on_cpu")
    wanted = [path.relative_to(TREE) for package in packages for path in (*package.rglob("*.py"), package / "py.typed")]
    missing = sorted(str(path) for path in wanted if not (place.parent / path).exists())
    assert not missing, f"not in the wheel: {missing}"


def check_imports() -> None:
    for name in WITH_TORCH_ALONE:
        importlib.import_module(name)
    for name, need in (("megatron", "needs Megatron-Core"), ("policy.RayPolicy", "needs Ray")):
        said = refusal(name)
        assert re.search(need, said), said


def refusal(name: str) -> str:
    """Return the error message of the first use of a name whose package is not installed."""
    try:
        if name == "policy.RayPolicy":
            megatron_ext.policy.RayPolicy({}, 1)
        else:
            importlib.import_module(f"megatron_ext.{name}")
    except (ImportError, ValueError) as error:
        return str(error)
    return f"{name} works without what it needs"


def check_loss() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    labels, grad = torch.randint(50, (6,)), torch.randn(6)
    logits = hidden @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted = torch.autograd.grad(expected, (hidden, weight), grad, retain_graph=True)
    for cache in (0, 1):
        loss = linear_cross_entropy(hidden, weight, labels, cache=cache)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight), grad), wanted)
    torch.testing.assert_close(token_log_probs(logits, labels), -expected)


if __name__ == "__main__":
    check_is_installed()
    check_imports()
    check_loss()
    print(
        f"megatron-ext {importlib.metadata.version('megatron-ext')}, installed from the wheel: loss and gradients right"
    )
