"""Writes the table of docs/fused_loss_table.md: each causal model of the installed transformers under `use_fused_loss`.

Each is built tiny, and its loss and gradients are compared with those of the same model without it.

    python -m tests.dtensor.fused_loss_table [--resume FILE] [CLASSES...]
"""

import argparse
import copy
import inspect
import json
import multiprocessing
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from megatron_ext.dtensor import use_fused_loss
from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.decisions import not_fusable
from megatron_ext.dtensor.output.fused_loss import proofs_of
from tests.dtensor.tiny_models import batch, tiny

PAGE = Path(__file__).parents[2] / "docs" / "fused_loss_table.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
TIME_S = 120


def run(model):
    torch.manual_seed(7)
    loss = model(**batch(model)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def entry(name):
    """Verdict on `use_fused_loss` for the class `name`, and the reason."""
    kind = getattr(transformers, name)
    try:
        model = tiny(kind)
    except Exception as fault:
        takes_labels = "labels" in inspect.signature(kind.forward).parameters
        return "not built small", str(fault) if takes_labels else "its forward takes no labels, and makes no loss"
    stock = copy.deepcopy(model)
    try:
        expected, true = run(stock)
    except RuntimeError as fault:
        return "not built small", f"transformers itself raises in backward: {str(fault)[:80]}"
    try:
        use_fused_loss(model)
    except ValueError as fault:
        return "refused", str(fault)
    loss, found = run(model)
    proof = next(reversed(proofs_of(model)), None)
    assert torch.isfinite(expected)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == true.keys()
    largest = max(x.norm().item() for x in true.values())
    for parameter, gradient in true.items():
        difference = (found[parameter] - gradient).norm().item()
        assert difference <= 1e-4 * max(gradient.norm().item(), 1e-3 * largest), (parameter, difference)
    if proof is not None and proof.fused:
        return "fused", str(proof)
    path = output_head_path(model)
    head = model.get_submodule(path)
    return "its own loss", proof.reason if proof is not None else not_fusable(model, path, head) or "no proof was made"


def _in_process(name, queue):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        queue.put(entry(name))
    except BaseException as fault:
        said = str(fault).strip().splitlines()
        queue.put(("WRONG", f"{type(fault).__name__}: {' '.join(said[:3])[:200]}"))


def guarded(name):
    """`entry(name)` in a process of its own, which may not end."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_process, args=(name, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=TIME_S)
    except Exception:
        return "not built small", f"took more than {TIME_S} s, or its process ended"
    finally:
        process.kill()
        process.join()


def _mapped(names):
    found = [each for name in names.values() for each in ((name,) if isinstance(name, str) else name)]
    return {name for name in found if hasattr(transformers, name)}


CAUSAL = _mapped(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def names():
    return sorted(CAUSAL | _mapped(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))


def made_table(page, description, row, text_of):
    """Rows by name, `row(name)` of each class that the command names, or of all: then `page` gets `text_of(rows)`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="only these, and only printed")
    parser.add_argument("--resume", type=Path, help="a file of rows as JSON: kept as they are made, and not made again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    resumed = given.resume is not None and given.resume.exists()
    known, rows = dict(map(json.loads, given.resume.read_text().splitlines())) if resumed else {}, {}
    for name in given.classes or names():
        rows[name] = known[name] if name in known else row(name)
        print(name, rows[name], flush=True)
        if given.resume is not None and name not in known:
            with given.resume.open("a") as file:
                print(json.dumps([name, rows[name]]), file=file)
    if not given.classes:
        before, after = page.read_text().partition(BEGIN)[0], page.read_text().partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{text_of(rows)}\n{END}{after}")
    return rows


def text_of(rows):
    counts = Counter(kind for kind, _ in rows.values())
    lines = [f"| {name} | {kind} | {why.replace('|', '/')} |" for name, (kind, why) in rows.items()]
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    version = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    first = f"With {version}: {len(rows)} classes, {sum(name in CAUSAL for name in rows)} of them causal: {total}."
    return "\n".join([first, "", "| class | loss | proof, or reason |", "|---|---|---|", *lines])


def main():
    rows = made_table(PAGE, __doc__, guarded, text_of)
    return int(any(kind == "WRONG" for kind, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
