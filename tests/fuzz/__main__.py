"""`python -m tests.fuzz --seed S --cases N`: random cases on each number of ranks, up to the first finding."""

import argparse
import time

from tqdm import tqdm

from tests.fuzz.test_fuzz import test_many
from tests.ranks import close_pools

AT_A_TIME = 100  # cases of a call, after which the bar moves


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--cases", type=int, default=1000, help="on each number of ranks (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="default: 1 2 3 4")
    parser.add_argument("--only", default="", help='kinds whose name has this in it, as "layers.linear" (default: all)')
    options = parser.parse_args()
    for ranks in options.ranks:
        begun = time.monotonic()
        last = options.first + options.cases
        firsts = range(options.first, last, AT_A_TIME)
        for first in tqdm(firsts, f"{ranks} ranks", unit=f"{AT_A_TIME} cases", leave=False, disable=None):
            cases = min(AT_A_TIME, last - first)
            test_many(seed=options.seed, first=first, cases=cases, only=options.only, world_size=ranks)
        took_s = time.monotonic() - begun
        print(f"seed {options.seed}, {ranks} ranks, {options.cases} cases: right, {took_s:.0f} s", flush=True)
    close_pools()
    print(f"no finding in {options.cases * len(options.ranks)} cases of seed {options.seed}")


if __name__ == "__main__":
    main()
