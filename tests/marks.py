"""Marks that many tests give."""

import pytest


def slow(*values):
    """Parameters for `make test-all` alone, to be unpacked among those of `make test`; tuples are of several names."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def quick_if(chosen, values):
    """All `values` of one name as parameters; those that are not `chosen(value)` are for `make test-all` alone."""
    return [pytest.param(value, marks=() if chosen(value) else pytest.mark.slow) for value in values]
