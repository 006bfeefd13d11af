import pytest
import report

HEAD = {"peak_mib": 38.75, "time_ms": 113.2, "collectives": 4}
BF16 = {"peak_mib": 40.0, "time_ms": 100.0, "collectives": 4}
STOCK = {"losses": [9.7, 8.0, 7.0], "tokens_per_s": 2535.8, "head": HEAD, "head_bf16": BF16}
OURS = {
    "losses": [9.7, 8.00008, 7.0],
    "tokens_per_s": 3144.1,
    "head": HEAD | {"collectives": 2},
    "head_least_memory": HEAD | {"peak_mib": 12.0, "collectives": 2},
    "head_bf16": BF16 | {"peak_mib": 20.0, "time_ms": 80.0, "collectives": 2},
    "head_bf16_least_memory": BF16 | {"peak_mib": 6.0, "time_ms": 110.0, "collectives": 2},
}


def test_the_table_has_what_was_measured():
    lines = {line[:35].strip(): line[35:].split() for line in report.table(STOCK, OURS).splitlines()}
    assert lines["final loss"] == ["7.00000", "7.00000"]
    assert lines["largest difference of a step's loss"] == ["1.0e-05"]
    assert lines["tokens/s"] == ["2536", "3144"]
    assert lines["head step in fp32, peak MiB"] == ["38.8", "38.8", "12.0"]
    assert lines["head step in bf16, peak MiB"] == ["40.0", "20.0", "6.0"]
    assert lines["collectives of a head call"] == ["4", "2", "2"]


def test_the_last_sentence_says_what_was_gained():
    assert report.gained(STOCK, OURS) == (
        "In bf16 the head took 0.80 of Megatron-Core's time in 0.50 of its memory, or 1.10 in 0.15, with 2 collectives "
        "instead of 4; no step's loss differs by more than 1.0e-05."
    )


@pytest.mark.slow
def test_the_figure_is_a_png(tmp_path):
    report.figure(STOCK, OURS, "a title", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
