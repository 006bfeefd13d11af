"""Writes the table of families and layouts into docs/hugging_face.md: python -m tests.dtensor.family_table

Each cell is run: tiny models with drawn weights, tied and not, on 2 and 4 CPU processes over gloo, against one process
with transformers' own attention: logits, loss, every gradient and their norm (`tests.dtensor.cells`). A cell is
"yes" where all of them agree to 5e-6, else the sentence of the refusal; anything else ends the command with an error
and leaves the table as it was.
"""

import argparse
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from tests.dtensor.cells import check_tied_and_not
from tests.dtensor.models import FAMILIES, MIXTURES, MORE, NAMES, logits_proof, make
from tests.ranks import close_pools

DOCS = Path(__file__).parents[2] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- table: python -m tests.dtensor.family_table -->", "<!-- end of table -->"
COLUMNS = {
    "TP": {"tp": 2},
    "TP, SP": {"tp": 2, "sequence_parallel": True},
    "CP": {"cp": 2, "packed": True},
    "FSDP": {"dp": 2},
    "EP": {"tp": 2, "expert_parallel": True},
    "CP x TP, SP": {"cp": 2, "tp": 2, "sequence_parallel": True, "checkpointing": True},
    "FSDP x TP": {"dp": 2, "tp": 2},
}
MIXTURE_ONLY = ("EP",)


def cell(name, column):
    """Text of one cell of the table."""
    if column in MIXTURE_ONLY and name not in MIXTURES:
        return "no experts"
    layout = COLUMNS[column]
    size = layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)
    try:
        check_tied_and_not(name=name, layout=layout, world_size=size)
    except BaseException as failure:  # pytest's own
        refusal = re.search(r"^ValueError: (.*not supported.*|.*needs all experts.*)$", str(failure), re.MULTILINE)
        if refusal is None:
            raise
        return refusal.group(1)
    return "yes"


def head(name):
    return "fused" if logits_proof(make(name)).fused else "through logits"


def table(names):
    notes, lines = [], []
    lines.append("| family | " + " | ".join([*COLUMNS, "head"]) + " |")
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for name in names:
        entries = []
        for column in COLUMNS:
            entry = cell(name, column)
            if entry not in ("yes", "no experts"):
                notes += [entry] if entry not in notes else []
                entry = f"refused ({notes.index(entry) + 1})"
            entries.append("" if entry == "no experts" else entry)
        lines.append(f"| {type(make(name)).__name__} | " + " | ".join([*entries, head(name)]) + " |")
        print(lines[-1], flush=True)
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return "\n".join([f"Run with {versions}:", "", *lines, *(f"\n({i + 1}) {note}" for i, note in enumerate(notes))])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = (*NAMES, *FAMILIES, *MORE)
    parser.add_argument("names", nargs="*", help=f"only these, and only printed: {', '.join(every)}")
    names = parser.parse_args().names
    assert not dist.is_initialized()
    try:
        found = table(names or every)
    finally:
        close_pools()
    if names:
        return
    text = DOCS.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCS.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
