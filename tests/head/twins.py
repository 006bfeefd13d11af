"""The Triton row passes against the plain ones. A module of its own: the interpreter is chosen when triton is imported.

`TRITON_INTERPRET=1 python -m tests.head.twins` runs the comparison on CPU, with `few` a small part of it and the head
itself on the Triton passes; tests call `compare` on CUDA.
"""

import itertools
import sys

import torch

from megatron_ext.head import rows as plain
from megatron_ext.head.kernels import rows as twin
from tests.head.problems import OPTIONS, Problem

WIDTHS = [(37, 37), (37, 30), (37, 0), (1, 1), (2500, 2500), (17000, 16999)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOKENS = 3


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

    wide = plain.accumulation_dtype(dtype)
    softcap, temperature = (15.0, 0.7) if softcapped else (None, 1.0)
    z = 4 * draw(TOKENS, columns, to=dtype)
    if masked:
        z[1], z[2, ::3] = -torch.inf, -torch.inf
    target = torch.randint(-1, max(counted, 1), (TOKENS,), generator=generator).to(device)
    if counted == 0:
        target.fill_(-1)
    bias = draw(columns) if with_bias else None
    shape = plain.statistics_rows(with_mean, with_entropy, with_hits, softcapped), TOKENS
    found = []
    for side in (plain, twin):
        stats, exp = torch.empty(shape, dtype=wide, device=device), torch.empty_like(z)
        side.row_statistics(
            z, target, stats, exp, bias, counted, softcap, temperature, with_mean, with_entropy, with_hits
        )
        found.append((stats, exp))
    (stats, exp), (twin_stats, twin_exp) = found
    # Sums of `columns` terms in another order: their error grows with the number of terms, not with the sum.
    slack = {"rtol": tolerance(wide)["rtol"], "atol": tolerance(wide)["atol"] * max(1, columns**0.5)}
    torch.testing.assert_close(twin_stats, stats, **slack)
    torch.testing.assert_close(twin_exp, exp, **tolerance(dtype))

    shift = stats[0].where(stats[0] > -torch.inf, 0.0)
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
            side.row_gradient(
                source, is_exp, target, shift, scale, slope, offset, value, out, bias, counted, softcap, temperature
            )
            grads.append(out)
        torch.testing.assert_close(grads[1], grads[0], **tolerance(dtype))


def cases():
    """(dtype, columns, counted, flags): every option alone and all together, at every width and dtype."""
    nothing = (False,) * 6
    alone = [tuple(i == j for i in range(6)) for j in range(6)]
    for dtype, (columns, counted) in itertools.product(DTYPES, WIDTHS):
        single = alone if columns < 100 and dtype is torch.float32 else []
        for flags in [nothing, (True,) * 6, *single]:
            yield dtype, columns, counted, flags


def main(device: str = "cpu") -> None:
    done = 0
    for seed, (dtype, columns, counted, flags) in enumerate(cases()):
        compare(device, dtype, columns, counted, flags, seed)
        done += 1
    print(f"{done} comparisons")


def few() -> None:
    """Every flag at once in each dtype, and the head with every option at once: values and gradients."""
    for seed, dtype in enumerate(DTYPES):
        compare("cpu", dtype, 37, 30, (True,) * 6, seed)
    problem = Problem((3,), options=OPTIONS["all"])
    for what, cache in (("loss", 0), ("loss", 1), ("log_probs", 0.5)):
        results, grads = problem.ours(what, None, cache=cache)
        torch.testing.assert_close([*results, *grads], [x for kind in problem.truth(what) for x in kind])
    print(f"{len(DTYPES) + 3} comparisons")


if __name__ == "__main__":
    few() if sys.argv[1:] == ["few"] else main()
