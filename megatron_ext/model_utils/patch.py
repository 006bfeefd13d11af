"""NeMo-RL's patch of GPTModel: names for `megatron_ext.megatron.linear_ce`."""

from typing import Any

from torch import Tensor


def patch_gpt_model_forward_for_linear_ce_fusion(
    *,
    chunk_size: int | None = None,
    cache: Any = "auto",
    model: Any = None,
    chunk_tokens: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> None:
    """Language models with labels compute per-token losses by the fused head: see `megatron_ext.megatron.linear_ce`."""
    from megatron_ext.megatron import linear_ce

    linear_ce.patch_gpt_model_forward_for_linear_ce_fusion(
        chunk_size=chunk_size,
        cache=cache,
        model=model,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        softcap=softcap,
        temperature=temperature,
    )


def unpatch_gpt_model_forward_for_linear_ce_fusion(*, model: Any = None) -> None:
    """GPTModel as Megatron wrote it."""
    from megatron_ext.megatron import linear_ce

    linear_ce.unpatch_gpt_model_forward_for_linear_ce_fusion(model=model)


def _gpt_forward_with_linear_ce_fusion(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor,
    decoder_input: Tensor | None = None,
    labels: Tensor | None = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    extra_block_kwargs: dict | None = None,
    runtime_gather_output: bool | None = None,
    *,
    inference_params: Any = None,
    loss_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    is_spec_decode: bool | None = None,
    return_logprobs_for_linear_ce_fusion: bool = False,
) -> Tensor:
    """The forward of a patched GPTModel as a function: see `megatron_ext.megatron.linear_ce`.

    `is_spec_decode`, of Megatron 0.17.1 and later, goes to the model's own forward where it is given.
    """
    from megatron_ext.megatron import linear_ce

    return linear_ce.gpt_forward_with_linear_ce_fusion(
        self,
        input_ids,
        position_ids,
        attention_mask,
        decoder_input=decoder_input,
        labels=labels,
        inference_context=inference_context,
        packed_seq_params=packed_seq_params,
        extra_block_kwargs=extra_block_kwargs,
        runtime_gather_output=runtime_gather_output,
        inference_params=inference_params,
        loss_mask=loss_mask,
        padding_mask=padding_mask,
        is_spec_decode=is_spec_decode,
        return_logprobs_for_linear_ce_fusion=return_logprobs_for_linear_ce_fusion,
    )
