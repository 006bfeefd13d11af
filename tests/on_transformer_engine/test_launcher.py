"""The launcher runs a script that has never heard of it on the script's default layers, Transformer Engine's."""

import pytest

from tests.test_run import launch, report_of


def test_a_script_with_its_default_layers(tmp_path):
    local = report_of(tmp_path, "--transformer-engine", ranks=1)
    engine = report_of(tmp_path, "--transformer-engine", ranks=1, layers=[])
    assert local["attention"] == "DotProductAttention"
    assert engine["attention"] == "TEDotProductAttention"
    assert engine["losses"] == pytest.approx(local["losses"], rel=1e-6)


@pytest.mark.slow
def test_on_our_head_and_layers_in_processes_of_their_own(tmp_path):
    stock = report_of(tmp_path, "--transformer-engine", ranks=1, layers=[])
    ways = ("--transformer-engine", "--linear-ce", "--tensor-parallel")
    ours = report_of(tmp_path, *ways, ranks=2, layers=[], started=launch)
    assert ours["attention"] == "TEDotProductAttention"
    assert ours["layers"].startswith("megatron_ext.tensor_parallel.")
    assert "fused head: GPTModel: 1 loss fused, logits made 0 times" in ours["stderr"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)
