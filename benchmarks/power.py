"""How long a step takes where the card's power bounds it: an H200 is held to 700 W, and products that follow each other
come to that.

A launch takes the longer of two times: that of the plan (`plan.py`), and that in which its joules can be spent
(`megatron_ext/memory/step_time.py`); the plan's rows have the error.
"""

from benchmarks.launches import Launch, Plan
from megatron_ext.memory import step_time
from megatron_ext.memory.step_time import AT_REST, WATTS


def joules(launch: Launch) -> float:
    """Of a product or of traffic, without what the card takes at rest."""
    return step_time.joules(launch.flops, launch.read + launch.written)


def seconds(found: Plan) -> float:
    """Of a step among others like it; collectives run beside it, as in `found.seconds`."""
    return sum(
        max(launch.seconds, joules(launch) / (WATTS - AT_REST)) for launch in found.launches if not launch.is_collective
    )


def step_joules(found: Plan) -> float:
    """Of a step, with what the card takes at rest."""
    return sum(joules(launch) for launch in found.launches if not launch.is_collective) + AT_REST * seconds(found)
