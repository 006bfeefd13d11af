"""Leftovers of each kind fail the test, or the file, that leaves them, and are named."""

import contextlib
import os
import warnings
from collections.abc import Callable

import pytest
import torch

import megatron_ext.numerics.tensors
from tests.left_behind import LeftBehind, begin_file, end_file, groups, nothing_left_by_test, told
from tests.ranks import ranks

KEPT: list = []


def set_a_variable():
    os.environ["NVTE_FLASH_ATTN"] = "1"
    return lambda: os.environ.pop("NVTE_FLASH_ATTN")


def hook_all_modules():
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove


def initialise_microbatches():
    from megatron.core import num_microbatches_calculator

    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)
    return num_microbatches_calculator.destroy_num_microbatches_calculator


@pytest.mark.parametrize(
    "leave,name",
    [
        (set_a_variable, r"os.environ\['NVTE_FLASH_ATTN'\]: nothing became 1"),
        (hook_all_modules, "torch's hooks of all modules"),
        (initialise_microbatches, "num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR"),
    ],
)
def test_what_a_test_leaves_behind_is_named(leave: Callable, name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.num_microbatches_calculator  # noqa: F401  # what a test imports may stay
    with pytest.raises(LeftBehind, match=name):
        with nothing_left_by_test():
            undo = leave()
    undo()


def step_of_another(self):
    """Stand-in that a test puts in the place of an optimizer's own `step`."""


def replace_a_function():
    step = torch.optim.SGD.step
    torch.optim.SGD.step = step_of_another
    return lambda: setattr(torch.optim.SGD, "step", step)


def replace_a_function_of_the_package():
    place = megatron_ext.numerics.tensors
    original, place.pieces = place.pieces, lambda x: False
    return lambda: setattr(place, "pieces", original)


def open_a_file():
    return open(__file__).close


def keep_a_model():
    KEPT.append(torch.nn.Bilinear(1, 1, 1))
    return KEPT.clear


@pytest.mark.parametrize(
    "leave,name",
    [
        (replace_a_function, "torch.optim.sgd.SGD.step: nothing became step_of_another"),
        (replace_a_function_of_the_package, "numerics.tensors.pieces: nothing became replace_a_function_of_the"),
        (open_a_file, "open files .*test_left_behind.py: nothing became 1"),
        (keep_a_model, "models alive of .*Bilinear.*: nothing became 1"),
    ],
)
def test_what_a_file_leaves_behind_is_named(leave: Callable, name: str):
    begin_file()
    undo = leave()
    with pytest.raises(LeftBehind, match=name):
        end_file()
    undo()
    with pytest.raises(LeftBehind) if leave is not keep_a_model else warnings.catch_warnings():
        end_file()  # gone again
    end_file()


@pytest.mark.parametrize("passing", [False, True])
def test_leftovers_that_pass_are_told_and_others_raised(passing, capsys, monkeypatch):
    monkeypatch.delenv("LEFT_BEHIND", raising=False)
    message = "a test of this file leaves behind\nopen files a: nothing became 1"
    message += "" if passing else "\ntorch.optim.sgd.SGD.step: nothing became f"
    with contextlib.nullcontext() if passing else pytest.raises(LeftBehind):
        with told():
            raise LeftBehind(message)
    assert capsys.readouterr().err.strip() == (message if passing else "")


@ranks(2)
def leaves_a_variable():
    os.environ["NVTE_LEFT"] = "1"


@ranks(2)
def forgets_the_variable():
    os.environ.pop("NVTE_LEFT", None)


def test_what_a_rank_leaves_behind_fails_its_test():
    told = r"rank 1 of 2 ---\nthis test leaves behind\nos.environ\['NVTE_LEFT'\]: nothing became 1"
    with pytest.raises(pytest.fail.Exception, match=told):
        leaves_a_variable(world_size=2)
    forgets_the_variable(world_size=2)


@ranks(1)
def replaces_a_function(monkeypatch):
    monkeypatch.setattr(megatron_ext.numerics.tensors, "pieces", None)


@ranks(1)
def finds_the_function():
    assert callable(megatron_ext.numerics.tensors.pieces)


def test_monkeypatch_is_undone_on_ranks(monkeypatch):
    replaces_a_function(world_size=1, monkeypatch=monkeypatch)
    finds_the_function(world_size=1)


@ranks(2)
def makes_a_group():
    assert len(groups()) == 1
    torch.distributed.all_reduce(torch.ones(1), group=torch.distributed.new_group([0, 1]))


def test_process_groups_end_before_the_next_test():
    makes_a_group(world_size=2)
    makes_a_group(world_size=2)
