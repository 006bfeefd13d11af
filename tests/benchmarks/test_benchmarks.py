import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks import record, run
from benchmarks.cases import COUNTED_CASE, MEGATRON, Case
from benchmarks.implementations import FUSED, MODELS, PYTORCH_CHUNKED, Implementation, ours
from benchmarks.measure import (
    Results,
    baselines,
    empty,
    errors,
    interleaved,
    measure_case,
    measured_once,
    parity,
    plain,
    ratios,
    refusal,
    run_once,
    shard_of,
    truth,
    watched,
    whole_inputs,
)
from benchmarks.meter import one_rank_of
from benchmarks.plot import MEMORY, TIME, cache_figure
from tests.ranks import ranks

CASE = Case("small", 48, 16, 96, 1, torch.float32)
THROUGHS = [impl.through for impl in (ours(1), FUSED)]
ORIGIN = record.Origin("a device, 2 cores", "torch 2", "abc", "2026-01-01")


@pytest.fixture(scope="module")
def known():
    whole = whole_inputs(CASE)
    true = truth(whole)
    return true, baselines(CASE, true, THROUGHS)


def judge(impl, known, case=CASE):
    true, bases = known
    results = run_once(impl.build(case, None), shard_of(whole_inputs(case), case, 0))
    return refusal(impl, parity(results, true, bases[impl.through]))


def standing_for(impl, wrong):
    return replace(impl, build=lambda case, group: wrong)


def test_right_heads_are_timed(known):
    for impl in (ours(1), ours(0.5), ours(0), *MODELS):
        assert judge(impl, known) is None
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # from torch 2.13 on; it gives the mean only
        assert judge(PYTORCH_CHUNKED, known) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, y: plain(x, w, y) + 1e-4,  # the loss
        lambda x, w, y: plain(x, w.detach(), y) + 0 * w.sum(),  # no weight gradient
        lambda x, w, y: plain(x.detach(), w, y) + 0 * x.sum(),
        lambda x, w, y: plain(x.bfloat16().float(), w, y),  # less precise than it says
        lambda x, w, y: plain(x, w, y) + math.nan,
        lambda x, w, y: plain(x, w, y) + 0 * (0 * w).sqrt().sum(),  # dW alone is NaN
        lambda x, w, y: plain(x, w, y).mean() + 1e-4,
        lambda x, w, y: plain(x, w.detach(), y).mean() + 0 * w.sum(),
        lambda x, w, y: plain(x.bfloat16().float(), w, y).mean(),
    ],
)
def test_wrong_heads_are_refused(wrong, known):
    """The wider limit of a mean refuses wrong heads too."""
    for impl in (ours(1), PYTORCH_CHUNKED):
        assert "its time does not count" in judge(standing_for(impl, wrong), known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_of_a_gradient_through_bf16_stays_below_its_bound(dtype):
    """Megatron's fused head has such a gradient, which errs hundreds of times as much as plain PyTorch's in fp32."""
    case = replace(CASE, dtype=dtype)
    true = truth(whole_inputs(case))
    known = true, baselines(case, true, THROUGHS)
    assert judge(standing_for(FUSED, partial(plain, through=torch.bfloat16)), known, case) is None
    for wrong in (
        lambda x, w, y: plain(x, w, y, through=torch.bfloat16) * 1.01,
        lambda x, w, y: with_scaled_gradient(plain(x, w, y, through=torch.bfloat16), 1.01),  # the gradient alone
        partial(plain, through=torch.float8_e5m2),
        lambda x, w, y: plain(x, w, y, through=torch.bfloat16) + (1e-4 if dtype == torch.float32 else 1e-2),
    ):
        assert judge(standing_for(FUSED, wrong), known, case)


def with_scaled_gradient(loss, factor):
    loss.register_hook(lambda grad: grad * factor)
    return loss


def test_a_sum_over_shards_is_rounded_once_more():
    """The bf16 dx is a sum of rounded parts, so the error of one shard alone is no measure for it."""
    case = Case("small", 48, 16, 96, 2, torch.bfloat16)
    true = truth(whole_inputs(case))
    (_, one, _), (_, two, _) = (baselines(case, true, [None])[None] for case in (case.unsharded, case))
    assert 1.2 * one < two < 2 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_may_err_by_the_rounding_to_its_dtype_and_no_more(dtype):
    case = replace(CASE, dtype=dtype)
    whole = whole_inputs(case)
    true = truth(whole)
    exact = Results(true.loss.mean().to(dtype), *(grad.to(dtype) for grad in true[1:]))
    baseline = (1e-30, *errors(exact, true)[1:])
    assert parity(exact, true, baseline).worst <= 1
    away = exact._replace(loss=exact.loss * (1 + 4 * torch.finfo(dtype).eps))
    assert parity(away, true, baseline).loss > 4
    by_token = exact._replace(loss=true.loss.to(dtype))
    assert parity(by_token, true, baseline).loss > 1e9, "a loss per token is held to the baseline"


def test_a_refused_head_has_no_time(known):
    wrong = Implementation("wrong", lambda case, group: lambda x, w, y: 2 * plain(x, w, y))
    stock = Implementation(MEGATRON, lambda case, group: plain)
    rows, refused = measure_case(CASE, None, [stock, wrong, ours(1)], *known, 0.0)
    timed = {impl for impl, metric, *_ in rows if metric in ("time", "time / unfused")}
    assert timed == {MEGATRON, "ours, cache 1", "three matmuls"}
    assert len(refused) == 1
    assert refused[0].startswith("wrong: ")
    found = {(impl, metric): values for impl, metric, _, values in rows}
    assert found[MEGATRON, "time / unfused"] == [1.0, 1.0, 1.0]
    assert found["ours, cache 1", "FLOPs / NVH"] == [6.0]


@pytest.mark.slow
@ranks(2)
def test_models_of_peers_on_several_ranks():
    case = Case("small", 300, 16, 96, 2, torch.float32)
    whole = whole_inputs(case)
    true = truth(whole)
    own = slice(dist.get_rank() * case.columns, (dist.get_rank() + 1) * case.columns)
    inputs = shard_of(whole, case, dist.get_rank())
    for impl, sent in zip(MODELS, (2 * 2 * 2 + 2, 5), strict=True):  # two chunks of tokens
        results, costs = measured_once(impl.build(case, dist.group.WORLD), inputs)
        torch.testing.assert_close(results.loss, true.loss.float())
        torch.testing.assert_close(results.dx_TD, true.dx_TD.float())
        torch.testing.assert_close(results.dw_VD, true.dw_VD[own].float())
        assert sum(costs.collectives.values()) == sent


@pytest.mark.slow
def test_models_recompute_at_full_size():
    case = COUNTED_CASE
    for impl, sent in zip(MODELS, (64 * 4 + 2, 5), strict=True):
        with one_rank_of(case.ranks) as group:
            _, costs = measured_once(impl.build(case, group), empty(case))
        assert costs.flops == 8 * case.nvh
        assert sum(costs.collectives.values()) == sent


def test_slow_steps_run_once():
    times = interleaved({MEGATRON: lambda: None, "slow": lambda: None}, 0.0, frozenset({"slow"}))
    assert len(times[MEGATRON]) == 3
    assert [math.isnan(ms) for ms in times["slow"]] == [False, True, True]
    assert len(ratios(times)["slow"]) == 1
    assert ratios({MEGATRON: [2.0, 4.0], "a": [1.0, 6.0]})["a"] == [0.5, 1.5]


def test_the_allocator_is_watched():
    answer, peak = watched(lambda: (torch.ones(2**18).sum() + torch.ones(2**10).sum()).item())
    assert answer == 2**18 + 2**10
    assert 2**20 <= peak <= 2**20 + 2**13


def test_each_case_is_written_once_it_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "some.csv"

    def fails():
        yield "first", [("ours, cache 1", "time", "ms", [2.0])], []
        assert [row.case for row in record.read(path)] == ["machine", "first"]
        raise OSError("out of memory")

    monkeypatch.setitem(run.PARTS, "heads", fails)
    monkeypatch.setattr("sys.argv", ["run", "cpu", "--only", "heads", "--out", str(path)])
    monkeypatch.setattr(run, "quiet", lambda: None)
    with pytest.raises(OSError, match="out of memory"):
        run.main()
    assert [row.case for row in record.read(path)] == ["machine", "first"]


def test_rows_and_columns(tmp_path):
    path = tmp_path / "results" / "cpu.csv"
    row = ORIGIN.row("one", "ours, cache 1", "time", "ms", [3.0, 1.0, 2.0])
    assert (row.p20, row.p50, row.p80, row.n) == (1.4, 2.0, 2.6, 3)
    record.write(path, [row, ORIGIN.row("two", "x", "peak", "MiB", [1.5])])
    header = path.read_text().splitlines()[0]
    assert header == "case,impl,metric,unit,p50,p20,p80,n,device,versions,commit,date"
    again = ORIGIN.row("two", "x", "peak", "MiB", [2.5])
    record.write(path, [again])  # cases of another run stay, those measured again are replaced
    assert record.read(path) == [row, again]
    assert "ours, cache 1" in record.table([row])
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="remove the file"):
        record.write(path, [row])


def test_the_committed_results_have_the_schema():
    for path in record.RESULTS.glob("*.csv"):
        rows = record.read(path)
        assert rows
        assert all(row.n >= 1 and row.p20 <= row.p50 <= row.p80 for row in rows)


def test_the_figure(tmp_path):
    rows = [
        ORIGIN.row("one", impl, metric, "1", [value, 1.1 * value])
        for impl, value in (("ours, cache 0", 1.2), ("ours, cache 1", 0.9), (MEGATRON, 1.0))
        for metric in (TIME, MEMORY)
    ]
    assert cache_figure(rows, tmp_path / "figures" / "it.png").stat().st_size > 10_000
