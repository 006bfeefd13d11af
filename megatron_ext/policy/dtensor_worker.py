"""The policy worker on Hugging Face models."""

from megatron_ext.policy.backend.dtensor import DTensorBackend
from megatron_ext.policy.worker.policy_worker import PolicyWorker


class DTensorPolicyWorker(PolicyWorker):
    """A `PolicyWorker` on a causal language model of transformers; with `reward_model_cfg` on a reward model.

    docs/hugging_face.md lists the tensor, sequence, context and expert parallelism that each model family supports; any
    other is refused before weights are read. `model_name` is a folder with safetensors (no code in it is executed), a
    config of transformers, or a function that makes the model. Master weights are float32; the model computes in
    `precision`.
    """

    parallel_key, backend_class = "dtensor_cfg", DTensorBackend
