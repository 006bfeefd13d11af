"""Run cases on this rank; the message of a finding has the command that runs it again."""

import os
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from tests.fuzz import (
    cross_entropy,
    distillation,
    heads,
    layers,
    losses,
    mappings,
    model_utils,
    same_bits,
    sequence,
    sharded_vocabulary,
)
from tests.fuzz.case import Case, check
from tests.fuzz.draw import Draw

KINDS: list[Callable[[Draw], Case]] = [
    cross_entropy.from_hidden,
    cross_entropy.from_logits,
    heads.read,
    heads.read_logits,
    heads.draft,
    same_bits.read,
    layers.linear,
    layers.embedding,
    losses.of_policies,
    distillation.of_students,
    mappings.mapping,
    mappings.all_to_all,
    sequence.attention,
    sequence.places_of_tokens,
    model_utils.from_logits,
    model_utils.from_hidden,
    model_utils.at_ids,
    sharded_vocabulary.over_vocabulary,
]
STUCK_S = 120  # a case takes milliseconds


def run(seed: int, first: int, cases: int, only: str = "") -> None:
    """Run the cases `first` to `first + cases - 1` of a seed, on the ranks of the default group.

    Args:
        only: run kinds whose name ("layers.linear") contains this text; "": all kinds.

    Raises:
        AssertionError: a case is wrong; the message has its draws and the command that runs it alone.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kinds = [kind for kind in KINDS if only in f"{kind.__module__.removeprefix('tests.fuzz.')}.{kind.__name__}"]
    for number in range(first, first + cases):
        again = command(seed, number, ranks, only)
        watch = threading.Timer(STUCK_S, _end, [again])
        watch.daemon = True
        watch.start()
        draw = Draw(seed, number, ranks)
        kind = draw.random.choice(kinds)
        try:
            case = kind(draw)
            check(case, rank)
        except Exception as error:
            raise AssertionError(
                f"{case.name if 'case' in locals() else kind.__name__}: {error}\n  drawn: {draw.record}, "
                f"exact={draw.exact}\n  again: {again}"
            ) from error
        finally:
            watch.cancel()


def command(seed: int, number: int, ranks: int, only: str) -> str:
    chosen = f" --only {only}" if only else ""
    return f"python -m tests.fuzz --seed {seed} --first {number} --cases 1 --ranks {ranks}{chosen}"


def _end(again: str) -> None:
    """End the process after a case that hangs, since ranks wait for each other."""
    print(f"a case hangs: {again}", file=sys.stderr, flush=True)
    os._exit(1)
