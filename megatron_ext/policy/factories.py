"""Where a policy's model comes from."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from megatron_ext.dtensor.decoder import import_transformers


class ModelFactories(NamedTuple):
    """A function that makes the model with its weights, one for a model of the same shapes, and its config if known."""

    make: Callable[[], nn.Module]
    make_empty: Callable[[], nn.Module]
    config: Any


def model_factories(source: Any) -> ModelFactories:
    """Of a local folder with safetensors, of a config of transformers, or of a function that makes a model.

    Nothing that lies in a folder is executed.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `source` is none of these; from `make`, a folder cannot be loaded.
    """
    transformers = import_transformers()
    from_config = transformers.AutoModelForCausalLM.from_config

    if isinstance(source, str):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)

        def load() -> nn.Module:
            try:
                return transformers.AutoModelForCausalLM.from_pretrained(
                    source, config=config, use_safetensors=True, trust_remote_code=False
                )
            except Exception as error:  # of many kinds: safetensors, the operating system, shapes
                raise ValueError(
                    f"the model in {source} cannot be loaded ({error}); its config.json and safetensors must be whole"
                ) from error

        return ModelFactories(load, lambda: from_config(config), config)
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
