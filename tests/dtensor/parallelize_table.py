"""Writes the table of docs/parallelize_table.md: each causal model of transformers, and each for images, sharded.

Each is built tiny, and its logits, loss and gradients at 2 tensor- and at 2 context-parallel ranks are compared with
those of one process.

    python -m tests.dtensor.parallelize_table [--resume FILE] [CLASSES...]
"""

import json
import pickle
import re
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests import ranks as pools
from tests.dtensor.any_class import alone, made, run
from tests.dtensor.fused_loss_table import made_table
from tests.dtensor.tiny_models import batch, tiny
from tests.ranks import close_pools

PAGE = Path(__file__).parents[2] / "docs" / "parallelize_table.md"
LAYOUTS = {"TP 2": {"tp": 2}, "CP 2": {"cp": 2}}
TIME_S = 90


def cell(name, config, layout):
    """The worst outcome on both ranks, a refusal on one alone being none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(name=name, config=config, layout=layout, folder=folder, world_size=2)
        except BaseException as failure:  # pytest's own
            if isinstance(failure, KeyboardInterrupt):
                raise
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    if len(found) < 2:
        return "CRASH", f"a rank never answered, or ended; the other: {found}"
    if {kind for kind, _ in found} == {"right", "refused"}:
        return "CRASH", f"refused on one rank alone: {found}"
    return next((each for kind in ("WRONG", "CRASH", "refused") for each in found if each[0] == kind), found[0])


def row(name):
    """The outcome in each layout; a reason where there is no model to try."""
    try:
        config = tiny(getattr(transformers, name)).config
        tokens = batch(made(name, config))["input_ids"]
        first, second = (alone(name, config, tokens)[0] for _ in range(2))
        if not torch.equal(first, second):
            return "its own forward gives other logits each time"
    except Exception as fault:
        return f"not built small: {' '.join(str(fault).split())[:100]}"
    return [cell(name, pickle.dumps(config), layout) for layout in LAYOUTS.values()]


def text_of(rows):
    notes, lines, left = [], [f"| class | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"], []
    counts = {layout: {} for layout in LAYOUTS}
    for name, found in rows.items():
        if isinstance(found, str):
            left.append(f"{name} ({found})")
            continue
        entries = []
        for layout, (kind, why) in zip(LAYOUTS, found, strict=True):
            counts[layout][kind] = counts[layout].get(kind, 0) + 1
            why = re.sub(r"^\w+ parallelism of \w+ is not supported \((.*)\); run it.*$", r"\1", why).replace(name, "X")
            why = re.sub(r": it must be one of \[.*\]; pass a custom plan$", "", why)
            if kind == "refused":
                notes += [] if why in notes else [why]
                why = f"({notes.index(why) + 1})"
            entries.append(f"{kind} {why}".strip().replace("|", "/"))
        lines.append(f"| {name} | {' | '.join(entries)} |")
    version = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    total = "; ".join(
        f"{layout}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(each.items()))
        for layout, each in counts.items()
    )
    reasons = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    tail = ["", f"Not run: {', '.join(left)}."] if left else []
    return "\n".join([f"With {version}, {len(rows) - len(left)} classes. {total}.", "", *lines, "", *reasons, *tail])


def main():
    pools.TIMEOUT_S = TIME_S
    try:
        rows = made_table(PAGE, __doc__, row, text_of)
    finally:
        close_pools()
    return int(any(kind in ("WRONG", "CRASH") for row in rows.values() if not isinstance(row, str) for kind, _ in row))


if __name__ == "__main__":
    sys.exit(main())
