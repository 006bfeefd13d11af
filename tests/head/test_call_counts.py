"""Length of the way through the package: calls of our functions, files, moves between files, and the first product.

The bounds are what the code takes today. They only go down: a change that shortens a way lowers its bound.
"""

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head import LmHead, LogProbs, TopK
from tests.ranks import ranks

PACKAGE = str(Path(megatron_ext.__file__).parent)
PRODUCTS = ("mm", "addmm", "addmm_", "matmul", "linear")
T, D, V = 8, 16, 64


class Counts(NamedTuple):
    """Counts of one run: our functions' calls, their files, moves between files, and calls before the first product."""

    calls: int
    files: int
    moves: int
    first_product: int


class Run(NamedTuple):
    """The counts of a run, and the functions that it called: a call too many is among them."""

    counts: Counts
    called: list[str]


def counted(run: Callable[[], Any]) -> tuple[Any, Run]:
    seen: list[str] = []
    called: list[str] = []
    first: list[int] = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_filename)
            called.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_qualname}")
        elif event == "c_call" and not first and argument.__name__ in PRODUCTS:
            first.append(len(seen))

    gc.collect()  # finalizers of what earlier tests left are not calls of this run
    gc.disable()
    sys.setprofile(note)
    try:
        found = run()
    finally:
        sys.setprofile(None)
        gc.enable()
    moves = sum(one != other for one, other in zip(["", *seen], seen, strict=False))
    return found, Run(Counts(len(seen), len(set(seen)), moves, next(iter(first), 0)), called)


def assert_within(found: Run, bound: Counts) -> None:
    within = all(one <= other for one, other in zip(found.counts, bound, strict=True))
    assert within, "\n".join([f"{found.counts} is above {bound}, by these calls:", *found.called])


def assert_told(called: list[str]) -> None:
    """The page that walks through a call names each file on the way, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = page[page.index("The table follows one call of") : page.index("## Communication")]
    told = {name for name in re.findall(r"`([\w/]+\.py)`", table) if not name.startswith("tests/")}
    assert told == {each.split(":")[0].removeprefix("/").removeprefix("head/") for each in called}


def test_calls_of_a_cross_entropy_stay_within_bounds():
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (T,))
    linear_cross_entropy(hidden, weight, labels).sum().backward()  # what is found out once
    loss, forward = counted(lambda: linear_cross_entropy(hidden, weight, labels).sum())
    _, backward = counted(loss.backward)
    assert_within(forward, Counts(calls=70, files=14, moves=55, first_product=54))
    assert_within(backward, Counts(calls=35, files=8, moves=21, first_product=19))
    assert_told([*forward.called, *backward.called])


def test_calls_of_a_cross_entropy_of_logits_stay_within_bounds():
    torch.manual_seed(0)
    logits, labels = torch.randn(T, V, requires_grad=True), torch.randint(V, (T,))
    vocab_parallel_cross_entropy(logits, labels).sum().backward()
    loss, forward = counted(lambda: vocab_parallel_cross_entropy(logits, labels).sum())
    _, backward = counted(loss.backward)
    assert_within(forward, Counts(calls=100, files=18, moves=70, first_product=0))
    assert_within(backward, Counts(calls=67, files=13, moves=34, first_product=0))


@ranks(2)
def test_calls_of_two_read_outs_stay_within_bounds():
    torch.manual_seed(0)
    group = dist.group.WORLD
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V // 2, D, requires_grad=True)
    labels = torch.randint(V, (T,))
    head = LmHead(weight, group)
    head.read(hidden, LogProbs(labels), TopK(3))
    _, forward = counted(lambda: head.read(hidden, LogProbs(labels), TopK(3)))
    assert_within(forward, Counts(calls=141, files=18, moves=98, first_product=71))


@ranks(1)
def test_calls_of_a_patched_model_stay_within_bounds():
    from tests.gpt import model_parallel
    from tests.megatron.patching import batch, one_gpt, patched, run

    with model_parallel(), patched():
        model, labels = one_gpt(), batch()[1]
        run(model, labels)
        _, forward = counted(lambda: run(model, labels))
    assert_within(forward, Counts(calls=156, files=24, moves=104, first_product=5))  # of the attention
