"""Long work shows a bar on a terminal, nothing of it elsewhere, and ends with a line that says what came out."""

import io
import sys

import pytest

from benchmarks.progress import say, shown
from tests.fuzz import __main__ as fuzz


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_the_bar_is_for_terminals(monkeypatch, capsys, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    for number in shown(["a", "b", "c"], "letters"):
        say(f"measured {number}")
    assert capsys.readouterr().out == "measured a\nmeasured b\nmeasured c\n"
    told = sys.stderr.getvalue()
    assert ("letters" in told and "0/3" in told) if stream is Terminal else told == ""


def test_without_tqdm(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for number in shown(range(2), "numbers"):
        say(f"measured {number}")
    assert capsys.readouterr() == ("measured 0\nmeasured 1\n", "")


def test_the_fuzz_says_what_came_out(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(fuzz, "test_many", lambda **call: ran.append(call))
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "5", "--first", "7", "--cases", "250", "--ranks", "1", "3"])
    fuzz.main()
    for ranks in (1, 3):
        calls = [call for call in ran if call["world_size"] == ranks]
        assert [number for c in calls for number in range(c["first"], c["first"] + c["cases"])] == list(range(7, 257))
        assert all(call["seed"] == 5 for call in calls)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line[: len("seed 5, 1 ranks, 250 cases: right")] for line in lines] == [
        f"seed 5, {ranks} ranks, 250 cases: right" for ranks in (1, 3)
    ]
    assert last == "no finding in 500 cases of seed 5"
