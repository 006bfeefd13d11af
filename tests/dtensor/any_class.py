"""A tiny model of any class of transformers in a layout of 2 ranks, against one process: right, refused or a fault."""

import json
import pickle
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from megatron_ext.dtensor import causal_lm_loss
from megatron_ext.dtensor.replicated_parameters import unequal_gradients
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.dtensor.models import meshes, parallelize
from tests.dtensor.tiny_models import batch
from tests.ranks import ranks

_TOLERANCE, _LEAST = 2e-5, 1e-3  # of a gradient's norm, or of this part of the largest one's


def made(name, config):
    """The same model on every rank, with numbers that show which of its parameters were left out or taken twice."""
    torch.manual_seed(1)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(3.0)
        biases = [x for buffer, x in model.named_buffers() if buffer.endswith("bias") and x.is_floating_point()]
        for x in (*(p for p in model.parameters() if p.dim() == 1), *biases):
            x.add_(torch.randn_like(x), alpha=0.1)
    return model.float().train()


def alone(name, config, tokens):
    """Logits, mean loss and gradients of one process."""
    model = made(name, config)
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), gradients


def compared(name, config, layout):
    tokens = batch(made(name, config))["input_ids"]
    logits, expected, true = alone(name, config, tokens)
    mesh, dp_cp = meshes(**layout)
    model = parallelize(made(name, config), mesh, dp_cp)
    parts = SequenceParts(mesh["cp"].get_group(), None)
    with torch.no_grad():
        found = model(input_ids=parts.split(tokens, 1), use_cache=False).logits
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    wanted = parts.split(logits, 1)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm(), f"logits by {(found - wanted).norm() / wanted.norm():.1g}"
    loss = causal_lm_loss(model, tokens).sum() / tokens[:, 1:].numel()
    loss.backward()
    assert abs(loss - expected) <= 1e-5 * expected, (
        f"the loss is {loss.item():.6g}, of one process {expected.item():.6g}"
    )
    largest = max(x.norm().item() for x in true.values())
    own = {key.replace("_checkpoint_wrapped_module.", ""): p.grad for key, p in model.named_parameters()}
    for key, gradient in true.items():
        assert own[key] is not None, f"no gradient of {key}"
        apart, norm = (own[key].full_tensor() - gradient).norm().item(), gradient.norm().item()
        assert apart <= _TOLERANCE * max(norm, _LEAST * largest), f"the gradient of {key} by {apart / norm:.1g}"
    assert not [key for key, x in own.items() if x is not None and key not in true and x.full_tensor().any()]
    assert not (odd := unequal_gradients(model, mesh["tp"].get_group())), f"unequal gradients of {odd}"


def outcome(name, config, layout):
    try:
        compared(name, config, layout)
    except Exception as fault:
        inside = [frame.filename for frame in traceback.extract_tb(fault.__traceback__)]
        if isinstance(fault, AssertionError) and inside[-1] == __file__:
            return "WRONG", str(fault)
        if isinstance(fault, ValueError) and "megatron_ext" in Path(inside[-1]).parts:
            return "refused", str(fault)
        return "CRASH", f"{type(fault).__name__} in {Path(inside[-1]).name}: {' '.join(str(fault).split())[:200]}"
    return "right", ""


@ranks(2)
def run(name, config, layout, folder):
    """Leave the outcome on each rank in `folder`, and end the ranks where it is none from which they can go on."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = outcome(name, pickle.loads(config), layout)
    (Path(folder) / str(dist.get_rank())).write_text(json.dumps(found))
    if found[0] != "right":
        raise RuntimeError(found[0])
