"""Substitution in a package made up for it: with NeMo-RL's module, names and parameters, and one that imports them."""

import importlib
import importlib.util
import sys

import pytest
import torch

from megatron_ext import model_utils
from megatron_ext.integrations import nemo_rl, substitution
from tests.model_utils.test_names import CLASSES, FUNCTIONS

NAMES = sorted(FUNCTIONS | CLASSES)
EARLIER = "tensor_parallel_hidden_states, output_weight_layer, output_weight, runtime_gather_output, target, "


def write_package(path, changed: dict[str, str] | None = None) -> None:
    """Write a package `nemo_rl`, whose functions return "theirs"; `changed`: parameters by a function's name."""
    lines = ["import torch\n"]
    for name, given in (FUNCTIONS | (changed or {})).items():
        lines.append(f"def {name}({given}):\n    return 'theirs'\n")
    for name, given in CLASSES.items():
        cls = f"class {name}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, {given}):\n"
        lines.append(f"{cls}        return 'theirs'\n")
    lines.append("def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size):\n    return 'theirs'\n")
    lines.append("def nobody_knows_it():\n    return vocab_parallel_argmax(torch.ones(1, 1, 3))\n")
    folder = path / "nemo_rl" / "distributed"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").write_text("")
    (folder / "model_utils.py").write_text("\n".join(lines))
    other = "from nemo_rl.distributed.model_utils import DistributedLogprob as other_name\n"
    for user in ("early", "late"):
        names = f"from nemo_rl.distributed.model_utils import {', '.join(NAMES)}\n"
        (folder / f"{user}.py").write_text(names + other)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes and imports `nemo_rl`; gone afterwards."""

    def make(changed: dict[str, str] | None = None):
        write_package(tmp_path, changed)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return importlib.import_module(nemo_rl.MODULE)

    yield make
    nemo_rl.restore()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def test_every_name_is_replaced_and_put_back(package):
    module = package()
    early = importlib.import_module("nemo_rl.distributed.early")
    theirs = {name: getattr(module, name) for name in NAMES}
    nemo_rl.apply()
    late = importlib.import_module("nemo_rl.distributed.late")
    for name in NAMES:
        found = getattr(module, name)
        assert found is not theirs[name]
        assert getattr(early, name) is getattr(late, name) is found
        assert found is not getattr(model_utils, name)  # what others import from us stays when ours goes
    assert module.nobody_knows_it().tolist() == [[0]]  # their own code calls ours
    logits, ids = torch.randn(1, 5, 7), torch.randint(7, (1, 5))
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(early.get_next_token_logprobs_from_logits(ids, logits), wanted)
    torch.testing.assert_close(early.DistributedLogprob.apply(logits[:, :-1], ids[:, 1:], 0, 7, None), wanted)
    assert issubclass(early.DistributedLogprob, torch.autograd.Function)
    assert early.other_name is late.other_name is early.DistributedLogprob
    kept = model_utils.from_parallel_logits_to_logprobs
    nemo_rl.restore()
    for each in (module, early, late):
        assert all(getattr(each, name) is theirs[name] for name in NAMES)
    assert early.other_name is late.other_name is theirs["DistributedLogprob"]
    assert model_utils.from_parallel_logits_to_logprobs is kept


def test_what_is_not_known_is_refused_and_nothing_changed(package):
    changed = {"from_parallel_logits_to_logprobs": "target, vocab_parallel_logits, vocab_start_index, tp_group"}
    module = package(changed)
    before = {name: getattr(module, name) for name in NAMES}
    said = r"nemo_rl from source is not .* known here: .*from_parallel_logits_to_logprobs takes \(target, vocab_par"
    with pytest.raises(ValueError, match=said):
        nemo_rl.apply()
    assert all(getattr(module, name) is before[name] for name in NAMES)


def test_versions_that_have_less(package):
    """Names that came later may be missing, an earlier order of arguments is known, an entry point must be there."""
    absent = ("cp_shift_next", "group_all_reduce_sum", "vocab_parallel_full_log_softmax")
    name = "from_parallel_hidden_states_to_logprobs"
    rest = FUNCTIONS[name].partition("target, ")[2]
    module = package({name: EARLIER + rest})
    for each in absent:
        delattr(module, each)
    theirs = module.from_parallel_hidden_states_to_logprobs
    nemo_rl.apply()
    assert module.from_parallel_hidden_states_to_logprobs is not theirs
    assert not any(hasattr(module, each) for each in absent)
    nemo_rl.restore()
    del module.DistributedLogprob
    with pytest.raises(ValueError, match="model_utils has no DistributedLogprob; nothing was changed"):
        nemo_rl.apply()


def test_without_the_package():
    for name in ("nemo_rl", "verl"):
        if importlib.util.find_spec(name) is None:
            module = importlib.import_module(f"megatron_ext.integrations.{name}")
            with pytest.raises(ImportError, match=f"{name} is not installed"):
                module.apply()
            module.restore()


@pytest.mark.parametrize(
    "theirs, known",
    [
        ("a, b", True),
        ("a, b, c=1", True),
        ("a, b, *, d=2", True),
        ("a", False),  # a call leaves out what ours needs
        ("b, a", False),
        ("a, b, x=1", False),
        ("a, b, *, x=1", False),
    ],
)
def test_which_calls_mean_the_same(theirs, known):
    def ours(a, b, c=0, *, d=0):
        pass

    scope: dict = {}
    exec(f"def function({theirs}): pass", scope)
    assert substitution.takes(substitution.parameters(ours), substitution.parameters(scope["function"])) is known
