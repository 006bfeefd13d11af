"""Objects in the place of others: put there, taken out, and told apart from those that others put there."""

import copy
import functools
import inspect
from dataclasses import dataclass
from types import ModuleType

import pytest

from megatron_ext.replace import Replacement, apply_all, in_modules, original_of, replacement_of, restore_all


class Model:
    def forward(self, x):
        return x + 1


def doubled(original):
    def method(self, x):
        return 2 * original(self, x)

    return method


def users(function):
    """A decorator as patch managers write them: it has the names of what it wraps."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 100 + function(*args, **kwargs)

    return wrapper


@pytest.fixture
def model():
    return type("Model", (Model,), {"forward": Model.forward})


def test_the_original_comes_back(model):
    replacement = Replacement(model, "forward", doubled)
    placed = replacement.apply().placed
    assert replacement.apply().placed is placed
    assert model().forward(1) == 4
    assert replacement.stands()
    assert replacement_of(model.forward) is replacement
    assert original_of(model().forward) is Model.forward
    replacement.restore()
    replacement.restore()
    assert vars(model)["forward"] is Model.forward
    assert replacement_of(placed) is None


def test_a_wrapper_around_ours_stays_and_ours_does_nothing(model):
    replacement = Replacement(model, "forward", doubled).apply()
    model.forward = theirs = users(model.forward)
    assert replacement_of(theirs) is None
    assert not replacement.stands()
    assert model().forward(1) == 104
    replacement.restore()
    assert vars(model)["forward"] is theirs
    assert model().forward(1) == 102
    replacement.apply()  # around theirs, and the one within stays off
    assert model().forward(1) == 204
    replacement.restore()
    assert vars(model)["forward"] is theirs
    assert model().forward(1) == 102


def test_another_make_changes_what_a_wrapper_wraps(model):
    replacement = Replacement(model, "forward", doubled).apply()
    model.forward = users(model.forward)
    replacement.change(lambda original: lambda self, x: 3 * original(self, x))
    assert model().forward(1) == 106
    replacement.restore()
    assert model().forward(1) == 102


def test_an_instance_gets_a_method_and_loses_it(model):
    one = model()
    replacement = Replacement(one, "forward", doubled).apply()
    assert (one.forward(1), copy.deepcopy(one).forward(1), model().forward(1)) == (4, 4, 2)
    one.forward = users(one.forward)
    replacement.restore()
    assert one.forward(1) == 102
    del one.forward
    replacement.apply().restore()
    assert not vars(one)


def test_a_signature_of_ours_goes_with_ours(model):
    def with_option(original):
        def method(self, x, *, option=0):
            return original(self, x) + option

        method.__signature__ = inspect.signature(method)
        return method

    replacement = Replacement(model, "forward", with_option).apply()
    assert "option" in inspect.signature(model.forward).parameters
    model.forward = users(model.forward)
    replacement.restore()
    assert "option" not in inspect.signature(model.forward).parameters


def test_modules_classes_bases_defaults_and_frozen_fields():
    class Base: ...

    class OtherBase: ...

    class Derived(Base):
        value: int

    @dataclass(frozen=True, slots=True)
    class Spec:
        module: type

    def function(kind=Base):
        return kind

    module, spec = ModuleType("a_module"), Spec(Base)
    module.kind = Base
    bases, defaults = Derived.__bases__, function.__defaults__
    replaced = apply_all(
        [
            Replacement(module, "kind", lambda _: OtherBase),
            Replacement(Derived, "__bases__", lambda _: (OtherBase,)),
            Replacement(function, "__defaults__", lambda _: (OtherBase,)),
            Replacement(spec, "module", lambda _: OtherBase),
        ]
    )
    assert all(one.stands() for one in replaced)
    assert module.kind is Derived.__bases__[0] is function() is spec.module is OtherBase
    restore_all(replaced)
    assert (module.kind, function.__defaults__, Derived.__bases__, spec.module) == (Base, defaults, bases, Base)


def test_all_are_applied_or_none(model):
    def fails(original):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        apply_all([Replacement(model, "forward", doubled), Replacement(model, "forward", fails)])
    assert vars(model)["forward"] is Model.forward


def test_one_function_of_ours_in_many_modules(monkeypatch):
    import sys

    first, second = ModuleType("first_module"), ModuleType("second_module")
    first.total = second.of_all = total = lambda x: sum(x)
    for module in (first, second):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    places = sorted((module.__name__, name) for module, name, _ in in_modules([total]))
    assert places == [("first_module", "total"), ("second_module", "of_all")]
    one = Replacement(first, "total", lambda original: lambda x: -original(x)).apply()
    two = Replacement(second, "of_all", lambda _: one.placed).apply()
    assert first.total is second.of_all
    second.of_all = users(second.of_all)
    restore_all([one, two])
    assert first.total is total
    assert second.of_all([1, 2]) == 103
