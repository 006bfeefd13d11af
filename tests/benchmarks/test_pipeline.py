"""The simulated schedules: what is promised of ours holds, what is compared with is right, the note shows the rows."""

import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from benchmarks import record
from benchmarks.cases import Case
from benchmarks.pipeline import __main__ as program
from benchmarks.pipeline.costs import LINKS, LLAMA_8B, LLAMA_70B, Model, Setup, head_seconds, setups
from benchmarks.pipeline.launched import launched_seconds
from benchmarks.pipeline.launched import table as launched_table
from benchmarks.pipeline.schedules import SCHEDULES, Timeline, even, ours, paper, redistributed, stock
from benchmarks.plan import WHOLE, plan
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import (
    Kind,
    length,
    pass_duration,
    pass_needs,
    pass_order,
    simulate,
)
from megatron_ext.head.call.gpu_properties import DEVICES
from tests.marks import quick_if
from tests.pages import DOCS

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="the head's launch plan wants compiled kernels; the ordinary run has them",
)
NOTE = DOCS / "pipeline.md"
SETUPS = list(setups(batches_per_stage=2))


def committed():
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in record.read(program.CSV):
        found.setdefault((row.case, row.impl), {})[row.metric] = row.p50
    return found


@cache
def tiny(**given):
    """Layers of 1 ms at the given rate, without attention to speak of."""
    return replace(Setup(Model("tiny", 8, 1024, 4096, 8, 8, 32768), 4, 1, 2, 12, LINKS["NVLink"], tokens=1024), **given)


def harder(setup):
    """Slow links are, for ours; with NVLink, and of more layers or stages, only the long run compares."""
    return setup.link is LINKS["400 Gb/s"] and setup.model is not LLAMA_70B and setup.stages == 4


@pytest.mark.parametrize("setup", quick_if(harder, SETUPS), ids=lambda setup: setup.name)
def test_balanced_stages_are_as_fast_as_the_best_redistribution(setup):
    """Few micro-batches are simulated here; the committed rows say the same of a usual number."""
    timeline = ours(setup, 1)
    states = [stage.state_bytes for stage in timeline.stages]
    assert max(states) <= 1.03 * min(states)
    assert timeline.seconds <= redistributed(setup, 1).seconds
    assert ours(setup, setup.chunks).seconds <= stock(setup, even(setup, setup.chunks)).seconds


def test_the_committed_rows_keep_the_promises():
    rows = committed()
    cases = {case for case, _ in rows}
    assert cases == {setup.name for setup in SETUPS}
    for case in cases:
        for mine, best in program.BESIDE_BEST:
            assert rows[case, mine][program.STEP] <= rows[case, best][program.STEP]
            assert rows[case, mine][program.MOST_STATE] <= 1.03 * rows[case, mine][program.LEAST_STATE]


def test_the_committed_rows_are_what_is_simulated_now():
    rows, setup = committed(), next(setups())
    for name, schedule in SCHEDULES.items():
        for impl, metric, _, (value,) in program.rows(setup, {"1F1B": SCHEDULES["1F1B"](setup), name: schedule(setup)}):
            if impl == name:
                found = rows[setup.name, impl][metric]
                assert found == pytest.approx(value, rel=1e-4), "run `python -m benchmarks.pipeline`"


def test_the_note_shows_the_committed_rows():
    assert program.summary(program.CSV) in NOTE.read_text()


def test_the_heads_time_is_the_launch_plans():
    whole = plan(Case("", 2048, 1024, 32768, 4, torch.bfloat16), WHOLE, DEVICES["H100"])[0].seconds
    parts = head_seconds(2048, 1024, 32768, 4, DEVICES["H100"])
    assert sum(parts) == pytest.approx(whole)
    assert min(parts) >= 2 * (2048 * 32768 // 4 * 1024) / 790e12


def test_layers_by_their_flops():
    """Llama-3 8B has 6.98e9 weights in its layers; attention adds what its causal half multiplies."""
    model = LLAMA_8B
    assert model.layers * model.layer_weights == 6979321856
    assert model.layer_flops(8192) == 2 * 8192 * model.layer_weights + 2 * 8192 * 8192 * 4096
    setup = Setup(model, 4, 1, 1, 8, LINKS["NVLink"])
    assert setup.layer_seconds == pytest.approx(model.layer_flops(8192) / (0.7 * 790e12))
    assert replace(setup, tensor_parallel=8).layer_seconds == pytest.approx(setup.layer_seconds / 8)
    vocabulary = 2 * model.vocab * model.width
    assert setup.parameters(model.layers, 2.0) == model.layers * model.layer_weights + vocabulary
    assert setup.state_bytes(1.0) == 18
    assert replace(setup, data_parallel=4).state_bytes(1.0) == 9


def without_messages(setup):
    return replace(setup, link=LINKS["NVLink"]._replace(bytes_per_s=float("inf"), latency_s=0.0))


def test_stock_takes_what_1f1b_takes():
    """Time without messages: m micro-batches on the slowest stage, one more way up and down on each of the others."""
    setup = without_messages(tiny())
    layers = 2 * setup.layer_seconds
    head = sum(setup.head_seconds(1))
    timeline = stock(setup, even(setup, 1))
    embedding = setup.lookup_seconds + setup.rows_seconds(1)
    assert timeline.seconds == pytest.approx(3 * 3 * layers + embedding + 12 * (3 * layers + head))
    busy = 12 * (4 * 3 * layers + head + embedding)
    assert timeline.bubble == pytest.approx(1 - busy / (4 * timeline.seconds))
    assert [stage.in_flight for stage in timeline.stages] == [4, 3, 2, 1]
    states = [stage.state_bytes for stage in timeline.stages]
    assert states[0] == states[3] == states[1] + 18 * 32768 * 1024
    assert states[1] == 18 * 2 * setup.model.layer_weights
    exponentials = 2 * 1024 * 32768
    assert timeline.stages[3].activation_bytes == 2 * setup.layer_activation_bytes + exponentials


def test_interleaved_has_a_smaller_bubble():
    """1 / chunks of the way up and down, at m a multiple of p."""
    setup = without_messages(tiny(model=Model("no head", 8, 1024, 4096, 8, 8, 8), layer_rate=0.01))
    plain, halves = (stock(setup, even(setup, chunks)).seconds for chunks in (1, 2))
    assert plain == pytest.approx((12 + 3) * 6 * setup.layer_seconds, rel=0.05)
    assert halves == pytest.approx((12 + 3 / 2) * 6 * setup.layer_seconds, rel=0.05)


def test_the_search_finds_the_best_redistribution():
    """Compared with every distribution of nine layers over three stages."""
    model = Model("tiny", 9, 1024, 4096, 8, 8, 131072)
    setup = Setup(model, 3, 1, 1, 6, LINKS["400 Gb/s"], tokens=1024)
    every = [((a,), (b,), (9 - a - b,)) for a in range(10) for b in range(10 - a)]
    best = min(stock(setup, layers).seconds for layers in every)
    found = redistributed(setup, 1)
    assert found.seconds == pytest.approx(best)
    assert found.seconds < 0.95 * stock(setup, even(setup, 1)).seconds


def test_passes_take_6_nvh_over_all_stages_and_sends_are_counted():
    setup = tiny()
    timeline = ours(setup, 1)
    for line in timeline.runs:
        passes = [run for run in line if run.what.kind in (Kind.PRODUCTS, Kind.WEIGHT)]
        assert sum(run.end - run.start for run in passes) == pytest.approx(12 * sum(setup.head_seconds(4)))
    hidden, tokens = 2 * 1024 * 1024, 1024
    statistics, ids_and_labels, grad_loss = 3 * 3 * 4 * tokens, 16 * tokens, 4 * tokens
    assert timeline.sent_bytes == 2 * hidden + 4 * hidden + statistics + ids_and_labels + grad_loss
    assert [stage.in_flight for stage in timeline.stages] == [5, 4, 3, 2]
    held = 2 * (2 * tokens * 32768 / 4 + hidden)
    assert timeline.stages[3].activation_bytes == pytest.approx(2 * 2 * setup.layer_activation_bytes + held)


def test_estimates_of_the_training_loop_find_as_good_an_order():
    """The training loop's order is run with the simulated durations, against the order for these."""
    from megatron_ext.experimental.pipeline_vocabulary.schedule import estimated_times

    setup = next(one for one in SETUPS if one.name == "Llama-3 8B PP8, 400 Gb/s")
    model, shape, times = setup.model, setup.shape(1), setup.times(1)
    config = SimpleNamespace(
        hidden_size=model.width,
        tensor_model_parallel_size=1,
        ffn_hidden_size=model.mlp_width,
        gated_linear_unit=True,
        num_layers=model.layers,
    )
    shared = SimpleNamespace(
        output=SimpleNamespace(vocab=SimpleNamespace(columns=model.vocab // setup.ranks), mtp_layers=0)
    )
    order = pass_order(shape, estimated_times(config, shape, shared, setup.tokens))
    queues = [[[run.what for run in line]] for line in order]
    replayed = simulate(queues, pass_needs(shape, times), pass_duration(times))
    assert length(replayed) <= 1.01 * ours(setup, 1).seconds


def gains_most(setup):
    """The 70B on eight stages does, from a second micro-batch in flight."""
    return setup.link is LINKS["400 Gb/s"] and (setup.model, setup.stages) == (LLAMA_70B, 8)


@pytest.mark.parametrize("setup", quick_if(gains_most, setups()), ids=lambda setup: setup.name)
def test_launching_messages_in_one_order_costs_no_time(setup):
    """Messages that go as soon as they can are the baseline. One hardware queue costs at most 2 %."""
    for chunks in (1, setup.chunks):
        alone = ours(setup, chunks).seconds
        assert launched_seconds(setup, chunks) == pytest.approx(alone, rel=5e-3)
        assert alone <= launched_seconds(setup, chunks, one_queue=True) <= 1.02 * alone


@pytest.mark.slow
def test_the_note_says_what_one_queue_costs():
    chosen = [setup for setup in setups() if setup.link is LINKS["400 Gb/s"]]
    assert launched_table(chosen) in NOTE.read_text()


def test_the_papers_algorithms():
    """One and two micro-batches more in flight; no pass of the first waits for what comes after it."""
    setup = tiny()
    first, second = paper(setup, 1), paper(setup, 2)
    assert [stage.in_flight for stage in second.stages] == [5, 4, 3, 2]
    assert [stage.in_flight for stage in first.stages] == [6, 5, 4, 3]
    begun = [{run.what: run.start for run in line} for line in first.runs]
    for what, start in begun[3].items():
        if what.kind is Kind.BACKWARD:
            weights = [line[what._replace(kind=Kind.WEIGHT)] for line in begun]
            seconds = sum(setup.head_seconds(4)[1:])
            assert start >= max(weights) + seconds


def test_one_micro_batch_has_a_timeline_under_every_schedule():
    setup = tiny(micro_batches=1)
    for schedule in SCHEDULES.values():
        assert isinstance(schedule(setup), Timeline)


@pytest.mark.slow
def test_the_program(capsys, tmp_path, monkeypatch):
    """Prints a block a schedule, writes the rows, draws the picture."""
    csv, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
    given = ["--cases", "8B PP4, NVLink", "--batches-per-stage", "2", "--out", str(csv), "--figure", str(picture)]
    monkeypatch.setattr("sys.argv", ["pipeline", *given])
    program.main()
    printed = capsys.readouterr().out
    assert "Llama-3 8B PP4, NVLink: 8 micro-batches of 8192 tokens, H200" in printed
    assert "both of them: refused by Megatron, 34 does not divide by 4" in printed
    assert {row.impl for row in record.read(csv)} == set(SCHEDULES)
    assert picture.stat().st_size > 10_000
