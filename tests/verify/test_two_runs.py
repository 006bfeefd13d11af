"""`--verify` and `megatron_ext.compare`: steps of a script, stock and changed, side by side."""

import os
import re
import sys
import textwrap
from unittest import mock

import pytest

from megatron_ext import compare, run
from megatron_ext.verify import two_runs
from megatron_ext.verify.side_by_side import RecordedStep, TwoRuns, draw
from megatron_ext.verify.step_recorder import read_steps
from megatron_ext.verify.two_runs import check_ranks
from tests.pages import DOCS, ROOT, blocks
from tests.programs import python
from tests.test_run import STANDIN, launch

TRAINS = """
    import sys
    import torch
    from torch.nn.utils import clip_grad_norm_
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            layer(torch.ones(3, 4)).square().mean().backward()
        print(float(torch.cat([x.grad.flatten() for x in layer.parameters()]).norm()))
        if "norm" in sys.argv:
            clip_grad_norm_(layer.parameters(), 0.5)
        elif "value" in sys.argv:
            torch.nn.utils.clip_grad_value_(layer.weight, 0.01)
        elif "with_norm" in sys.argv:
            norm = torch.nn.utils.get_total_norm([x.grad for x in layer.parameters()])
            torch.nn.utils.clip_grads_with_norm_(layer.parameters(), 0.5, norm)
        optimizer.step()
"""


def recorded(folder, *words):
    """The first three steps of that script, and the norms of gradients that it prints, before it clips."""
    (folder / "script.py").write_text(textwrap.dedent(TRAINS))
    file = folder / "steps.jsonl"
    done = python("-m", "megatron_ext.run", "--cpu", "--record", 3, file, folder / "script.py", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_steps(file), [float(line) for line in done.stdout.splitlines()]


def test_recorder_writes_losses_and_norms_of_steps(tmp_path):
    steps, printed = recorded(tmp_path)
    assert len(steps) == len(printed) == 3  # and the script has ended there
    assert [step.gradient_norm for step in steps] == pytest.approx(printed)
    assert steps[0].loss > steps[1].loss > steps[2].loss
    assert steps[0].loss == pytest.approx(2 * (steps[0].gradient_norm / 4) ** 2 / 5, rel=1e-5)
    assert steps[0].seconds is None
    assert steps[1].seconds > 0
    assert steps[0].peak_mib > 1


def forked(command, environment, log):
    """The run in a process that has torch and Megatron already."""
    with mock.patch.dict(os.environ, environment):
        done = python(*command[1:], ranks=1, ignore_warnings=True)
    log.write_text(done.stdout + done.stderr)
    return done.returncode


@pytest.fixture
def standin(monkeypatch, tmp_path):
    monkeypatch.setattr(two_runs, "_exit_code", forked)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options = ("--tensor-model-parallel-size", "1", "--transformer-impl", "local", "--report")
    return [str(STANDIN), *options, str(tmp_path / "report.json")]


def test_compare_shows_equal_runs_of_a_megatron_script(standin, capsys, tmp_path):
    picture = tmp_path / "pictures" / "both.png"
    compare.main(["--cpu", "--verify", "9", f"--picture={picture}", *standin, "--steps", "2"])
    said = capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}\n" in said
    assert re.search(r"^ +1  4\.\d{6}  4\.\d{6} ", said, re.M)
    assert said.endswith(
        "verify: the script ended after 2 of the 9 steps\n"
        "verify: the same, losses within 0.001 and gradient norms within 0.01\n"
    )


def test_compare_tells_another_loss(standin, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as ended:
        compare.main(["--cpu", "--linear-ce", "--temperature", "0.5", "--verify", "1", *standin])
    assert "no picture: matplotlib is not installed" in capsys.readouterr().err
    assert re.search(r"verify: the loss of a step differs by \d\.\de-0\d, and at most 1\.0e-03 is", ended.value.code)


def verify(*given):
    run.verify(run.command_line(), run.command_line().parse_args(list(map(str, given))), list(map(str, given)))


def test_nothing_is_compared_while_fusion_is_off(standin, capsys, tmp_path, monkeypatch):
    """Two stock runs are always the same; the launcher trains stock, as it was asked to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_EXT_FUSION", "off")
    nothing = "verify: nothing was compared: MEGATRON_EXT_FUSION=off is set in the environment"
    with pytest.raises(SystemExit) as ended:
        compare.main(["--cpu", "--linear-ce", "--verify", "1", *standin])
    assert ended.value.code == nothing
    for change in ("--linear-ce", "--tensor-parallel"):
        verify("--cpu", change, "--verify", "1", *standin)
        assert capsys.readouterr().err == f"{nothing}\n"


@pytest.mark.usefixtures("standin")
def test_verify_trains_nothing_where_no_loss_was_fused(capsys, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS))
    with pytest.raises(SystemExit) as ended:
        verify("--cpu", "--linear-ce", "--verify", "1", tmp_path / "script.py")
    assert ended.value.code == (
        "verify: --linear-ce fused no loss, so the fused head was not compared: --check reports why"
    )
    assert "verify: the same" not in capsys.readouterr().err


def test_stock_run_of_a_script_that_patches_is_stock(standin, tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(STANDIN.parent)!r})\n"
        "from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch\npatch()\n"
        f"runpy.run_path({standin[0]!r}, run_name='__main__')\n"
    )
    found = two_runs.run_twice(["--cpu", "--linear-ce"], [str(script), *standin[1:]], 1, 1e-3)
    assert [[step.losses_fused for step in steps] for steps in (found.stock, found.ours)] == [[0], [1]]


@pytest.mark.parametrize("clips", ["norm", "value", "with_norm"])
def test_recorded_norms_are_those_before_clipping(clips, tmp_path):
    steps, printed = recorded(tmp_path, clips)
    assert min(printed) > 0.5
    assert [step.gradient_norm for step in steps] == pytest.approx(printed)


def test_table_tells_of_norms_that_look_clipped():
    said = "gradient norms of 0.5, 1 look clipped"
    assert said in str(runs([(2.0, 1.0), (2.0, 0.73), (2.0, 0.5)], [(2.0, 0.999999), (2.0, 0.73001), (2.0, 0.5)]))
    assert "clipped" not in str(runs([(2.0, 1.0), (2.0, 0.0)], [(2.0, 1.01), (2.0, 0.0)]))


def test_agreement_names_what_both_runs_have():
    both = "losses within 0.001 and gradient norms within 0.01"
    assert runs([(2.0, 1.0)], [(2.0, 1.0)]).agreement == both
    assert runs([(2.0, None)], [(2.0, None)]).agreement == "losses within 0.001"
    assert runs([(None, 1.0)], [(None, 1.0)]).agreement == "gradient norms within 0.01"


def test_compare_shows_why_a_run_failed(standin):
    with pytest.raises(SystemExit) as ended:
        compare.main(["--cpu", *standin[:1], "--tensor-model-parallel-size", "many"])
    assert "verify: the stock run (MEGATRON_EXT_FUSION=off) of" in ended.value.code
    assert "invalid int value: 'many'" in ended.value.code


@pytest.mark.slow
def test_verify_on_two_ranks_trains_afterwards(tmp_path):
    """The ranks of three runs would meet under the same keys in torchrun's store."""
    report = tmp_path / "report.json"
    script = [STANDIN, "--tensor-model-parallel-size", 2, "--transformer-impl", "local", "--report", report]
    done = launch(tmp_path, "--cpu", "--linear-ce", "--verify", 2, *script, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("verify: the same, losses within 0.001 and gradient norms within 0.01") == 1
    assert report.exists()


@pytest.mark.slow
def test_page_shows_the_table_that_is_printed(standin, capsys, tmp_path, monkeypatch):
    """One rank has the losses of the page's two. Memory and time, the last columns, are those of one run."""
    monkeypatch.chdir(tmp_path)
    (_, command), (_, shown) = blocks((DOCS / "debug_a_difference.md").read_text())[:2]
    launched = "torchrun --nproc-per-node 2 -m megatron_ext.compare "
    assert command.startswith(launched)
    compare.main(command.removeprefix(launched).replace("examples/", f"{ROOT}/examples/").split())
    printed = capsys.readouterr().err
    printed = printed[printed.index("step ") :]
    steps = re.compile(r"^ +(\d+)  (\S+)  (\S+) +(\S+)  (\S+) ", re.M)
    assert [pytest.approx(list(map(float, row)), rel=1e-5) for row in steps.findall(shown)] == [
        list(map(float, row)) for row in steps.findall(printed)
    ]
    beside = [[line for line in text.splitlines() if not steps.match(line)] for text in (shown, printed)]
    assert [re.sub(r"\d\.\de[-+]\d+", "X", line) for line in beside[0]] == [
        re.sub(r"\d\.\de[-+]\d+", "X", line) for line in beside[1]
    ]


def runs(stock, ours, tolerance=1e-3):
    steps = ([RecordedStep(*pair, 1.0, None) for pair in pairs] for pairs in (stock, ours))
    return TwoRuns(*steps, tolerance=tolerance)


def test_a_table_shows_milliseconds():
    assert str(runs([(2.0, 1.0)], [(2.0, 1.0)])).splitlines()[2].split()[-2:] == ["-", "-"]
    steps = [[RecordedStep(2.0, 1.0, 3.0, seconds)] for seconds in (0.25, 0.125)]
    assert str(TwoRuns(*steps, tolerance=1e-3)).splitlines()[2].split()[-2:] == ["250", "125"]


def test_picture_shows_differences_on_a_log_axis(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    draw(runs([(2.0, 1.0), (1.0, 1.0)], [(2.0, 1.5), (1.25, None)]), tmp_path / "new" / "folder" / "both.png")
    assert (tmp_path / "new" / "folder").is_dir()
    _, panel, *_ = drawn[0].axes
    assert (panel.get_title(), panel.get_xlabel(), panel.get_yscale()) == ("relative difference", "step", "log")
    shown = {line.get_label(): line.get_ydata() for line in panel.lines}
    assert list(shown["loss"]) == [2.0**-26, 0.25]
    assert list(shown["gradient norm"]) == [0.5, 2.0**-26]
    assert list(shown["tolerance of the loss"]) == [1e-3, 1e-3]


@pytest.mark.parametrize(
    "stock, ours, fault",
    [
        ([(2.0, 1.0)], [(2.001, 1.0)], None),
        ([(2.0, 1.0)], [(2.01, 1.0)], "the loss of a step differs by 5.0e-03, and at most 1.0e-03 is allowed"),
        ([(2.0, 1.0)], [(2.0, 1.009)], None),
        ([(2.0, 1.0)], [(2.0, 1.02)], "the gradient norm of a step differs by 2.0e-02, and at most 1.0e-02"),
        ([(None, 1.0)], [(None, 1.0)], None),  # a stage of a pipeline without the loss
        ([(float("nan"), 1.0)], [(float("nan"), 1.0)], None),
        ([(2.0, 1.0)], [(float("nan"), 1.0)], "the loss of a step differs by inf"),
        ([(2.0, 1.0)], [(None, 1.0)], "the loss of a step differs by inf"),
        ([(0.0, 1.0)], [(0.0, 1.0)], None),
        ([(0.0, 1.0)], [(1.0, 1.0)], "the loss of a step differs by inf"),
        ([(None, None)], [(None, None)], None),  # such a stage whose optimizer skipped the steps
        ([], [], "the stock run took 0 steps of an optimizer, the other run 0"),
        ([(2.0, 1.0)] * 2, [(2.0, 1.0)], "the stock run took 2 steps of an optimizer, the other run 1"),
    ],
)
def test_faults_are_those_beyond_the_tolerance(stock, ours, fault):
    both = runs(stock, ours)
    assert both.fault == fault if fault is None else fault in both.fault
    if None in dict(stock):
        assert both.largest == (0.0, 0.0)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--tolerance", "nan", "--verify", "1"], "argument --tolerance: 'nan' must be a number at least 0"),
        (["--tolerance", "-1", "--verify", "1"], "argument --tolerance: '-1' must be a number at least 0"),
        (["--tolerance", "1"], "--tolerance or --picture is given without --verify"),
        (["--picture", "both.png"], "--tolerance or --picture is given without --verify"),
    ],
)
def test_options_of_a_comparison_that_would_not_work_are_refused(options, said, capsys):
    with pytest.raises(SystemExit):
        run.main(["--linear-ce", *options, str(STANDIN)])
    assert said in capsys.readouterr().err


def test_several_ranks_need_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match="start the job with torchrun"):
        check_ranks()
