"""The policy worker of reinforcement learning: trains, scores, saves and refits a policy. Importing it needs torch."""

from typing import TYPE_CHECKING, Any

from megatron_ext.policy.data.batch import BatchedDataDict
from megatron_ext.policy.losses import ClippedPGLoss, DistillationLossFn, DPOLossFn, LossInputType, LossType, NLLLoss
from megatron_ext.policy.outside_waits import outside_wait
from megatron_ext.policy.refit import join_collective, load_weights, receive_weights

if TYPE_CHECKING:
    from megatron_ext.policy.dtensor_worker import DTensorPolicyWorker
    from megatron_ext.policy.megatron_worker import MegatronPolicyWorker
    from megatron_ext.policy.ray_policy import RayPolicy

__all__ = [
    "BatchedDataDict",
    "ClippedPGLoss",
    "DPOLossFn",
    "DTensorPolicyWorker",
    "DistillationLossFn",
    "LossInputType",
    "LossType",
    "MegatronPolicyWorker",
    "NLLLoss",
    "RayPolicy",
    "join_collective",
    "load_weights",
    "outside_wait",
    "receive_weights",
]

_HOMES = {
    "DTensorPolicyWorker": "dtensor_worker",
    "MegatronPolicyWorker": "megatron_worker",
    "RayPolicy": "ray_policy",
}


def __getattr__(name: str) -> Any:
    """Import a worker class when it is first read: the workers need transformers, Megatron-Core or Ray."""
    if name in _HOMES:
        from importlib import import_module

        if name == "MegatronPolicyWorker":
            import megatron_ext.megatron  # noqa: F401  # its error says what to install without Megatron-Core

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
