"""transformers.Trainer with the loss fused by one line: losses and weights are those of the plain model."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

from megatron_ext.dtensor import use_fused_loss
from tests.dtensor.models import VOCAB, error, make
from tests.dtensor.test_causal_lm import largest_logits
from tests.marks import quick_if
from tests.programs import python

ROWS = 12


def rows():
    """Padded rows of several lengths, with prompts that are no targets."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(ROWS):
        length = 6 + i % 5
        ids = torch.randint(2, VOCAB, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        labels = torch.where(mask.bool() & (torch.arange(12) >= i % 4), ids, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def settings(folder, **arguments):
    """Arguments for three steps from the same seed, with `arguments` put over them."""
    set_seed(1)
    ours = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 0.3,
        "optim": "sgd",  # which moves weights by as much as gradients err; Adam would by their signs
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(**ours | arguments)


def trained(model, arguments):
    """The trainer after its last step, and the losses of all steps."""
    trainer = Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(model, folder, **arguments):
    """Losses of all steps, the trained weights, and the evaluated loss."""
    trainer, losses = trained(model, settings(folder, **arguments))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, trainer.evaluate()["eval_loss"]


def lora(model):
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


WAYS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "lora": {},
    "lora_of_all": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True},
}


@pytest.mark.parametrize("way", quick_if(("accumulation", "lora_of_all").__contains__, WAYS))
def test_one_line_before_the_trainer(way, tmp_path):
    adapt = lora if "lora" in way else (lambda model: model)
    expected = train(adapt(make("llama", tied=True)), tmp_path, **WAYS[way])
    model = adapt(use_fused_loss(make("llama", tied=True), cache=0, chunk_tokens=8))
    if way == "lora":
        model = use_fused_loss(adapt(make("llama", tied=True)), cache=0, chunk_tokens=8)
    found = train(model, tmp_path, **WAYS[way])
    bf16 = "bf16" in WAYS[way]  # in which transformers rounds its logits
    assert found[0] == pytest.approx(expected[0], abs=5e-3 if bf16 else 2e-4)  # Trainer logs four digits
    assert len(expected[0]) == 3
    assert found[2] == pytest.approx(expected[2], rel=1e-3 if bf16 else 1e-5)
    assert found[1].keys() == expected[1].keys()
    before = dict(adapt(make("llama", tied=True)).named_parameters())
    moved = {name: true - before[name] for name, true in expected[1].items() if before[name].requires_grad}
    assert all(movement.norm() > 0 for movement in moved.values())
    assert max(error(found[1][name] - before[name], true) for name, true in moved.items()) < (3e-2 if bf16 else 1e-4)
    assert all(torch.equal(found[1][name], p) for name, p in before.items() if not p.requires_grad)


def test_the_trainer_makes_no_logits(tmp_path):
    """Only training is without logits: metrics want them in evaluation."""
    with largest_logits() as stock:
        train(make("llama"), tmp_path, max_steps=1, eval_strategy="no")
    with largest_logits() as found:
        model = use_fused_loss(make("llama"), cache=0, chunk_tokens=8)
        trained(model, settings(tmp_path, max_steps=1))
    assert stock.size >= 2 * 12 * VOCAB
    assert 0 < found.size <= 32 * VOCAB


SCRIPT = """
import os
import sys

from megatron_ext.dtensor import use_fused_loss
from tests.dtensor.models import make
from tests.dtensor.test_trainer import train

model = make("llama", tied=True)
if sys.argv[1] == "fused":
    use_fused_loss(model, cache=0, chunk_tokens=8)
losses, weights, evaluated = train(model, sys.argv[2], gradient_accumulation_steps=2, ddp_backend="gloo")
if os.environ["RANK"] == "0":
    print("found", *losses, evaluated, sum(w.double().norm().item() for w in weights.values()))
"""


def check_ranks(folder, script, numbers, *words, **options):
    """The numbers that two ranks of a script find are the same with the fused loss as without."""
    found = []
    for way in ("stock", "fused"):
        done = python("-c", script, way, str(folder / way), *words, ranks=2, **options)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append([float(x) for x in re.search(r"^found (.*)$", done.stdout, re.M).group(1).split()])
    assert len(found[0]) == numbers
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.slow
def test_several_processes(tmp_path):
    """The trainer wraps the model in DDP under torchrun; rows and counts of targets differ by rank."""
    check_ranks(tmp_path, SCRIPT, 5, ignore_warnings=True)


FSDP2 = """
import os
import sys
import warnings

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor import use_fused_loss
from tests.dtensor.models import make
from tests.dtensor.test_trainer import settings, trained

model = make("llama", tied=sys.argv[3] == "tied")
if sys.argv[1] == "fused":
    use_fused_loss(model, cache=0, chunk_tokens=8)
arguments = settings(
    sys.argv[2],
    gradient_accumulation_steps=2,
    ddp_backend="gloo",
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
assert arguments.device.type == "cpu"
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # accelerate has FSDP2 nowhere else
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    trainer, losses = trained(model, arguments)
assert not [one for one in found if "vocabulary's size" in str(one.message)]
parameters = list(trainer.model.parameters())
assert all(isinstance(p, DTensor) for p in parameters)
norm = sum(p.full_tensor().double().norm().item() for p in parameters)
if os.environ["RANK"] == "0":
    print("found", *losses, norm)
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_accelerates_fsdp2(head, tmp_path):
    """FSDP2 wraps the lm head with its neighbours, and nothing warns that logits are made."""
    check_ranks(tmp_path, FSDP2, 4, head)
