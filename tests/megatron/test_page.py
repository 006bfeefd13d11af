"""Commands and lines of code of the README and docs/megatron.md, which run, and their table, which is measured."""

import re
import shlex

import pytest
import torch

from megatron_ext import run as launcher
from megatron_ext.replace import replacement_of
from tests.examples import EXAMPLES
from tests.gpt import SEQUENCE, VOCAB, grouped, set_weights, tiny_batches, tiny_config, tiny_gpt
from tests.megatron.patching import batch, one_gpt, patched, run, unpatch
from tests.pages import DOCS, blocks, section
from tests.test_run import report_of

README = EXAMPLES.parent / "README.md"
PAGE = DOCS / "megatron.md"


def plugs() -> tuple[str, str, str, str]:
    """The command, the patch, the spec and the pipeline's lines of the README's section."""
    found = blocks(section(README, "Plug it into your script"))[:4]
    assert [language for language, _ in found] == ["", "python", "python", "python"]
    assert all(text.count("\n") < 10 for _, text in found)
    return tuple(text for _, text in found)


def launcher_words(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--nproc-per-node", "8", "-m"]
    assert words[4] == launcher.__name__
    assert words[-2:] == ["pretrain_gpt.py", "ARGS..."]
    return words[5:-2]


def test_the_launchers_options_are_known():
    options = launcher.command_line().parse_args([*launcher_words(plugs()[0]), "script.py", "--cpu"])
    assert options.linear_ce
    assert options.tensor_parallel
    assert options.args == ["--cpu"]


@pytest.mark.slow
def test_the_launchers_command_runs(tmp_path):
    found = report_of(tmp_path, *launcher_words(plugs()[0]), ranks=1)
    assert found["layers"].startswith("megatron_ext.tensor_parallel.")
    assert "chunk_tokens=None" in found["head"]


@grouped(2)
def test_the_lines_of_code_run():
    _, patch, spec, over_the_pipeline = plugs()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    from megatron_ext.experimental import pipeline_vocabulary

    arguments = {"tied": False, "model": {"position_embedding_type": "learned_absolute"}}
    loss = run(tiny_gpt(**arguments)[0], batch()[1])
    names = {"GPTModel": GPTModel, "config": tiny_config(), "vocab_size": VOCAB, "max_sequence_length": SEQUENCE}
    exec(spec, names)
    set_weights(names["model"])
    ours = {type(layer).__module__ for layer in names["model"].decoder.layers.modules() if layer._parameters}
    assert all(module.startswith("megatron_ext.") for module in ours)
    torch.testing.assert_close(run(names["model"], batch()[1]), loss, rtol=1e-5, atol=1e-6)
    try:
        exec(patch, {})
        assert replacement_of(GPTModel._postprocess)
        torch.testing.assert_close(run(names["model"], batch()[1]), loss, rtol=1e-5, atol=1e-6)
    finally:
        unpatch()
    stock = GPTModel.__init__
    exec(over_the_pipeline, {})
    try:
        with pytest.raises(ValueError, match="there are no stages to share the vocabulary"):
            tiny_gpt()
    finally:
        pipeline_vocabulary.restore()
    assert GPTModel.__init__ is stock
    words = re.search(r"`--spec (\S+)\s+(\S+)`", README.read_text()).groups()
    assert isinstance(import_module(words), ModuleSpec)


@grouped(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_what_a_head_step_costs(layout):
    from head_meter import measure_head

    rows = re.findall(r"\| (\S.*?) \| (\w+) \| (\d+) \| ([\d.]+) \|", PAGE.read_text())
    rows = {head: (int(count), float(peak)) for head, where, count, peak in rows if where == layout}
    assert len(rows) == 4
    vocab_size, size = 4096, 32
    logits_mib = size * SEQUENCE * vocab_size // 2 * 4 / 2**20
    model = one_gpt(sequence_parallel=layout == "sequence", vocab_size=vocab_size, tied=False)
    tokens = tiny_batches(batch=size, vocab_size=vocab_size)[0]

    def measured():
        costs = measure_head(model, tokens[:, :-1], tokens[:, 1:])
        return costs["collectives"], pytest.approx(costs["peak_mib"] / logits_mib, abs=0.06)

    assert rows.pop("stock") == measured()
    for head, expected in rows.items():
        with patched(cache=float(head.removeprefix("cache ")), chunk_size=1):
            assert expected == measured(), head
