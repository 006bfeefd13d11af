"""NeMo-RL's names for what this package does, each a line or two onto the rooms below."""

from typing import Any


def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: int | None = None, cache: Any = "auto", model: Any = None
) -> None:
    """GPTModel with labels computes per-token losses by the fused head: see `megatron_ext.megatron.linear_ce`."""
    from megatron_ext.megatron import linear_ce

    linear_ce.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=chunk_size, cache=cache, model=model)


def unpatch_gpt_model_forward_for_linear_ce_fusion(*, model: Any = None) -> None:
    """GPTModel as Megatron wrote it."""
    from megatron_ext.megatron import linear_ce

    linear_ce.unpatch_gpt_model_forward_for_linear_ce_fusion(model=model)
