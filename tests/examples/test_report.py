import report

HEAD = {"peak_mib": 38.75, "time_ms": 113.2, "collectives": 4}
STOCK = {"losses": [9.7, 8.0, 7.0], "tokens_per_s": 2535.8, "head": HEAD}
OURS = {
    "losses": [9.7, 8.00008, 7.0],
    "tokens_per_s": 3144.1,
    "head": HEAD | {"collectives": 2},
    "head_least_memory": HEAD | {"peak_mib": 12.0, "collectives": 2},
}


def test_the_table_has_what_was_measured():
    lines = {line[:35].strip(): line[35:].split() for line in report.table(STOCK, OURS).splitlines()}
    assert lines["final loss"] == ["7.00000", "7.00000"]
    assert lines["largest difference of a step's loss"] == ["1.0e-05"]
    assert lines["tokens/s"] == ["2536", "3144"]
    assert lines["head step, peak MiB"] == ["38.8", "38.8", "12.0"]
    assert lines["collectives of a head call"] == ["4", "2", "2"]


def test_the_figure_is_a_png(tmp_path):
    report.figure(STOCK, OURS, "a title", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
