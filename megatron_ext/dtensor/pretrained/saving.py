"""Saving of a sharded model in transformers' format: whole weights in safetensors, gathered one after the other."""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import Group, group_rank
from megatron_ext.distributed.same_on_ranks import require_same

_RANKS = "_megatron_ext_ranks"
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Arguments of transformers' method that would ask for other files than ours if they had other values than these.
_USUAL = {"push_to_hub": False, "variant": None, "safe_serialization": True, "save_original_format": True}

# From a weight with transformers' name to one or more weights with the Hub's names: views if possible.
Rename = Callable[[str, Tensor], list[tuple[str, Tensor]]]


class Ranks(NamedTuple):
    """The groups of the ranks that hold a model together, one for each dim of their grid, and their device type."""

    groups: Sequence[Group]
    device: str

    @classmethod
    def of(cls, meshes: Sequence[DeviceMesh]) -> "Ranks":
        """Return the groups of all dims of these meshes."""
        return cls([group for mesh in meshes for group in mesh.get_all_groups()], meshes[0].device_type)

    @property
    def first(self) -> bool:
        """Return whether this is the first of these ranks."""
        return all(group_rank(group) == 0 for group in self.groups)


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by transformers' names, tied ones once, in the model's own memory."""
    names = [_plain(name) for name, _ in model.named_parameters()]
    every = [_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = set(every).difference(names)
    state = get_model_state_dict(model)
    return {name: x for name, x in state.items() if name not in tied and isinstance(x, Tensor)}


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def save_pretrained(model: nn.Module, save_directory: str | os.PathLike, *, max_shard_size: int | str = "5GB") -> None:
    """Write `model` in the format of transformers' `from_pretrained`: config, generation config, whole weights.

    All ranks that hold the model call it. Weights are gathered one after the other; the first rank writes them, and
    holds one file's weights at a time. New files get their names when all are written, so that a folder with an older
    model holds the old one or the new one. Weights have the names and the layout of the Hugging Face Hub (each expert
    by itself), and the dtype of the model's parameters. A model that is not sharded is saved by its own
    `save_pretrained`.

    Args:
        model: a model from `parallelize`.
        save_directory: a folder that the first rank can write; it is made if there is none.
        max_shard_size: the largest size of a file, in bytes or as "5GB"; a larger weight gets a file of its own.

    Communicates: the all-gathers that make each weight whole, one after the other, and small ones that compare.

    Raises:
        OSError: on the first rank, which could not write.
        ValueError: the ranks hold different weights; or, on the other ranks, the first rank could not write.
    """
    if _RANKS not in model.__dict__:
        Path(save_directory).mkdir(parents=True, exist_ok=True)  # transformers only logs it if there is a file
        model.save_pretrained(save_directory, max_shard_size=max_shard_size)  # type: ignore[operator]
    else:
        _save(model, save_directory, max_shard_size)


@torch.no_grad()
def _save(model: Any, folder: str | os.PathLike, max_shard_size: int | str, fault: Exception | None = None) -> None:
    """Write a model that ranks hold together; a `fault` of this rank's arguments is raised on all of them."""
    ranks: Ranks = model.__dict__[_RANKS]
    weights = own_weights(model)
    sizes = [(name, tuple(x.shape), x.dtype) for name, x in weights.items()]
    require_same("save_pretrained", {"the model's weights": sizes}, ranks.groups, ranks.device, fault)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    weights = {name: x for name, x in weights.items() if name not in ignored}

    def write(step: Callable[..., Any], *given: Any) -> Any:
        nonlocal fault
        if ranks.first and fault is None:
            try:
                return step(*given)
            except Exception as error:  # raised at the end on all ranks; the gathers until then need this rank
                fault = error
        return None

    files = write(_Files, model, Path(folder), weights, max_shard_size)
    for name, x in weights.items():
        if isinstance(x, DTensor):
            x = cast(DTensor, x.to(ranks.device)).full_tensor()
        write(_Files.add, files, name, x)
    write(_Files.finish, files)
    require_same("save_pretrained", {}, ranks.groups, ranks.device, fault)


class _Files:
    """Files of a folder under way: weights come in the order of `weights`; a file is written when it is complete."""

    def __init__(self, model: Any, folder: Path, weights: dict[str, Tensor], max_shard_size: int | str):
        from huggingface_hub import split_torch_state_dict_into_shards

        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.folder, self.rename = model, folder, hub_rename(lambda: model)
        shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in weights.items()}
        renamed = {new: x for name, shape in shapes.items() for new, x in self.rename(name, shape)}
        self.split = split_torch_state_dict_into_shards(
            renamed, filename_pattern=_FILE.replace(".", "{suffix}."), max_shard_size=max_shard_size
        )
        self.waiting = {file: dict.fromkeys(names) for file, names in self.split.filename_to_tensors.items()}
        self.held: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, whole: Tensor) -> None:
        from safetensors.torch import save_file

        for new, x in self.rename(name, whole.detach().cpu()):
            file = self.split.tensor_to_filename[new]
            self.held.setdefault(file, {})[new] = x.contiguous().clone()  # safetensors refuses views of one memory
            del self.waiting[file][new]
            if not self.waiting[file]:
                save_file(self.held.pop(file), self._unfinished(file), metadata={"format": "pt"})

    def finish(self) -> None:
        """Give the files their names, write index and configs, and remove the files of an older model."""
        for file in self.waiting:
            os.replace(self._unfinished(file), self.folder / file)
        index = self.folder / _INDEX
        if self.split.is_sharded:
            content = {"metadata": self.split.metadata, "weight_map": self.split.tensor_to_filename}
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        else:
            index.unlink(missing_ok=True)
        for old in sorted(self.folder.glob("model*.safetensors")):
            if old.name not in self.waiting:
                old.unlink()
        config = self.model.config
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # "torch_dtype" up to transformers 4.55
        setattr(config, name, next(self.model.parameters()).dtype)
        config.save_pretrained(self.folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(self.folder)
        mode = (self.folder / "config.json").stat().st_mode & 0o777
        for file in self.waiting:  # safetensors makes files that only their owner can read
            (self.folder / file).chmod(mode)

    def _unfinished(self, file: str) -> Path:
        return self.folder / f"{file}.unfinished"


def save_as_transformers(model: nn.Module, ranks: Ranks) -> None:
    """Make `model.save_pretrained` ours; calls with whole weights (`state_dict`) keep transformers' method.

    `ranks`: the ranks that hold `model` together.
    """

    def method(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        theirs = type(self).save_pretrained
        given = inspect.signature(theirs).bind(self, save_directory, *args, **kwargs).arguments
        if given.get("state_dict") is not None:
            theirs(self, save_directory, *args, **kwargs)
            return
        asked = given | given.get("kwargs", {})
        others = [f"{name}={asked[name]!r}" for name, usual in _USUAL.items() if asked.get(name, usual) != usual]
        fault = ValueError(
            f"save_pretrained was given {', '.join(others)}: the weights of a sharded model are written to safetensors "
            f"in a folder, under the Hub's names, and nothing else is done; leave these arguments out"
        )
        _save(self, save_directory, given.get("max_shard_size", "5GB"), fault if others else None)

    model.__dict__[_RANKS] = ranks
    model.__dict__["save_pretrained"] = MethodType(method, model)


def hub_rename(make_empty: Callable[[], nn.Module]) -> Rename:
    """Return the renaming of weights to names on the Hugging Face Hub, for models of the structure of `make_empty()`.

    transformers 5 keeps the experts of a layer in two tensors, and some weights under names of its own; files on the
    Hub, which generators such as vLLM read, have each expert by itself. transformers 4 uses the Hub's names. The
    mapping is transformers' own, which its `save_pretrained` applies.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return lambda name, weight: [(name, weight)]
    with torch.device("meta"):
        model = make_empty()

    def rename(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        return list(revert_weight_conversion(model, {name: weight}).items())

    return rename


def renamed(weights: Iterable[tuple[str, Tensor]], rename: Rename) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        yield from rename(name, weight)
