"""Marks for parameters of tests."""

import pytest


def slow(*values):
    """Return parameters that only `make test-all` runs; a tuple has the values of several names."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def quick_if(chosen, values):
    """Return all `values` of one name as parameters; only `make test-all` runs those that are not `chosen(value)`."""
    return [pytest.param(value, marks=() if chosen(value) else pytest.mark.slow) for value in values]
