"""The policy worker on Megatron-Core's GPTModel."""

from megatron_ext.policy.backend.megatron import MegatronBackend
from megatron_ext.policy.worker.policy_worker import PolicyWorker


class MegatronPolicyWorker(PolicyWorker):
    """A `PolicyWorker` on a GPTModel that computes what Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE do in transformers.

    `model_name` is what `DTensorPolicyWorker` takes for these five, and generators get weights by the same names; the
    checkpoints of the two workers differ. Parallel sizes are read from `megatron_cfg`. Weights are float32; the model
    computes in `precision` under autocast. Without a GPU the worker holds `megatron_on_cpu()` open until `shutdown()`.
    """

    parallel_key, backend_class = "megatron_cfg", MegatronBackend
