"""Places that a mutation run changes, and places that it leaves alone."""

from tests.mutations import mutants_of

SOURCE = '''"""A module with 3 words."""
LIMIT: int = 2


def f(x, n=True):
    """Return 4."""
    if x.shape[0] < LIMIT and n:
        raise ValueError(f"{x + 1}: it must have 2 rows")
    x.total += -x.detach().sum(1)
    time.sleep(0.5)
    return dict(strict=True) if x is not None else x
'''

CHANGED = [
    ("LIMIT: int = 2", "LIMIT: int = 3"),
    ("n=True", "n=False"),
    ("LIMIT and n", "LIMIT or n"),
    ("[0] <", "[0] <="),
    ("shape[0]", "shape[1]"),
    ('raise ValueError(f"{x + 1}: it must have 2 rows")', "pass"),
    ("x.total += -x.detach().sum(1)", "pass"),
    ("-x.detach().sum(1)", "(x.detach().sum(1))"),
    ("x.detach()", "x"),
    ("sum(1)", "sum(2)"),
    ("is not", "is"),
]


def test_each_place_is_changed_once_and_messages_stay(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = {mutant.apply(SOURCE) for mutant in mutants_of(path, tmp_path)}
    assert found == {SOURCE.replace(old, new, 1) for old, new in CHANGED}


def test_a_mutant_knows_its_function_and_shows_its_line(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    of_module, *_, last = mutants_of(path, tmp_path)
    assert (of_module.function, last.function) == ((0, 11), (5, 11))
    line = "    - return dict(strict=True) if x is not None else x\n    + return dict(strict=True) if x is None else x"
    assert last.diff(SOURCE) == f"megatron_ext/module.py:11\n{line}"
