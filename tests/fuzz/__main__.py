"""`python -m tests.fuzz --seed S --cases N`: random cases on each number of ranks, up to the first finding."""

import argparse
import time

from tests.fuzz.test_fuzz import test_many
from tests.ranks import close_pools


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--cases", type=int, default=1000, help="on each number of ranks (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="default: 1 2 3 4")
    options = parser.parse_args()
    for ranks in options.ranks:
        begun = time.monotonic()
        print(f"seed {options.seed}, {ranks} ranks, {options.cases} cases: ", end="", flush=True)
        test_many(seed=options.seed, first=options.first, cases=options.cases, world_size=ranks)
        print(f"right, {time.monotonic() - begun:.0f} s")
    close_pools()


if __name__ == "__main__":
    main()
