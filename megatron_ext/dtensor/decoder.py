"""Parts of a transformers model, whatever its version: the text decoder, its layers, its head."""

from types import ModuleType
from typing import Any

from torch import nn


def import_transformers() -> ModuleType:
    """Return the module `transformers`; raises ImportError if it is missing, or too old to take attention functions."""
    try:
        import transformers

        _ = transformers.AttentionInterface
    except (ImportError, AttributeError) as error:
        raise ImportError("megatron_ext.dtensor needs transformers >= 4.51: pip install 'megatron-ext[hf]'") from error
    return transformers


def text_model(model: nn.Module) -> Any:
    """Return the module in `model`, or `model`, from token ids to last hidden states; raises ValueError without one."""
    return model.get_submodule(text_model_path(model))


def text_model_path(model: nn.Module) -> str:
    """Return the name of `text_model(model)` among the submodules of `model`."""
    found = [
        name
        for name, module in model.named_modules()
        if all(hasattr(module, part) for part in ("embed_tokens", "layers", "norm"))
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} modules with embed_tokens, layers and norm {found}: it must "
            f"have one; pass a transformers model for causal language modelling"
        )
    return found[0]


def decoder_layers(model: nn.Module) -> Any:
    """Return the text decoder's list of layers; without a text decoder, the first list of `num_hidden_layers` modules,
    or an empty list."""
    try:
        return text_model(model).layers
    except ValueError:
        config: Any = model.config
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        return next((found for found in lists if len(found) == count), nn.ModuleList())


def require_model(model: Any) -> None:
    """Raise ValueError if `model` is no model of transformers, but for example a name or a config."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"model is {type(model).__name__}: it must be a causal language model of transformers; pass the model that "
            f"a wrapper holds; of a name or a config load it first: AutoModelForCausalLM.from_pretrained(name_or_path)"
        )


def output_head_path(model: nn.Module) -> str:
    """Return the name of the linear module from hidden states to logits; raises ValueError for a model without one."""
    require_model(model)
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers is not imported here
    for name, module in model.named_modules():
        if module is head:
            return name
    raise ValueError(f"{type(model).__name__} has no lm head; pass a transformers model for causal language modelling")


def is_tied(model: nn.Module) -> bool:
    """Return whether embedding and head are one parameter, or must become one, as the meta device may lose ties."""
    rows, head = embedding(model).weight, model.get_submodule(output_head_path(model)).weight
    return rows is head or (rows.is_meta and _ties(model))


def tie_word_embeddings(model: nn.Module) -> None:
    """Make the embedding's weight the head's too if the model's config and class tie them; else change nothing.

    Call it after loading a state dict into a model on the meta device, which gives each name its own parameter.
    """
    if _ties(model):
        tie(model)


def _ties(model: Any) -> bool:
    """Tell whether transformers ties the model's weights; some classes never do, even if the config asks (Inkling2)."""
    return bool(model.config.get_text_config().tie_word_embeddings and getattr(model, "_tied_weights_keys", None))


def tie(model: nn.Module) -> None:
    """Make the embedding's weight the head's too."""
    model.get_submodule(output_head_path(model)).weight = embedding(model).weight


def embedding(model: nn.Module) -> Any:
    """Return the module from token ids to vectors."""
    return model.get_input_embeddings()  # type: ignore[operator]  # transformers is not imported here
