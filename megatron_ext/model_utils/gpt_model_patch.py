"""NeMo-RL's names for the patch of `megatron_ext.megatron.language_model_patch`."""

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

if TYPE_CHECKING:
    from megatron_ext.megatron.fused_loss.head_settings import HeadOptions


def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: int | None = None, model: Any = None, **settings: "Unpack[HeadOptions]"
) -> None:
    """Patch language models: with labels they compute per-token losses by the fused head; without, nothing changes.

    `model(..., labels=labels)` gives `[B, S]` as Megatron does, fp32. Labels of -100 give 0 and no gradient.

    With `return_logprobs_for_linear_ce_fusion=True`, an argument that the patched `forward` has beside Megatron's,
    `labels` are the token ids themselves, not shifted (None: `input_ids`), and the result `[B, S - 1]` are the
    log-probabilities of each next token; 0 where a packed document ends. Under context parallelism `labels` are this
    rank's part, as the tokens, or the whole; the result is that of the whole sequence on every rank, and gradients of
    all ranks add up. A `loss_mask` (read by multi-token prediction) lies as the labels do. Stages without an output
    layer pass hidden states on.

    A model with other code in its output layer or loss is compared with the head at the first call (`proof`), and keeps
    its own loss if they differ. `megatron_ext.fusion_report()` says which losses were fused, and why others were not.

    Args:
        chunk_size: NeMo-RL's option: sequence positions per chunk, while `chunk_tokens` counts tokens, as everywhere
            else; give one of the two, or neither for the head to choose. It changes memory, not results.
        settings: those of `megatron_ext.megatron.fused_loss.head_settings.HeadSettings`: z_loss, cache, `verify=N`
            for the first N losses both ways, and others.
        model: one model or a list of them, wrapped (data parallelism, 16-bit, LLaVA, MIMO) or not: only these are
            patched, with precedence over the patch of the classes. None: every language model of Megatron's (GPTModel,
            HybridModel, MambaModel, BertModel, T5Model, classes derived from them), those already built included.

    Patching again replaces the settings.

    Communicates, per loss: tensor parallel 1 collective forward and 1 backward, with sequence parallelism 2 and 2.
    Log-probabilities under context parallelism: 1 all-gather forward and 1 reduce-scatter backward more, and an
    all-gather of labels given in parts.

    Raises:
        ImportError: Megatron-Core is not installed.
        TypeError: a setting is unknown; the message lists all settings.
        ValueError: a setting breaks its rule; a model is no language model and has none inside (the message says what
            it lacks). From the patched model: gathered logits together with labels, labels of another shape,
            log-probabilities without labels or tokens, a weight sharded by generalized tensor parallelism, a setting
            that changes the loss of a model that is left to Megatron. For log-probabilities, a fault that the head
            finds on one context-parallel rank is raised on all of them.
    """
    from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
    from megatron_ext.megatron.language_model_patch import patch_language_models

    patch_language_models(HeadSettings.of({"nemo_rl_chunk_size": chunk_size, **settings}), model)


def unpatch_gpt_model_forward_for_linear_ce_fusion(*, model: Any = None) -> None:
    """Undo the patch of the classes (`model=None`) or of models, and restore the originals. Harmless if unpatched.

    Undoing the patch of the classes also removes the heads that layer specs name."""
    from megatron_ext.megatron.language_model_patch import unpatch_language_models

    unpatch_language_models(model)


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
    """Run the forward of a patched GPTModel, as a function of the model, which need not be patched.

    Shapes, communication and errors as for `patch_gpt_model_forward_for_linear_ce_fusion`. Arguments are those of
    Megatron's `GPTModel.forward`; those that are None are left to their defaults.
    `is_spec_decode`, of Megatron 0.17.1 and later, goes to the model's own forward where it is given.
    """
    from megatron_ext.megatron import language_model_patch

    return language_model_patch.forward_with_fused_head(
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
