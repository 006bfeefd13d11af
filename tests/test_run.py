"""The launcher: unmodified scripts see what they would see without it, apart from what was asked for."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_ext import run
from tests.programs import python
from tests.ranks import TIMEOUT_S

ROOT = Path(__file__).parents[1]
STANDIN = Path(__file__).parent / "standin" / "pretrain.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def launch(folder, *arguments, ranks=0, **options):
    """Run the launcher from a folder that is neither the script's nor ours."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_ext.run", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, **options
    )


def forked(folder, *arguments, ranks):
    """The same, in processes that need not import torch and Megatron."""
    return python("-m", "megatron_ext.run", *arguments, cwd=folder, ranks=ranks, ignore_warnings=True)


LOCAL = ["--transformer-impl", "local"]


def report_of(folder, *arguments, ranks, script=(), layers=LOCAL, started=forked):
    report = folder / "report.json"
    sizes = ["--tensor-model-parallel-size", ranks, "--report", report, *layers, *script]
    done = started(folder, "--cpu", *arguments, STANDIN, *sizes, ranks=ranks)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["argv"] == list(map(str, sizes))
    return found | {"stderr": done.stderr}


@pytest.mark.slow
def test_pretraining_script_runs_stock_and_on_our_layers(tmp_path):
    stock = report_of(tmp_path, ranks=1)
    assert stock["layers"].startswith("megatron.core.")
    assert stock["head"] == "None"
    assert "fused head" not in stock["stderr"]
    ours = report_of(
        tmp_path,
        *("--linear-ce", "--chunk-tokens", 5, "--cache", 0.5, "--tensor-parallel"),
        ranks=2,
        script=["--cpu", "own"],
        started=launch,
    )
    assert ours["layers"].startswith("megatron_ext.tensor_parallel.")
    assert "chunk_tokens=5, cache=0.5" in ours["head"]
    said = [line for line in ours["stderr"].splitlines() if line.startswith("fused head")]
    assert said == ["fused head: GPTModel: 1 loss fused, logits made 0 times"]  # of the first step, on one rank
    assert ours["cpu"] == "own"
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)
    assert stock["losses"][0] != pytest.approx(stock["losses"][1], rel=1e-3)


@pytest.mark.slow
def test_a_layer_spec_by_name_under_sequence_parallelism(tmp_path):
    """Megatron-LM imports such a spec by `--spec MODULE NAME`, for norms that its own layers do not have."""
    stock = report_of(tmp_path, ranks=1)
    ours = report_of(tmp_path, "--linear-ce", ranks=2, script=["--sequence-parallel"])
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)


@pytest.mark.slow
def test_check_says_what_would_be_fused_and_trains_nothing(tmp_path):
    report = tmp_path / "report.json"
    sizes = ["--tensor-model-parallel-size", 2, "--report", report, *LOCAL]
    done = forked(tmp_path, "--cpu", "--linear-ce", "--tensor-parallel", "--check", STANDIN, *sizes, ranks=2)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("fused head")]
    assert said == [
        "fused head: GPTModel: fused, 1 loss of each micro-batch without logits; "
        "tensor-parallel layers: 10 of megatron_ext"
    ]
    assert not report.exists()


@pytest.mark.slow
def test_settings_of_the_loss_reach_the_head(tmp_path):
    settings = {"z-loss": 0.01, "label-smoothing": 0.1, "softcap": 30.0, "temperature": 0.5}
    settings |= {"bits": "batch", "skip-ignored": 32}
    given = [f"--{name}={value}" for name, value in settings.items()]
    ours = report_of(tmp_path, "--linear-ce", *given, ranks=1)
    for name, value in settings.items():
        assert f"{name.replace('-', '_')}={value!r}" in ours["head"]
    stock = report_of(tmp_path, "--linear-ce", ranks=1)
    assert ours["losses"][0] != pytest.approx(stock["losses"][0], rel=1e-3)


@pytest.fixture
def script(tmp_path):
    """Writes a script into a folder of its own."""
    folder = tmp_path / "scripts"
    folder.mkdir()

    def write(text):
        (folder / "script.py").write_text(textwrap.dedent(text))
        return folder / "script.py"

    return write


def test_log_of_the_package_is_shown(tmp_path, script):
    path = script("""
        import logging
        logging.getLogger("megatron_ext.part").info("some news")
    """)
    done = forked(tmp_path, path, ranks=1)
    assert done.stderr.splitlines().count("megatron_ext: some news") == 1, done.stderr


def test_what_a_script_sees(tmp_path, script):
    path = script("""
        import json, sys
        from dataclasses import dataclass
        import beside
        import __main__

        @dataclass
        class Here:
            x: int

        assert __main__.Here is Here and Here.__module__ == "__main__"
        assert beside.WHERE == sys.path[0]
        print(json.dumps([__name__, __file__, __spec__, __doc__, sys.argv, sys.path[0]]))
        def late(): print("late", __name__, Here(1))
        import atexit; atexit.register(late)
    """)
    (path.parent / "beside.py").write_text("import os; WHERE = os.path.dirname(os.path.abspath(__file__))\n")
    arguments = ["--cpu", "--", "-x", "--cache=2", "two words"]
    relative = os.path.relpath(path, tmp_path)
    plain = subprocess.run([sys.executable, relative, *arguments], cwd=tmp_path, capture_output=True, text=True)
    ours = launch(tmp_path, relative, *arguments)
    assert ours.returncode == 0
    told = ours.stderr.splitlines()
    assert (
        told[-1] == f"megatron_ext: nothing is plugged into {relative}: add --linear-ce or --tensor-parallel before it"
    )
    if not torch.cuda.is_available():
        assert "no GPU is here, and --cpu is not given, but behind SCRIPT" in told.pop(0)
    assert len(told) == 1
    assert ours.stdout == plain.stdout
    assert ours.stdout.endswith("late __main__ Here(x=1)\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text,code,said",
    [
        ("raise SystemExit(7)", 7, ""),
        ("import os; os._exit(9)", 9, ""),
        ("def deep():\n    raise KeyError('lost')\n\ndeep()", 1, 'script.py", line 2, in deep\n    raise KeyError('),
    ],
    ids=["exit", "at once", "exception"],
)
def test_exit_codes_and_tracebacks_pass_through(tmp_path, script, text, code, said):
    done = launch(tmp_path, script(text))
    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_pass_through(tmp_path, script, number):
    path = script("""
        import time
        print("ready", flush=True)
        time.sleep(10_000)
    """)
    command = [sys.executable, "-m", "megatron_ext.run", str(path)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    try:
        _, stderr = process.communicate(timeout=TIMEOUT_S)  # which the script would outlast
    finally:
        process.kill()
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)


@pytest.mark.slow
def test_the_emulation_lasts_until_the_script_has_cleaned_up(tmp_path, script):
    path = script("""
        import atexit, torch
        atexit.register(lambda: print("then", torch.zeros(1, device="cuda").device))
        print("now", torch.zeros(1, device="cuda").device)
    """)
    assert launch(tmp_path, "--cpu", path).stdout == "now cpu\nthen cpu\n"


@pytest.mark.parametrize(
    "arguments,said",
    [
        ([], "the following arguments are required: SCRIPT"),
        (["--fast", "SCRIPT"], "unrecognized arguments: --fast"),
        (["--linear", "SCRIPT"], "unrecognized arguments: --linear"),
        (["--chunk-tokens", "4", "SCRIPT"], "add --linear-ce"),
        (["--cache", "0", "SCRIPT"], "add --linear-ce"),
        (
            ["--z-loss", "1e-4", "--softcap", "30", "SCRIPT"],
            "(--z-loss, --softcap), and the head is not: add --linear-ce",
        ),
        (["--linear-ce", "--label-smoothing", "1", "SCRIPT"], "label_smoothing is 1"),
        (["--linear-ce", "--temperature", "0", "SCRIPT"], "temperature is 0"),
        (["--linear-ce", "--softcap", "high", "SCRIPT"], "argument --softcap: invalid float value: 'high'"),
        (["--linear-ce", "--cache", "much", "SCRIPT"], "argument --cache: 'much' must be a fraction from 0 to 1, a"),
        (["--linear-ce", "--cache=-1", "SCRIPT"], "argument --cache: '-1' must be a fraction from 0 to 1, a number"),
        (["--linear-ce", "--chunk-tokens", "0", "SCRIPT"], "argument --chunk-tokens: '0' must be a positive number"),
        (["--skip-ignored", "any", "--bits", "batch", "SCRIPT"], "(--skip-ignored, --bits), and the head is not"),
        (["--linear-ce", "--bits", "exact", "SCRIPT"], "argument --bits: invalid choice: 'exact'"),
        (
            ["--linear-ce", "--skip-ignored", "some", "SCRIPT"],
            "argument --skip-ignored: 'some' must be a positive number of tokens, or any",
        ),
        (["--verify", "2", "SCRIPT"], "--verify is given, and nothing that changes the script: add --linear-ce"),
        (["--linear-ce", "--verify", "0", "SCRIPT"], "argument --verify: '0' must be a positive number of steps"),
        (["--record", "few", "FILE", "SCRIPT"], "--record: 'few' must be a positive number of steps"),
        (["missing.py"], "cannot open the script missing.py: No such file or directory"),
    ],
)
def test_wrong_arguments(script, capsys, monkeypatch, arguments, said):
    path = str(script("raise AssertionError('must not run')"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as stopped:
        run.main([path if a == "SCRIPT" else a for a in arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


FLAGS = ["persist-layer-norm", "gradient-accumulation-fusion", "masked-softmax-fusion", "rope-fusion"]
PARSER = f"""
import argparse, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--transformer-impl", default="transformer_engine")
for name in {FLAGS}:
    parser.add_argument("--no-" + name, action="store_false", dest=name)
parser.add_argument("--masked-softmax-fusion", action="store_true", dest="masked-softmax-fusion")
print(vars(parser.parse_args()), sys.argv[1:])
"""
ADDED = [f"--no-{name}" for name in FLAGS]


@pytest.mark.parametrize(
    "given, on, added",
    [
        ([], [], ["--transformer-impl", "local", *ADDED]),
        (["--transformer-impl=transformer_engine", "--no-rope-fusion"], ["--transformer-impl"], ADDED[:3]),
        (["--transformer-impl", "local", "--masked-softmax-fusion"], [FLAGS[2]], [*ADDED[:2], ADDED[3]]),
    ],
)
def test_script_gets_the_flags_that_a_cpu_needs(given, on, added, tmp_path, script):
    """Flags that a user gives stand, and the launcher says what it added and what a user's flag asks for."""
    done = forked(tmp_path, "--cpu", script(PARSER), *given, ranks=2)
    assert done.returncode == 0, done.stderr
    found = {name: name in on for name in FLAGS}
    found = {"transformer_impl": "transformer_engine" if "--transformer-impl" in on else "local"} | found
    assert done.stdout.splitlines() == [f"{found} {given}"] * 2
    told = [line for line in done.stderr.splitlines() if line.startswith("megatron_ext: ")]
    assert told[-1] == f"megatron_ext: on a CPU the script gets {' '.join(added)} as well"
    assert len(told) == 2 + len(on)
    assert "nothing is plugged into" in told[0]
    assert all("stays, and wants" in line for line in told[1:-1])


@pytest.mark.parametrize("options", [[], ["--linear-ce"]])
def test_torchrun_is_named_where_its_environment_is_missing(options, tmp_path, script):
    path = script("""
        import torch
        print("init")
        torch.distributed.init_process_group("gloo")
    """)
    done = python("-m", "megatron_ext.run", "--cpu", *options, path, cwd=tmp_path, ignore_warnings=True)
    assert done.returncode == 1
    assert "RANK expected, but not set" in done.stderr
    assert "start it by torchrun: torchrun --nproc-per-node 1 -m megatron_ext.run" in done.stderr


def test_without_megatron_it_says_so(script, capsys, monkeypatch):
    path = str(script("raise AssertionError('must not run')"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(SystemExit, match="2"):
        run.main(["--linear-ce", path])
    assert "are about Megatron-Core, which is not to be found" in capsys.readouterr().err
