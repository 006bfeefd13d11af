"""The Triton passes against the plain ones. A module of its own: the interpreter is chosen when triton is imported.

`TRITON_INTERPRET=1 python -m tests.head.twins` runs all comparisons on the CPU; a test calls `main` on CUDA.
"""

import itertools
from unittest import mock

import torch

from benchmarks.interpreter import round_to_bfloat16
from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head.call import statistics
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.kernels import TRITON as twin
from megatron_ext.head.kernels import exchange_checks, fixed_order_sums
from megatron_ext.head.kernels import label_terms as twin_terms
from megatron_ext.head.kernels import nucleus as twin_nucleus
from megatron_ext.head.kernels import selection as twin_selection
from megatron_ext.head.kernels import token_terms as twin_tokens
from megatron_ext.head.row_passes import label_terms as plain_terms
from megatron_ext.head.row_passes import nucleus as plain_nucleus
from megatron_ext.head.row_passes import passes as plain
from megatron_ext.head.row_passes import selection as plain_selection
from megatron_ext.head.row_passes.passes import PYTORCH
from megatron_ext.numerics import fixed_order_kernels
from megatron_ext.numerics.tensors import accumulation_dtype, ids_exist
from tests.head.fused_products import CASES, compare_fused_products

_ON_GPU = torch.version.cuda is not None and torch.cuda.is_available()
WIDTHS = [(37, 37), (37, 30), (37, 0), (1, 1), (2500, 2500), (17000, 16999)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOKENS = 3
SUMS = ("with_mean", "with_entropy", "with_hits")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the output's dtype: both sides compute in fp32 (fp64) and round once."""
    return {
        torch.float32: {"rtol": 2e-5, "atol": 2e-5},
        torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
        torch.float16: {"rtol": 2**-10, "atol": 1e-5},
        torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    }[dtype]


def compare(device: str, dtype: torch.dtype, columns: int, counted: int, flags: tuple[bool, ...], seed: int) -> None:
    softcapped, with_bias, with_mean, with_entropy, with_hits, masked = flags
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, to=None):
        return torch.randn(*shape, generator=generator).to(device, to or wide)

    wide = accumulation_dtype(dtype)
    softcap, temperature = (15.0, 0.7) if softcapped else (None, 1.0)
    z = 4 * draw(TOKENS, columns, to=dtype)
    if masked:
        z[1], z[2, ::3] = -torch.inf, -torch.inf
    target = torch.randint(-1, max(counted, 1), (TOKENS,), generator=generator).to(device)
    if counted == 0:
        target.fill_(-1)
    bias = draw(columns) if with_bias else None
    shape = 3 + 2 * with_mean + with_entropy + with_hits + softcapped, TOKENS
    bends = {"bias_V": bias, "counted": counted, "softcap": softcap, "temperature": temperature}
    options = {**bends, **dict(zip(SUMS, flags[2:5], strict=True))}
    found = []
    for side in (plain, twin):
        stats, exp, shift = z.new_empty(shape, dtype=wide), torch.empty_like(z), z.new_empty(TOKENS, dtype=wide)
        side.row_statistics(z, target, stats, exp_TV=exp, shift_T=shift, **options)
        found.append((stats, exp, shift))
    (stats, exp, shift), (twin_stats, twin_exp, twin_shift) = found
    torch.testing.assert_close(twin_shift, shift, **tolerance(wide))
    # Sums of `columns` terms in another order: their error grows with the number of terms, not with the sum.
    slack = {"rtol": tolerance(wide)["rtol"], "atol": tolerance(wide)["atol"] * max(1, columns**0.5)}
    torch.testing.assert_close(twin_stats, stats, **slack)
    torch.testing.assert_close(twin_exp, exp, **tolerance(dtype))
    if seed % 3 == 0 and columns > 1:  # exponentials of the first columns alone, and nothing behind them
        kept = columns * 5 // 8
        for side in (plain, twin):
            some, same = torch.full_like(z, 7.0), (torch.empty_like(stats), torch.empty_like(shift))
            side.row_statistics(z, target, same[0], exp_TV=some[:, :kept], shift_T=same[1], **options)
            torch.testing.assert_close(some[:, :kept], exp[:, :kept], **tolerance(dtype))
            assert (some[:, kept:] == 7.0).all()

    for is_exp, (has_scale, has_slope, has_offset, has_value) in zip(
        itertools.cycle((False, True)),
        [(False,) * 4, (True, False, False, False), (True, True, False, True), (True, True, True, True)] * 2,
        strict=False,
    ):
        scale, slope, offset, value = (
            draw(TOKENS) if there else None for there in (has_scale, has_slope, has_offset, has_value)
        )
        grads = []
        for side in (plain, twin):
            out = torch.empty_like(z)
            source = exp if is_exp else z
            given = {"scale_T": scale, "slope_T": slope, "offset_T": offset, "value_T": value, **bends}
            side.row_gradient(source, target, shift, out, source_is_exp=is_exp, **given)
            grads.append(out)
        torch.testing.assert_close(grads[1], grads[0], **tolerance(dtype))


def compare_kept_in_bf16(device: str, columns: int, counted: int, kept: int, flags: tuple[bool, ...]) -> None:
    """Exponentials in bf16 of logits in fp32, relative to what the first block of a long row shows, or to its maximum
    where that is far above: by 30, as with all of the block at -inf, but not by 10."""
    z = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).to(device)
    z[0, 7], z[1, -1], z[2, -1], z[3], z[4, :8192], z[5, 3] = 8.0, 10.0, 30.0, -torch.inf, -torch.inf, 60.0
    z[6, counted // 2] = 30.0
    target = torch.tensor([0, columns - 1, kept, -1, columns // 2, 3, -1], device=device).clamp(max=counted - 1)
    bias = torch.linspace(-1, 1, columns, device=device) if flags[0] else None
    softcap, temperature = (50.0, 0.7) if flags[1] else (None, 1.0)
    options = {"bias_V": bias, "counted": counted, "softcap": softcap, "temperature": temperature}
    options |= dict(zip(SUMS, flags[2:5], strict=True))
    found = []
    for side in (plain, twin):
        stats = z.new_empty(3 + sum(flags[1:5]) + flags[2], len(z))
        exp, shift = z.new_full(z.shape, 7.0, dtype=torch.bfloat16), z.new_empty(len(z))
        side.row_statistics(z, target, stats, exp_TV=exp[:, :kept], shift_T=shift, **options)
        assert (exp[:, kept:] == 7.0).all()
        found.append((stats, exp[:, :kept].double() * shift.double().exp().unsqueeze(1), shift, exp[:, :kept]))
    (stats, exp, shift, _), (twin_stats, twin_exp, twin_shift, rounded) = found
    torch.testing.assert_close(twin_stats, stats, rtol=2e-5, atol=2e-5 * columns**0.5)
    torch.testing.assert_close(twin_exp, exp, rtol=2**-7, atol=0.0)
    assert rounded.isfinite().all()
    assert (shift - twin_shift <= 20.0).all()
    if columns > 100_000 and counted == columns and not flags[1]:
        assert (twin_shift < shift).tolist() == [False, True, False, False, False, False, False]


def cases():
    """(dtype, columns, counted, flags): every option alone and all together, at every width and dtype."""
    nothing = (False,) * 6
    alone = [tuple(i == j for i in range(6)) for j in range(6)]
    for dtype, (columns, counted) in itertools.product(DTYPES, WIDTHS):
        single = alone if columns < 100 and dtype is torch.float32 else []
        for flags in [nothing, (True,) * 6, *single]:
            yield dtype, columns, counted, flags


def compare_label_terms(device: str, dtype: torch.dtype, shape: tuple[int, int, int], smoothed: bool) -> None:
    """Labels that come often, once, and not at all; dW in the dtype of x and wider; dx where its product is, too."""
    tokens, rows, width = shape
    generator = torch.Generator().manual_seed(tokens)
    wide = accumulation_dtype(dtype)

    def draw(*shape, to=wide):
        return torch.randn(*shape, generator=generator).to(device, to)

    x, value = draw(tokens, width, to=dtype), draw(tokens)
    target = torch.randint(-1, rows, (tokens,), generator=generator).to(device)
    target[tokens // 3 :: 2] = rows - 1
    common, counted = (draw(width, 2)[:, 0], (draw(rows, 2)[:, 0] > 0).to(wide)) if smoothed else (None, None)
    for of in {dtype, wide}:
        out = draw(rows, width + 3, to=of)[:, :width]
        found = []
        for side in (plain_terms, twin_terms, twin_terms):
            found.append(out.clone())
            side.add_label_rows(found[-1], x, target, value, common, counted)
        torch.testing.assert_close(found[1], found[0], **tolerance(of))
        assert found[1].equal(found[2]), "the same bits in each run"
        in_parts = out.clone()
        with mock.patch.object(twin_terms, "_WINDOW", 4):
            twin_terms.add_label_rows(in_parts, x, target, value, common, counted)
        torch.testing.assert_close(in_parts, found[0], **tolerance(of))
        if not smoothed:
            untouched = torch.ones(rows, dtype=torch.bool, device=device).index_fill_(0, target[target >= 0], False)
            assert found[1][untouched].equal(out[untouched])

    product, scale, weight = draw(tokens, width), draw(tokens), draw(rows, width, to=dtype)
    value = value.masked_fill(target < 0, 0.0)
    offset = draw(tokens) if smoothed else None
    results = []
    for side in (plain_terms, twin_terms):
        for within in (False, True):
            product_of = product.clone()
            out = product_of.view(dtype).view(-1)[: product.numel()].view(product.shape)
            out = out if within else weight.new_empty(product.shape)
            side.finish_dx(out, product_of, scale, target, value, weight, offset, common)
            results.append(out)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], **tolerance(dtype))
    assert results[2].equal(results[3])
    scaled = [x.new_empty(x.shape) for _ in range(2)]
    for side, out in zip((plain_terms, twin_terms), scaled, strict=True):
        side.scale_rows(out, x, scale)
    assert scaled[1].equal(scaled[0])


def compare_nucleus(
    device: str,
    dtype: torch.dtype,
    columns: int,
    size: float,
    temperature: float,
    sizes: tuple[float, ...] = (1e-6, 0.1, 0.9, 0.999),
    step: int = 1,
) -> None:
    """Rows of -inf and with some, of equals, zeros of both signs, NaN and infinity; and rows that begin anywhere."""
    generator = torch.Generator().manual_seed(columns)
    z = (size * torch.randn(9, columns + 3, generator=generator)).to(device, dtype)
    if columns > 20:
        z[1], z[2, ::3], z[3] = -torch.inf, -torch.inf, 2.5
        z[4, :columns:2], z[5, 3], z[5, 4], z[6, 7], z[7, 7] = 1.5, 0.0, -0.0, torch.nan, torch.inf
    for top_p in sizes:
        for rows in (z[::step, :columns].contiguous(), z[1::step, 3:]):
            found = [s.nucleus(rows, top_p, temperature, torch.mm) for s in (plain_nucleus, twin_nucleus)]
            (cut, peak, total), (twin_cut, twin_peak, twin_total) = found
            torch.testing.assert_close(twin_cut, cut, rtol=0.0, atol=0.0, equal_nan=True)
            torch.testing.assert_close(twin_peak, peak, rtol=2e-7, atol=0.0, equal_nan=True)
            torch.testing.assert_close(twin_total, total, rtol=1e-6, atol=0.0, equal_nan=True)


def compare_selection(device: str, dtype: torch.dtype, columns: int, numbers: tuple[int, ...] = (1, 5, 70)) -> None:
    """Compare selections from rows of equal numbers, with more of the k-th than candidates, as many, and none."""
    generator = torch.Generator().manual_seed(columns)
    z = torch.randn(7, columns + 5, generator=generator).to(device, dtype)[:, :columns]
    z[1], z[2] = 1.0, z[2].clamp(max=0.5)
    z[3, -1], z[4] = torch.nan, -torch.inf
    groups = columns // 64
    maxima = [s.group_maxima(z, groups, 64) for s in (plain_selection, twin_selection)]
    torch.testing.assert_close(maxima[1], maxima[0], rtol=0.0, atol=0.0, equal_nan=True)
    z[5, 0], z[5, -1], z[6, ::2] = -torch.nan, 0.0, -0.0
    k, candidates = min(5, columns), min(9, columns)
    chosen_from = [None] if groups < k else [None, torch.stack([torch.randperm(groups)[:k] for _ in z]).to(device)]
    for of, wanted in itertools.product(chosen_from, {min(n, columns) for n in numbers}):
        found = [s.first_columns(z, of, 64, wanted, False) for s in (plain_selection, twin_selection)]
        assert found[1].equal(found[0])
        values = [z.gather(1, s.first_columns(z, of, 64, wanted, True)) for s in (plain_selection, twin_selection)]
        torch.testing.assert_close(values[1], values[0], rtol=0.0, atol=0.0, equal_nan=True)
    largest, places = z.nan_to_num(nan=7.0).topk(candidates, 1)
    counts = [s.equal_counts(z.nan_to_num(nan=7.0), largest, k) for s in (plain_selection, twin_selection)]
    assert counts[1].equal(counts[0])
    value = torch.randn(7, 2, generator=generator).to(device, dtype)[:, 0]
    value[::3] = 0.0
    besides = torch.cat([places, torch.full((7, 1), -1, device=device), torch.full((7, 1), columns, device=device)], 1)
    begun = torch.randn(7, columns, generator=generator).to(device, dtype)
    added = [begun.clone() for _ in range(2)]
    for side, out in zip((plain_selection, twin_selection), added, strict=True):
        side.add_at_equals(out, z, largest[:, k - 1].to(dtype), value, besides)
    assert added[1].equal(added[0])
    assert added[0].equal(begun) == (columns <= candidates)


def compare_token_terms(device: str, dtype: torch.dtype, ranks: int, call: dict, grads: list[str]) -> None:
    """Compare the terms of every rank's statistics, from shards of which one has no finite logit and one no column, and
    of tokens that do not count, have no finite logit, and are certain of their label."""
    generator = torch.Generator().manual_seed(ranks)
    tokens, columns = 150, 12  # two programs, the second not full
    z = 6 * torch.randn(tokens, ranks * columns, generator=generator, dtype=dtype)
    labels = torch.randint(0, ranks * columns, (tokens,), generator=generator)
    z[3], z[4, -columns:], z[5, labels[5]], z[6, labels[6]] = -torch.inf, -torch.inf, 60.0, -torch.inf
    labels[::7] = -100
    z, labels = z.to(device), labels.to(device)
    vocab = VocabShard(0, columns, ranks * columns)
    settings = ResolvedHead(None, vocab, **call)
    made, targets, shifts = [], [], []
    for rank in range(ranks):
        start = rank * columns
        target = (labels - start).where((labels >= start) & (labels < start + columns), -1)
        stats = statistics.new_statistics(tokens, statistics.own_rows(settings), 1, z.dtype, z.device)
        shift = z.new_empty(tokens)
        stats[statistics.START, -1] = start if ranks > 1 else torch.nan  # one rank does not sign what it does not send
        counted = 0 if ranks == 3 and rank == 1 else columns
        plain.row_statistics(
            z[:, start : start + columns],
            target.where(target < counted, -1),
            stats[:, :-1],
            shift_T=shift,
            counted=counted,
            softcap=settings.softcap,
            temperature=settings.temperature,
            with_mean=settings.mean,
            with_entropy=settings.expected,
            with_hits=settings.hits,
        )
        made.append(stats)
        targets.append(target)
        shifts.append(shift)
    upstream = [
        1e-3 * torch.randn(tokens, generator=generator).to(z) if name in grads else None for name in Basis._fields
    ]
    if len(grads) == 1:
        upstream[0] = z.new_tensor(0.5).expand(tokens)
    for rank in range(ranks):
        found = []
        for side in (PYTORCH, twin_tokens):
            stats = side.combined(torch.stack(made), made[rank], shifts[rank] - 3.0, settings)
            gradient = side.token_gradient(stats, labels != -100, targets[rank], Basis(*upstream), settings)
            found.append([*stats, *(gradient.inside or ()), *gradient[1:]])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.dtype == theirs.dtype
                precise = {"rtol": 1e-12, "atol": 1e-13} if ours.dtype == torch.float64 else {"rtol": 2e-7, "atol": 0.0}
                torch.testing.assert_close(theirs, ours, **precise, equal_nan=True)


CHECKS = [statistics.REFUSAL, statistics.SHARDS, "the options", "labels"]
EXCHANGES = (
    "sound",
    "refused",
    "size",
    "columns",
    "overlap",
    "options",
    "labels",
    "alike",
    "one",
    "past",
    "not a number",
)


def compare_exchange_checks(device: str, fault: str, ranks: int, softcap: float | None, tokens: int) -> None:
    """Compare the kernel's five answers with the error of plain checks, for an exchange without or with a fault."""
    generator = torch.Generator().manual_seed(tokens)
    call = ResolvedHead(None, VocabShard(0, 10, 10 * ranks), softcap=softcap, largest=softcap)
    stats = torch.randn(ranks, statistics.SENT, tokens + 1, generator=generator)
    labels = torch.randint(10, (tokens,), generator=generator)
    said = stats[:, : statistics.LABELS + 1, -1]
    said.copy_(torch.tensor([[10 * ranks, 10, 10 * rank, 7, 9] for rank in range(ranks)]))
    if ranks > 2:
        said[0, statistics.OPTIONS :] = 0  # does not say
    if softcap is not None:  # all but the last token reach it
        stats[:, statistics.MAX, : tokens - 1] = call.largest
        stats[:, statistics.SUM_EXP, : tokens - 1] = 1.0
    if fault == "refused":
        said[-1] = statistics.REFUSED
    elif fault == "size":
        said[1, statistics.SIZE] += 1
    elif fault == "columns":
        said[1, statistics.COUNTED] += 1
    elif fault == "overlap":
        said[1, statistics.START] -= 1
    elif fault in ("options", "labels"):
        said[-1, getattr(statistics, fault.upper())] = 11
    elif fault != "sound":
        stats[1:, :, :-1] = stats[0, :, :-1]
    if fault == "alike":
        stats[:, :, :-1] = stats[:, :, :1]
    elif fault == "past":
        labels[-1] = 10
    elif fault == "not a number":
        stats[:, statistics.SUM_EXP, tokens - 1] = torch.nan
    try:
        statistics.check_exchange(stats, labels, call, "softcap")
        wanted = None
    except (ValueError, RuntimeError) as error:  # the latter on CUDA
        wanted = next((at for at, message in enumerate(CHECKS) if str(error).startswith(message)), 4)
    given = stats.to(device), labels.to(device), call
    found = [at for at, fine in enumerate(exchange_checks.exchange_checks(*given).tolist()) if not fine]
    if fault == "one":  # of a call without labels there is one number, and what lies behind it is another tensor's
        behind = torch.full((tokens,), 10**6, device=device)
        behind[0] = -1
        of_one = exchange_checks.exchange_checks(given[0], behind[:1], call).tolist()
        assert found == [at for at, fine in enumerate(of_one) if not fine]
    assert (wanted in found) if wanted is not None else not found
    faults = {"refused": 0, "size": 1, "columns": 1, "overlap": 1, "options": 2, "labels": 3}
    if tokens > 1 and softcap is None:  # of one token, and where the others tell nothing, all sums are alike
        faults["one"] = 4
    assert wanted == faults.get(fault)


IDS = (torch.int64, torch.int32, torch.uint8)
SIZES = (0, 1, 700, 8193, 20000)


def compare_ids_exist(device: str, dtype: torch.dtype, count: int, spared: int | None) -> None:
    """Compare checks of ids, for one step and several: all in range, or the last one below, above or spared."""
    for wrong in (None, -1, 100, 120):
        ids = torch.arange(count, dtype=dtype, device=device) % 100
        if wrong is not None and count:
            ids[-1] = wrong
        assert bool(twin.ids_exist(ids, 100, spared)) == bool(ids_exist(ids, 100, spared))
        assert bool(twin.ids_exist(ids[::2], 100, spared)) == bool(ids_exist(ids[::2], 100, spared))


def compare_columns(device: str, count: int, start: int, masked: bool) -> None:
    ids = torch.arange(count, device=device) * 7 % 100
    counts = ids % 3 > 0 if masked else None
    found = twin.columns_of(ids, counts, start, 60)
    assert torch.equal(found, plain.columns_of(ids, counts, start, 60))
    assert found.dtype == torch.int64


def compare_checksums(device: str, count: int, width: int, more: bool) -> None:
    ids = [torch.arange(count * width, device=device).reshape(count, width).squeeze(1) * 7919]
    if more:
        ids.append(ids[0].flatten()[::2])
    found = twin.labels_checksum(ids, None)
    assert int(found) == int(statistics.labels_checksum(ids, None))
    if count > 1:
        assert int(found) != int(twin.labels_checksum([ids[0].flip(0), *ids[1:]], None))
    places = torch.arange(count, device=device).flip(0)
    assert int(twin.labels_checksum(ids[:1], places)) == int(statistics.labels_checksum(ids[:1], places))


# What a call asks for, and which gradients there are.
TOKEN_CALLS = [
    ({}, ["log_prob"]),
    ({"hits": True}, ["log_prob", "lse"]),
    ({"mean": True, "temperature": 0.7}, ["log_prob", "lse", "mean"]),
    ({"mean": True, "softcap": 20.0}, ["lse", "mean"]),
    ({"expected": True, "softcap": 20.0}, ["entropy"]),
    (
        {"expected": True, "mean": True, "hits": True, "softcap": 20.0, "temperature": 0.7},
        ["log_prob", "lse", "mean", "entropy"],
    ),
]

SHAPES = [(1, 1, 1), (150, 11, 40), (0, 5, 8), (9, 70, 2050)]  # tokens, rows, width


def comparisons():
    """Every comparison: the function and its arguments after the device."""
    terms = [(compare_label_terms, case) for case in itertools.product(DTYPES, SHAPES, (False, True))]
    terms += [
        (compare_token_terms, (dtype, ranks, call, grads))
        for dtype, ranks, (call, grads) in itertools.product((torch.float32, torch.float64), (1, 3), TOKEN_CALLS)
    ]
    terms += [
        (compare_exchange_checks, case) for case in itertools.product(EXCHANGES, (2, 3), (None, 30.0), (1, 5, 600))
    ]
    terms += [(compare_ids_exist, case) for case in itertools.product(IDS, SIZES, (None, 120))]
    terms += [(compare_columns, case) for case in itertools.product((0, 1, 1500), (0, 40), (False, True))]
    terms += [(compare_checksums, case) for case in itertools.product((0, 1, 5000), (1, 3), (False, True))]
    terms += [(compare_nucleus, (dtype, 41, 3.0, 0.7)) for dtype in DTYPES]
    terms += [
        (compare_nucleus, (dtype, *case))
        for dtype, case in (
            *((torch.float32, one) for one in ((1, 1.0, 1.0), (1500, 1.0, 1.0), (3000, 40.0, 0.7))),
            (torch.bfloat16, (1500, 0.3, 1.0)),
        )
    ]
    terms += [(compare_selection, case) for case in itertools.product(DTYPES, (1, 9, 130, 4500))]
    passes = [(compare, (*case, seed)) for seed, case in enumerate(cases())]
    plainly, all_options = (False,) * 5, (True,) * 5
    sampled = [
        (compare_kept_in_bf16, case)
        for case in [
            (110_000, 110_000, 110_000, plainly),
            (110_000, 109_999, 60_001, plainly),
            (110_000, 30_000, 110_000, plainly),
            (50_000, 49_000, 50_000, all_options),
        ]
    ]
    fused = [(compare_fused_products, case) for case in CASES if _ON_GPU]  # a rehearsal has no descriptors of tensors
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    fixed = [(compare_products, case) for case in itertools.product(dtypes, ("logits", "dx", "dW"))]
    fixed += [(compare_fixed_sums, (dtype,)) for dtype in dtypes[:2]]
    return [*sampled, *terms, *passes, *fused, *fixed]


def compare_products(device: str, dtype: torch.dtype, kind: str, columns: int = 300) -> None:
    """True values, of sizes that are no multiples of a tile, in an output that has gaps; a row's bits are those of any
    other place and number of rows, and a sum's those of two parts. `kind`: whose operands' strides these are."""
    generator = torch.Generator().manual_seed(0)
    wide, (m, k, n) = accumulation_dtype(dtype), (150, 2 * 64 + 6, columns)
    left, right = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((m, k), (k, n)))
    a_MK = left.t().contiguous().t() if kind == "dW" else left
    b_KN = right.t().contiguous().t() if kind == "logits" else right
    whole, parts = (torch.full((m, n + 3), 7.0, dtype=wide, device=device)[:, :n] for _ in range(2))
    fixed_order_kernels.product(a_MK, b_KN, whole)
    precise = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(whole, (left.double() @ right.double()).to(wide), rtol=precise, atol=precise)
    assert (whole._base[:, n:] == 7.0).all()
    some = torch.empty(3, n, dtype=wide, device=device)
    fixed_order_kernels.product(a_MK[[140, 2, 77]], b_KN, some)
    assert some.equal(whole[[140, 2, 77]])
    fixed_order_kernels.product(a_MK[:, :64], b_KN[:64], parts)
    fixed_order_kernels.product(a_MK[:, 64:], b_KN[64:], parts, goes_on=True)
    assert parts.equal(whole)
    more = torch.ones(m, n, dtype=dtype, device=device)
    fixed_order_kernels.product(a_MK, b_KN, more, adds=True)
    assert more.equal((1 + whole).to(dtype))


def compare_fixed_sums(device: str, dtype: torch.dtype) -> None:
    """True values, by a row's or a segment's numbers alone; rows longer than a block, and segments of any length."""
    x_TN = torch.randn(7, 2500, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    precise = {"rtol": 0.0, "atol": 1e-12 if dtype is torch.float64 else 2e-4}
    whole_T = fixed_order_sums.row_sums(x_TN)
    torch.testing.assert_close(whole_T, x_TN.double().sum(1), **precise, check_dtype=False)
    assert whole_T[[5]].equal(fixed_order_sums.row_sums(x_TN[[5]]))
    assert whole_T[2:4].equal(fixed_order_sums.row_sums(x_TN.t().contiguous().t()[2:4]))
    lengths_T = torch.tensor([0, 3, 2400, 0, 97, 1], device=device)
    parts = x_TN.flatten()[: int(lengths_T.sum())].split(lengths_T.tolist())
    found_T = fixed_order_sums.segment_sums(torch.cat(parts), lengths_T)
    wanted_T = torch.stack([part.double().sum() for part in parts])
    torch.testing.assert_close(found_T, wanted_T, **precise, check_dtype=False)
    assert found_T[2:3].equal(fixed_order_sums.segment_sums(parts[2], lengths_T[2:3]))


def compare_engine_softmax(device: str, softcap: float | None, temperature: float, with_bias: bool) -> None:
    """The sums of exponentials below the maximum, over the columns that count, and their logarithm."""
    generator = torch.Generator().manual_seed(0)
    z_TV = 4 * torch.randn(3, 1100, generator=generator).to(device)
    bias_V = torch.randn(1100, generator=generator).to(device) if with_bias else None
    z_TV[1] = -torch.inf
    bent = z_TV if bias_V is None else z_TV + bias_V
    bent = (bent if softcap is None else softcap * torch.tanh(bent / softcap)) / temperature
    bent = bent[:, :1090].masked_fill(z_TV[:, :1090] == -torch.inf, -torch.inf)
    stats_KT = z_TV.new_zeros(8, 3)
    stats_KT[statistics.MAX] = bent.amax(1)
    fixed_order_sums.write_sums(z_TV, stats_KT, bias_V, 1090, softcap, temperature)
    wanted = (bent - bent.amax(1, keepdim=True).clamp(min=-1e9)).exp().sum(1)
    keeps = slice(None) if softcap is None else torch.tensor([0, 2])  # the softcap bends -inf to a number
    torch.testing.assert_close(stats_KT[statistics.SUM_EXP][keeps], wanted[keeps])
    torch.testing.assert_close(fixed_order_sums.log(wanted[[0, 2]]), wanted[[0, 2]].log())


_NOTHING, _ALL, _MASKED = (False,) * 6, (True,) * 6, (False,) * 5 + (True,)
_FP32, _BF16 = torch.float32, torch.bfloat16
QUICK = {
    "label_terms": [
        (compare_label_terms, (_BF16, (9, 5, 8), False)),
        (compare_label_terms, (torch.float64, (3, 4, 1100), True)),
    ],
    "token_terms": [
        (compare_token_terms, (_FP32, ranks, *TOKEN_CALLS[number]))
        for ranks, number in ((1, 0), (1, 1), (1, 3), (3, 2), (3, 5))
    ],
    "nucleus": [(compare_nucleus, (_FP32, 21, 3.0, temperature, (0.7,), 8)) for temperature in (0.7,)],
    "selection": [(compare_selection, (_FP32, 130, (5,)))],
    "products": [
        (compare_products, (*case, 130)) for case in ((_BF16, "logits"), (_FP32, "dx"), (torch.float64, "dW"))
    ],
    "fused products": [(compare_fused_products, case) for case in CASES],
    "fixed sums": [(compare_fixed_sums, (dtype,)) for dtype in (_FP32, torch.float64)],
    "engine softmax": [
        (compare_engine_softmax, (None, 1.0, False)),
        (compare_engine_softmax, (20.0, 0.7, True)),
    ],
    "rows": [
        (compare, (dtype, *case))
        for dtype, case in (
            (_FP32, (37, 30, _ALL, 0)),
            (_FP32, (37, 37, _MASKED, 3)),
            (_BF16, (37, 37, _NOTHING, 0)),
            (_BF16, (2500, 2400, _ALL, 0)),
        )
    ],
    "kept rows": [(compare_kept_in_bf16, (*columns, _ALL)) for columns in ((2500, 2400, 2000), (17000, 16990, 15000))],
}


def quick(name: str) -> None:
    """A few small comparisons of the kernels of one file."""
    round_to_bfloat16()
    for check, case in QUICK[name]:
        check("cpu", *case)


def main(device: str = "cpu", every: int = 1) -> None:
    """All comparisons, or one of `every` so many."""
    round_to_bfloat16()
    chosen = comparisons()[::every]
    for check, case in chosen:
        check(device, *case)
    print(f"{len(chosen)} comparisons")


if __name__ == "__main__":
    main()
