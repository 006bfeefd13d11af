"""A stand-in for vLLM: an engine whose workers hold fused, tensor-parallel weights and know one call, `load_weights`.

What it keeps of vLLM's contract: names of files on the Hugging Face Hub come in any number of calls and any order;
q, k and v, and gate and up, are joined by the receiver, which takes its part of each; an expert's weights are w1, w2
and w3; names that the model does not know are an error; the names of what was loaded are returned. The worker gets the
methods of an extension class, none of which it may have itself. `collective_rpc` takes and gives what msgpack knows.
"""

import re
from types import SimpleNamespace

import torch
from torch import nn

from megatron_ext.policy.vllm_extension import PolicyWeights

_PARTS = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(?:(gate_proj|w1)|(down_proj|w2)|(up_proj|w3))\.weight")


class FusedModel(nn.Module):
    """Weights as `[parts, ...]`: of transformers' model with these weights, cut for `rank` of `ranks`.

    `load_weights` fills them; they begin as NaN.
    """

    def __init__(self, hub_weights, rank, ranks):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self._shapes = {}
        for name, weight in hub_weights.items():
            fused, part, cut = self._place(name, weight)
            self._shapes.setdefault(fused, {})[part] = cut.shape
        for fused, parts in self._shapes.items():
            for part, shape in parts.items():
                parameter = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
                self.register_parameter(self._key(fused, part), parameter)

    def _place(self, name, weight):
        """Returns the fused weight's name, which part of it the weight `name` is, and this rank's cut of that part."""
        if found := _EXPERT.fullmatch(name):
            before, expert, gate, down, _ = found.groups()
            which = 0 if gate else 1 if down else 2
            return f"{before}.experts.w", (int(expert), which), weight.chunk(self.ranks, 1 if down else 0)[self.rank]
        for part, (fused, number) in _PARTS.items():
            if f".{part}." in name:
                return name.replace(part, fused), number, weight.chunk(self.ranks, 0)[self.rank]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return name, 0, weight.chunk(self.ranks, 1)[self.rank]
        if "embed_tokens" in name or "lm_head" in name:
            return name, 0, weight.chunk(self.ranks, 0)[self.rank]
        return name, 0, weight

    @staticmethod
    def _key(fused, part):
        return f"{fused}#{part}".replace(".", "/")

    def load_weights(self, weights):
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            fused, part, cut = self._place(name, weight)
            parameters[self._key(fused, part)].copy_(cut)  # KeyError: no such weight, as in vLLM
            loaded.add(self._key(fused, part))
        return loaded

    def largest_difference(self, hub_weights):
        return max(
            (dict(self.named_parameters())[self._key(fused, part)] - cut).abs().max().item()
            for fused, part, cut in (self._place(name, weight) for name, weight in hub_weights.items())
        )


class _Worker:
    """Attributes of vLLM's worker that an extension may use."""

    def __init__(self, model, config, rank):
        self.rank, self.device = rank, torch.device("cpu")
        settings = SimpleNamespace(quant_config=None, model_config=SimpleNamespace(hf_config=config))
        self.model_runner = SimpleNamespace(model=model, vllm_config=settings)

    def execute_model(self):
        """One of those that an extension must not hide."""


def worker_of(hub_weights, config, rank, ranks):
    """vLLM's way of adding an extension: a base class of the worker's, whose names must be new."""
    taken = [name for name in dir(PolicyWeights) if not name.startswith("__") and hasattr(_Worker, name)]
    assert not taken, f"the worker has {taken} already"
    cls = type("ExtendedWorker", (_Worker, PolicyWeights), {})
    return cls(FusedModel(hub_weights, rank, ranks), config, rank)


class Engine:
    """vLLM's engine, with its workers in this process, one after another."""

    def __init__(self, hub_weights, config, ranks):
        self.workers = [worker_of(hub_weights, config, rank, ranks) for rank in range(ranks)]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        check_plain([*args, kwargs])
        found = [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]
        check_plain(found)
        return found


def check_plain(x):
    """Raises TypeError for what vLLM does not send to an engine in a process of its own."""
    if type(x) in (list, tuple, dict):
        for part in x.values() if type(x) is dict else x:
            check_plain(part)
    elif type(x) not in (bytes, str, int, float, bool, type(None)):
        raise TypeError(f"Object of type {type(x)} is not serializable")
