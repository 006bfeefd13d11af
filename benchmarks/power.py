"""How long a step takes where the card's power bounds it: an H200 is held to 700 W, and products that follow each other
come to that.

A step takes the longer of two times: that of its launches (`plan.py`), and that in which its joules can be spent. A
FLOP and a byte cost what fits the rows of `benchmarks/results/nvidia-h200.csv` best, on random numbers of size 1; a
joule at rest is the card's own.
"""

from benchmarks.launches import Plan

WATTS, AT_REST = 700.0, 110.0  # the limit, and what the card takes while it computes nothing
JOULES_PER_FLOP, JOULES_PER_BYTE = 0.85e-12, 50e-12  # in 16-bit products at the limit; from and to memory


def joules(found: Plan) -> float:
    """Of the products and the traffic of a step, without what the card takes at rest."""
    return JOULES_PER_FLOP * found.flops + JOULES_PER_BYTE * found.moved_bytes


def seconds(found: Plan) -> float:
    """Of a step among others like it: its launches' time, or more where its joules take longer at the limit."""
    return max(found.seconds, joules(found) / (WATTS - AT_REST))
