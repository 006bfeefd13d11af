"""Any shape, shard, chunk, cache, option and dtype against `reference.py`: values and gradients."""

import random

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_size
from tests.head.problems import Problem, error
from tests.ranks import ranks

# Roundings allowed beside twice PyTorch's error, by bytes of the dtype: where few terms cancel it may err by less than
# one, by luck. Of 600 problems drawn none in 16 or 32 bits needed more than 6. In fp64 PyTorch is the truth itself.
ROUNDINGS = {2: 8, 4: 8, 8: 64}


def drawn(number, ranks_):
    """A problem, what is read out, the layout, and how it is computed: alike on every rank."""
    draw = random.Random(number * 8 + ranks_)
    pick, columns = draw.choice, draw.randint(max(2, ranks_), 70)
    options = {
        "bias": pick([False, True]),
        "size": draw.randint(2, columns),
        "label_smoothing": pick([0.0, 0.1, 0.9]),
        "z_loss": pick([0.0, 0.01]),
        "softcap": pick([None, 2.0, 5.0, 30.0]),
        "temperature": pick([1.0, 0.7, 3.0]),
        "ignore_index": pick([-100, 1]),
    }
    problem = Problem(
        shape=(ranks_ * draw.randint(1, 6), draw.randint(1, 5)),
        width=draw.randint(1, 33),
        columns=columns,
        dtype=pick([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
        seed=number,
        logit_size=pick([0.1, 1.0, 5.0]),
        options=options,
        cuts=sorted(draw.randint(0, columns) for _ in range(ranks_ - 1)),
    )
    how = {
        "cache": pick([0, 0.3, 1, 2000, "auto"]),
        "chunk_tokens": pick([None, draw.randint(1, 9)]),
        "skip_ignored": pick([False, True]),
    }
    if pick([False, True]):
        g = torch.Generator().manual_seed(problem.seed)
        how["loss_mask"] = torch.randint(0, 2, problem.shape, generator=g).double()
    return problem, pick(["loss", "log_probs"]), pick(["replicated", "sequence"]), how


def excess(problem, what, layout, how, group) -> float:
    """The largest error beside what is allowed: twice plain PyTorch's in the same dtype, and a few roundings."""
    mask = how.get("loss_mask")
    if mask is not None:  # the reference knows labels and gradients only
        problem.labels = problem.labels.masked_fill(mask == 0, problem.ignore_index)
    rounding = ROUNDINGS[problem.dtype.itemsize] * torch.finfo(problem.dtype).eps
    shares = [
        error(ours, same) / (2 * error(theirs, same) + rounding)
        for ours, same, theirs in problem.beside_plain(what, group, layout, **how)
    ]
    return torch.tensor(shares, dtype=torch.float64).max().item()  # NaN if any is


def run(examples):
    group = dist.group.WORLD
    for number in range(examples):
        case = drawn(number, group_size(group))
        found = torch.tensor(excess(*case, group), dtype=torch.float64)
        assert collectives.all_reduce(found, group, op="max") <= 1, f"rank's own {found:.3g} x what is allowed: {case}"


@ranks(1, 2)
def test_a_few():
    run(15)


@pytest.mark.slow
@ranks(1, 2, 4)
def test_many():
    run(60)
