"""TRL's SFTTrainer, stock and with our head: the losses that the example prints."""

import re

import pytest

from tests.examples import EXAMPLES
from tests.programs import python


@pytest.mark.slow
def test_trl_sft_prints_equal_losses_stock_and_ours(tmp_path):
    pytest.importorskip("trl")
    done = python(str(EXAMPLES / "trl_sft.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step \d  TRL's head (\S+)  ours (\S+)$", done.stdout, re.M)
    stock, ours = zip(*(map(float, pair) for pair in found), strict=True)
    assert len(stock) == 8
    assert stock[-1] < stock[0] - 0.5
    assert ours == pytest.approx(stock, abs=2e-5)
    assert re.search(r"^  trl\S+\._ChunkedLogProbFunction: in \d modules, ran 8 times$", done.stdout, re.M)
    assert "own fused head runs" not in done.stderr
    assert not list(tmp_path.iterdir())
