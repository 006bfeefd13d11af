"""The policy's weights to generators: by Hugging Face's names, over shared memory or a process group."""

from megatron_ext.policy.refit.weight_transfer import join_collective, load_weights, read_weights, receive_weights

__all__ = ["join_collective", "load_weights", "read_weights", "receive_weights"]
