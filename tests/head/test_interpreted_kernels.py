"""Triton's kernels at toy sizes, by its interpreter, beside the same functions in plain PyTorch; `twins` has more."""

import pytest

from tests.head.twins import QUICK
from tests.programs import python


@pytest.mark.parametrize("name", QUICK)
def test_interpreted_kernels_agree_with_pytorch(name):
    done = python("-c", f"from tests.head.twins import quick; quick({name!r})", interpreted=True, ignore_warnings=True)
    assert done.returncode == 0, done.stderr[-3000:]
