"""How long a step takes where the card's power bounds it: an H200 is held to 700 W, and products that follow each other
come to that.

A launch takes the longer of two times: that of the plan (`plan.py`), and that in which its joules can be spent. A byte
costs what is published of HBM and the way through the caches, and a FLOP what fits the rows of
`benchmarks/results/nvidia-h200.csv` by the fewest percent, on random numbers of size 1; the plan's rows have the error.
"""

from benchmarks.launches import Launch, Plan

WATTS, AT_REST = 700.0, 110.0  # the limit, and what the card takes while it computes nothing
JOULES_PER_FLOP, JOULES_PER_BYTE = 0.85e-12, 50e-12  # in 16-bit products at the limit; from and to memory


def joules(launch: Launch) -> float:
    """Of a product or of traffic, without what the card takes at rest."""
    return JOULES_PER_FLOP * launch.flops + JOULES_PER_BYTE * (launch.read + launch.written)


def seconds(found: Plan) -> float:
    """Of a step among others like it; collectives run beside it, as in `found.seconds`."""
    return sum(
        max(launch.seconds, joules(launch) / (WATTS - AT_REST)) for launch in found.launches if not launch.is_collective
    )


def step_joules(found: Plan) -> float:
    """Of a step, with what the card takes at rest."""
    return sum(joules(launch) for launch in found.launches if not launch.is_collective) + AT_REST * seconds(found)
