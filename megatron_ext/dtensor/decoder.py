"""Parts of a transformers model, whatever its version: the text decoder, its layers, its head."""

from types import ModuleType
from typing import Any

from torch import nn


def import_transformers() -> ModuleType:
    """The module `transformers`; an ImportError if it is not installed, or too old to take an attention function."""
    try:
        import transformers

        _ = transformers.AttentionInterface
    except (ImportError, AttributeError) as error:
        raise ImportError("megatron_ext.dtensor needs transformers >= 4.51: pip install 'megatron-ext[hf]'") from error
    return transformers


def text_model(model: nn.Module) -> Any:
    """The module of `model` (or itself) that goes from token ids to last hidden states; a ValueError without one."""
    return model.get_submodule(text_model_path(model))


def text_model_path(model: nn.Module) -> str:
    """The name of `text_model(model)` among the submodules of `model`."""
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
    """The list of `model`'s layers, which may be empty: the text decoder's, or else the first one of as many modules as
    the config has hidden layers."""
    try:
        return text_model(model).layers
    except ValueError:
        config: Any = model.config
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        return next((found for found in lists if len(found) == count), nn.ModuleList())


def require_model(model: Any) -> None:
    """Raises ValueError if `model` is no model of transformers, but its name or config perhaps."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"model is {type(model).__name__}: it must be a causal language model of transformers; pass the one inside "
            f"of a wrapper, and of a name or a config load it first: AutoModelForCausalLM.from_pretrained(name_or_path)"
        )


def output_head_path(model: nn.Module) -> str:
    """The name of the linear module from hidden states to logits. Raises ValueError for a model without one."""
    require_model(model)
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers is not imported here
    for name, module in model.named_modules():
        if module is head:
            return name
    raise ValueError(f"{type(model).__name__} has no lm head; pass a transformers model for causal language modelling")


def is_tied(model: nn.Module) -> bool:
    """Return whether embedding and head are one parameter, or must become one: on meta devices ties are lost at
    times."""
    rows, head = embedding(model).weight, model.get_submodule(output_head_path(model)).weight
    return rows is head or (rows.is_meta and _ties(model))


def tie_word_embeddings(model: nn.Module) -> None:
    """Make the head's weight the embedding's where the model's config and class say that they are one; else change
    nothing.

    To be called after a state dict was loaded into a model on the meta device, which gives each name its own parameter.
    """
    if _ties(model):
        tie(model)


def _ties(model: Any) -> bool:
    """Tell whether transformers ties the model's weights; some classes never do, whatever the config (Inkling2)."""
    return bool(model.config.get_text_config().tie_word_embeddings and getattr(model, "_tied_weights_keys", None))


def tie(model: nn.Module) -> None:
    """Make the head's weight the embedding's."""
    model.get_submodule(output_head_path(model)).weight = embedding(model).weight


def embedding(model: nn.Module) -> Any:
    """The module from token ids to vectors."""
    return model.get_input_embeddings()  # type: ignore[operator]  # transformers is not imported here
