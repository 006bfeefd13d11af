"""Builds the model of a policy: from a folder, a config, or a caller's function."""

import copy
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_ext.dtensor.decoder import import_transformers


class ModelFactories(NamedTuple):
    """Functions that make the model with its weights and one of the same shapes, and its config, None if not known.

    Both models have the end-of-sequence ids of their source in `generation_config.eos_token_id`.
    """

    make: Callable[[], nn.Module]
    make_empty: Callable[[], nn.Module]
    config: Any


def model_factories(
    source: Any, gives_rewards: bool = False, overrides: Mapping[str, Any] | None = None
) -> ModelFactories:
    """Make the factories for `source`: a local folder with safetensors, a config of transformers, or a function.

    With `gives_rewards` the model is a sequence classifier with one label, patched by `of_each_token`; else it is a
    causal language model. No code in a folder is executed. `overrides`: values that replace those of the config.
    """
    transformers = import_transformers()
    auto = transformers.AutoModelForSequenceClassification if gives_rewards else transformers.AutoModelForCausalLM
    if isinstance(source, str):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    elif isinstance(source, transformers.PretrainedConfig):
        config = copy.deepcopy(source)
    elif callable(source):
        if overrides:
            raise ValueError(
                f"hf_config_overrides is {dict(overrides)!r} and model_name a function, which makes its model itself: "
                f"let it set these values, or pass a folder or a config as model_name"
            )
        make = (lambda: of_each_token(source())) if gives_rewards else source
        return ModelFactories(make, make, None)
    else:
        raise ValueError(
            f"model_name is a {type(source).__name__}: it must be a local folder, a transformers config, or a function "
            f"that makes a model"
        )
    config = _overridden(config, overrides or {}, "hf_config_overrides")
    if gives_rewards:
        config.num_labels = 1
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False  # `score` is no embedding

    def build() -> nn.Module:
        model = auto.from_config(copy.deepcopy(config))  # models write into their config
        if gives_rewards:
            return of_each_token(model)
        if isinstance(source, str):
            model.generation_config.eos_token_id = _stops_of_folder(source, model.generation_config)
        return model

    def load() -> nn.Module:
        model = _loaded(auto, source, config)
        return of_each_token(model) if gives_rewards else model

    return ModelFactories(load if isinstance(source, str) else build, build, config)


def _overridden(config: Any, overrides: Mapping[str, Any], where: str) -> Any:
    """Rebuild `config` with `overrides` by its own class, which checks them; other values stay, in sub-configs too."""
    if not overrides:
        return config
    values, given = config.to_dict(), dict(overrides)
    if isinstance(given.get("rope_scaling"), Mapping) and "rope_parameters" in values:  # transformers 5 merges both
        rope = dict(given.pop("rope_scaling"))
        given["rope_parameters"] = {**(values["rope_parameters"] or {}), **rope}
    for name, value in given.items():
        if name not in values and not hasattr(config, name):
            raise ValueError(
                f"{where} has {name!r}, which {type(config).__name__} does not: a value by another name has no effect; "
                f"correct the spelling, or leave it out"
            )
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            values[name] = _overridden(inner, value, f"{where}.{name}").to_dict()
        else:
            values[name] = dict(value) if isinstance(value, Mapping) else value
    return type(config).from_dict(values)


def _loaded(auto: Any, folder: str, config: Any) -> nn.Module:
    try:
        return auto.from_pretrained(folder, config=config, use_safetensors=True, trust_remote_code=False)
    except Exception as error:  # safetensors, the operating system and shapes raise errors of different types
        raise ValueError(
            f"the model in {folder} cannot be loaded ({error}); its config.json and safetensors must be whole"
        ) from error


def _stops_of_folder(folder: str, own: Any) -> Any:
    """Return `eos_token_id` of the folder's generation_config.json, which may list more ids; else return `own`'s."""
    if not os.path.isfile(os.path.join(folder, "generation_config.json")):
        return own.eos_token_id
    try:
        found = type(own).from_pretrained(folder).eos_token_id
    except Exception as error:  # JSON, the operating system and settings raise errors of different types
        raise ValueError(f"{folder}/generation_config.json cannot be read ({error}); mend or remove it") from error
    return own.eos_token_id if found is None else found


class _OfEachToken:
    """Base class put in front of a class of transformers: its forward returns logits of all tokens, not of the last.

    The model's head is then an lm head of few columns, and is sharded, read and trained like one.
    """

    def get_output_embeddings(self: Any) -> nn.Module:
        return self.score

    def forward(self: Any, input_ids: Tensor, **inputs: Any) -> Any:
        hidden = getattr(self, self.base_model_prefix)(input_ids=input_ids, **inputs)[0]
        return SimpleNamespace(logits=self.score(hidden))


def of_each_token(model: nn.Module) -> nn.Module:
    """Patch `model`, and return it: its forward then returns `logits` `[B, S, labels]`, of every token."""
    decoder = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if decoder is None or not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{type(model).__name__} is not a reward model that is known here: it must be one of transformers' for "
            f"sequence classification with a decoder and a linear layer `score`"
        )
    cls = type(model)
    model.__class__ = type(cls.__name__, (_OfEachToken, cls), {"__module__": cls.__module__})
    return model
