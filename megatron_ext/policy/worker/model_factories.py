"""Builds the model of a policy: from a folder, a config, or a caller's function."""

import copy
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from megatron_ext.dtensor.decoder import import_transformers
from megatron_ext.policy.worker.reward_model import of_each_token


class ModelFactories(NamedTuple):
    """A function that makes the model with its weights, one for a model of the same shapes, and its config if known.

    Both models know what their sources say of where a row ends (`generation_config.eos_token_id`).
    """

    make: Callable[[], nn.Module]
    make_empty: Callable[[], nn.Module]
    config: Any


def model_factories(source: Any, gives_rewards: bool = False) -> ModelFactories:
    """Of a local folder with safetensors, of a config of transformers, or of a function that makes a model.

    With `gives_rewards` it is a sequence classifier with one label (see `reward_model`), else a causal language model.
    Nothing that lies in a folder is executed.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `source` is none of these; from `make`, a folder cannot be loaded.
    """
    if gives_rewards:
        return _reward_model_factories(source)
    transformers = import_transformers()
    from_config = transformers.AutoModelForCausalLM.from_config

    if isinstance(source, str):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)

        def load() -> nn.Module:
            return _loaded(transformers.AutoModelForCausalLM, source, config)

        def empty() -> nn.Module:
            model = from_config(config)
            model.generation_config.eos_token_id = _stops_of_folder(source, model.generation_config)
            return model

        return ModelFactories(load, empty, config)
    if isinstance(source, transformers.PretrainedConfig):

        def build() -> nn.Module:
            return from_config(copy.deepcopy(source))  # models write into their config: not into the caller's

        return ModelFactories(build, build, source)
    if not callable(source):
        raise ValueError(
            f"model_name is a {type(source).__name__}: it must be a local folder, a transformers config, or a function "
            f"that makes a model"
        )
    return ModelFactories(source, source, None)


def _reward_model_factories(source: Any) -> ModelFactories:
    transformers = import_transformers()
    auto = transformers.AutoModelForSequenceClassification
    if not isinstance(source, str | transformers.PretrainedConfig):
        if not callable(source):
            raise ValueError(f"model_name is a {type(source).__name__}: it must be a local folder or a config")

        def make() -> nn.Module:
            return of_each_token(source())

        return ModelFactories(make, make, None)

    def config() -> Any:
        if isinstance(source, str):
            found = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        else:
            found = copy.deepcopy(source)
        found.num_labels = 1
        found.get_text_config().tie_word_embeddings = found.tie_word_embeddings = False  # `score` is no embedding
        return found

    def build() -> nn.Module:
        return of_each_token(auto.from_config(config()))

    def load() -> nn.Module:
        return of_each_token(_loaded(auto, source, config()))

    return ModelFactories(load if isinstance(source, str) else build, build, config())


def _loaded(auto: Any, folder: str, config: Any) -> nn.Module:
    try:
        return auto.from_pretrained(folder, config=config, use_safetensors=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: safetensors, the operating system, shapes
        raise ValueError(
            f"the model in {folder} cannot be loaded ({error}); its config.json and safetensors must be whole"
        ) from error


def _stops_of_folder(folder: str, own: Any) -> Any:
    """`eos_token_id` of the folder's generation_config.json, which may have more than config.json says; else `own`'s.

    Raises:
        ValueError: the file cannot be read.
    """
    if not os.path.isfile(os.path.join(folder, "generation_config.json")):
        return own.eos_token_id
    try:
        found = type(own).from_pretrained(folder).eos_token_id
    except Exception as error:  # of many kinds: JSON, the operating system, settings that exclude each other
        raise ValueError(f"{folder}/generation_config.json cannot be read ({error}); mend or remove it") from error
    return own.eos_token_id if found is None else found
