"""Plug-ins for Megatron-Core: the fused head in GPTModel, layer specs, norms, attention, tensor-parallel layers."""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_ext.megatron needs Megatron-Core, which cannot be imported ({error}): pip install "
        f"'megatron-core>=0.14'"
    ) from error
