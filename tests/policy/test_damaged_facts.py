"""A checkpoint whose facts are damaged, one after the other: told on every rank, before anything is changed."""

import copy
import json
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import DTensorPolicyWorker
from megatron_ext.policy.checkpoint.fact_checks import check_like
from megatron_ext.policy.worker import checkpoints
from tests.marks import slow
from tests.policy.problems import held_by, tiny_config
from tests.policy.test_checkpoint import train
from tests.policy.test_tensor_index import change_index, sign
from tests.ranks import ranks, shared_folder

SEQUENCE = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 9}},
    {"name": "torch.optim.lr_scheduler.MultiStepLR", "kwargs": {"milestones": [1, 4]}},
    {"milestones": [3]},
]


def places(facts, path=()):
    """The ways to all facts: of each mapping and list, and what is in it."""
    if path:
        yield path
    inner = facts.items() if isinstance(facts, dict) else enumerate(facts) if isinstance(facts, list) else ()
    for key, value in inner:
        if key != "__type__":
            yield from places(value, (*path, key))


def damages(facts, path):
    """Facts with one of them missing, of a wrong type, not finite, or of a wrong shape."""
    *outer, last = path

    def changed(change):
        damaged = copy.deepcopy(facts)
        section = damaged
        for key in outer:
            section = section[key]
        change(section)
        return damaged

    value = facts
    for key in path:
        value = value[key]
    if isinstance(last, str) and "__type__" not in path and last != "items":
        yield changed(lambda section: section.pop(last))
    yield changed(lambda section: section.__setitem__(last, 7 if isinstance(value, str) else "0.01"))
    yield changed(lambda section: section.__setitem__(last, [value, value, value]))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield changed(lambda section: section.__setitem__(last, float("nan")))


def held(worker):
    """All that a load may change."""
    return (
        copy.deepcopy(held_by(worker)),
        copy.deepcopy(checkpoints._groups(worker.optimizer)),
        copy.deepcopy(worker.scheduler.state_dict()),
        worker.trainer.loss_scale.state_dict(),
        torch.get_rng_state(),
    )


def worker_of(**overrides):
    config = tiny_config(precision="float16", scheduler=SEQUENCE, **overrides)
    return DTensorPolicyWorker(config, init_reference_model=False)


def of_one_weight(facts):
    """Facts of the optimizer's groups are alike for all weights: of those, only the first one's are damaged."""
    first = min(name.rpartition(".")[0] for name in facts["numbers"]) if "numbers" in facts else ""
    return [path for path in places(facts) if path[0] != "numbers" or len(path) == 1 or path[1].startswith(first)]


@pytest.mark.parametrize(
    "name, saved, own, rule",
    [
        ("state", {"a": 1}, {"b": 1}, r"a dict with the keys \['b'\]"),
        ("state", [1], {"b": 1}, r"a dict with the keys \['b'\]"),
        ("state", {"b": "1"}, {"b": 1}, "a finite number"),
        ("state", Counter({1: "x"}), Counter(), "a finite number"),
        ("state", Counter({"x": 1}), Counter(), "a finite number"),
        ("rates", [0.1], [0.1, 0.1], "a list of 2"),
        ("rates", (0.1, 0.1), [0.1, 0.1], "a list of 2"),
        ("rates", [0.1, float("inf")], [0.1, 0.1], "a finite number"),
        ("lr", -0.1, 0.1, "at least 0"),
        ("base_lrs", [0.1, -0.1], [0.1, 0.1], "at least 0"),
        ("betas", (0.9, 1.5), (0.9, 0.95), "below 1"),
        ("fused", 3, False, "None, True or False"),
        ("fused", "no", None, "None, or a finite number"),
        ("fused", float("nan"), None, "None, or a finite number"),
        ("name", 3, "cosine", "a str"),
        ("last_epoch", -2, 3, "an integer of at least -1"),
        ("last_epoch", True, 3, "an integer of at least -1"),
        ("_step_count", -1, 3, "an integer of at least 0"),
    ],
)
def test_fact_of_another_kind_is_refused(name, saved, own, rule):
    with pytest.raises(ValueError, match=rf"the checkpoint here has .*{name}.*: it must be {rule}; load another one"):
        check_like("here", name, saved, own)


def test_facts_of_the_same_kind_are_taken():
    own = {"rates": [0.1], "fused": None, "name": "cosine", "last_epoch": 3, "milestones": Counter({4: 1})}
    check_like("here", "state", own | {"rates": [2], "fused": 0.5, "last_epoch": -1, "milestones": Counter()}, own)


@pytest.mark.parametrize("trained, most", [(True, 6), *slow((True, 60), (False, 30))])
@ranks(2)
def test_damaged_fact_is_told_on_every_rank_and_changes_nothing(trained, most):
    folder = shared_folder()
    paths = (str(folder / "weights"), str(folder / "optimizer"))
    worker = worker_of(tp=2)
    if trained:
        train(worker, 0)
    worker.save_checkpoint(*paths)
    train(worker, 1)
    facts = json.loads((folder / "optimizer" / "facts.json").read_text())["facts"]
    cases = [damaged for path in of_one_weight(facts) for damaged in damages(facts, path)]
    cases = random.Random(3).sample(cases, min(most, len(cases)))
    cases += [{key: x for key, x in facts.items() if key != "loss_scale"}, [], facts | {"more": 1}, sorted(facts)]
    before = held(worker)
    for damaged in cases:
        dist.barrier()
        if dist.get_rank() == 0:
            sign(folder / "optimizer", lambda said, damaged=damaged: said.update(facts=damaged))
        dist.barrier()
        with pytest.raises(ValueError, match=r"checkpoint .*optimizer (has|is|are)"):
            worker.load_checkpoint(*paths)
        torch.testing.assert_close(held(worker), before, rtol=0, atol=0)
    dist.barrier()
    if dist.get_rank() == 0:
        sign(folder / "optimizer", lambda said: said.update(facts=facts))
    dist.barrier()
    worker.load_checkpoint(*paths)


@ranks(1)
def test_tensors_of_another_dtype_are_refused():
    folder, worker = shared_folder(), worker_of()
    worker.save_checkpoint(str(folder / "weights"))
    change_index(folder / "weights", lambda index: index["tensors"]["model.norm.weight"].update(dtype="int32"))
    before = held(worker)
    with pytest.raises(ValueError, match="model.norm.weight is torch.float32 here and torch.int32 in the checkpoint"):
        worker.load_checkpoint(str(folder / "weights"))
    torch.testing.assert_close(held(worker), before, rtol=0, atol=0)
