"""Stock Megatron against ours in every configuration: `python -m tests.megatron.matrix`, on the Megatron it imports.

Tiny models, two ranks, fp32, 20 steps of Adam. One pair of processes runs one configuration after the other; one in
which a rank fails is ended and replaced. Where stock itself does not run, its reason is kept. What was found goes to
docs/megatron_matrix.json, and as a table into docs/megatron.md. Where Python finds Transformer Engine, stock is
Megatron on its layers, there are some rows more, and files and page are those of docs/transformer_engine.md.

    python -m tests.megatron.matrix                                   # all configurations, each in all ways
    python -m tests.megatron.matrix --only hybrid-fsdp2 gpt-tp2       # those whose name contains one of these
    python -m tests.megatron.matrix --commit 0f3c2a1                  # where the sources are no git clone
"""

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import gpt
from tests.gpt import (
    data_parallel,
    fully_sharded,
    make_optimizer,
    model_parallel,
    ours_everywhere,
    seed_ranks,
    stock_spec,
    tiny_batches,
    tiny_gpt,
    train_step,
)
from tests.megatron.language_models import engine_hybrid_spec, tiny_hybrid_chunks
from tests.megatron.patching import counting_logits, patched
from tests.on_transformer_engine.models import our_spec, te_spec
from tests.pages import DOCS
from tests.ranks import _Pool, prepare_process

STEPS = 20
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
LIMIT = 1e-6
# Every rank then emulates what Transformer Engine's Python code needs (tests/rank_servers.py).
WITH_ENGINE = importlib.util.find_spec("transformer_engine") is not None
OURS = ("patch", "spec", "substitution", "all")
# "local" is Megatron on its own layers instead: it shows that the emulation's numbers are right.
WAYS: tuple[str, ...] = ("local", "all") if WITH_ENGINE else OURS
EXPERTS = gpt.EXPERTS | {"moe_router_load_balancing_type": "none"}
# name: sizes of Megatron's groups, settings of the config
LAYOUTS: dict[str, tuple[dict, dict]] = {
    "tp1": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sp": ({"tp": 2}, {"sequence_parallel": True}),
    "pp2": ({"pp": 2}, {}),
    "pp2-virtual": ({"pp": 2, "vp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "ep2": ({"ep": 2}, EXPERTS),
    "fsdp2": ({}, {"transformer_impl": "local"}),
    "megatron-fsdp": ({}, {}),
}
# Of GPT models on Transformer Engine alone. Names in these settings' third part are its own, unknown to local layers.
FUSED_EXPERTS = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True}
FUSED = {
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
    "gradient_accumulation_fusion": True,
    "use_te_rng_tracker": True,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
}
ENGINE_LAYOUTS: dict[str, tuple[dict, dict, dict]] = {
    "tp2-sp-fusions": ({"tp": 2}, {"sequence_parallel": True}, FUSED),
    "ep2-fusions": ({"ep": 2}, EXPERTS, FUSED_EXPERTS),
    "mla-tp2": ({"tp": 2}, LATENT, {}),
    "mla-ep2": ({"ep": 2}, EXPERTS | LATENT, FUSED_EXPERTS),
}


@dataclass(frozen=True)
class Configuration:
    model: str  # "gpt" or "hybrid"
    layout: str
    tied: bool
    mtp: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}-{'tied' if self.tied else 'untied'}-mtp{self.mtp}"

    @property
    def sizes(self) -> dict:
        """Sizes of Megatron's groups."""
        return (LAYOUTS.get(self.layout) or ENGINE_LAYOUTS[self.layout])[0]

    def settings(self, engine: bool) -> dict:
        """Return the config's settings, for Transformer Engine's layers or for others."""
        more = {"mtp_num_layers": 1} if self.mtp else {}
        if self.layout in LAYOUTS:
            return LAYOUTS[self.layout][1] | more | ({"transformer_impl": "transformer_engine"} if engine else {})
        _, settings, engines = ENGINE_LAYOUTS[self.layout]
        return settings | more | (engines if engine else {})


CONFIGURATIONS = [
    Configuration(model, layout, tied, mtp)
    for model in ("gpt", "hybrid")
    for layout in (*LAYOUTS, *(ENGINE_LAYOUTS if WITH_ENGINE and model == "gpt" else ()))
    for tied in (True, False)
    for mtp in (0, 1)
]


def build(one: Configuration, way: str) -> list:
    """This rank's chunks of the model, with the layers of the way."""
    ours = way == "spec" or (way == "all" and why_no_spec(one) is None)
    engine = WITH_ENGINE and way != "local"
    settings = one.settings(engine)
    if ours and one.layout == "fsdp2":
        settings["transformer_impl"] = "local"  # else Megatron wraps our linear layers inside of its layers
    our_attention = one.layout == "cp2" and not engine
    if one.model == "gpt":
        spec = te_spec if engine else with_our_attention if our_attention else stock_spec
        if ours:
            spec = partial(our_spec, transformer_engine=WITH_ENGINE)
        layers = {"pp2": 2, "pp2-virtual": 4}.get(one.layout, 1)
        return tiny_gpt(spec, tied=one.tied, num_layers=layers, engine=engine, **settings)
    if engine and not ours:
        return tiny_hybrid_chunks(tied=one.tied, change_spec=lambda spec: engine_hybrid_spec(), **settings)
    return tiny_hybrid_chunks(ours=ours, tied=one.tied, our_attention=our_attention, **settings)


def why_no_spec(one: Configuration) -> str | None:
    """Return why our layer spec does not serve this Megatron's model, or None; "all" is then the other two ways."""
    from megatron_ext.megatron import versions

    if one.layout.startswith("mla"):
        return "it has no multi-latent attention"
    return versions.why_no_spec("spec" if one.model == "gpt" else "hybrid spec")


def why_not_local(one: Configuration) -> str | None:
    """Return why Megatron's local layers cannot be built as the configuration has them, or None."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if one.layout.startswith("mla") and "k_channels" not in inspect.signature(DotProductAttention.__init__).parameters:
        return "its local attention takes heads of one size"
    return None


def with_our_attention(config, vp_stage=None):
    """Megatron's layers under context parallelism, which its own attention refuses without Transformer Engine."""
    from megatron_ext.megatron.attention import CoreAttention

    layer = stock_spec(config, vp_stage)
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return layer


def shard(one: Configuration, chunks: list) -> tuple[list, bool]:
    """`chunks` in the data parallelism of the layout, and whether the optimizer is the distributed one."""
    if one.layout == "fsdp2":
        # A tied weight is used outside its module: resharded by then, as is the default, it stops stock Megatron.
        return fully_sharded(chunks, "torch", reshard_after_forward=not one.tied), False
    if one.layout == "megatron-fsdp":
        return fully_sharded(chunks, "megatron"), True
    return data_parallel(chunks), True


def train(one: Configuration, way: str, steps: int) -> tuple[list[float], int, int]:
    """The loss of every step; and over all ranks, how many losses were fused, and how often logits were made."""
    from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report

    with ExitStack() as undo:
        if way in ("substitution", "all"):
            undo.enter_context(ours_everywhere())
        if way in ("patch", "all"):
            undo.enter_context(patched(chunk_size=5))
        reset_fusion_report()
        chunks = build(one, way)
        layers = [chunk.output_layer for chunk in chunks if getattr(chunk, "output_layer", None) is not None]
        made = [undo.enter_context(counting_logits(layer)) for layer in layers]
        seed_ranks()
        chunks, distributed = shard(one, chunks)
        optimizer = make_optimizer(chunks, use_distributed_optimizer=distributed)
        micro_batch = 2 if one.layout.startswith("pp2") else 4  # elsewhere one a step, to be quick
        batches = tiny_batches(steps)
        losses = [train_step(chunks, optimizer, tokens_BS, micro_batch=micro_batch)[0] for tokens_BS in batches]
        counts = torch.tensor([fusion_report().losses_fused, sum(map(len, made))])
    dist.all_reduce(counts)
    return losses, int(counts[0]), int(counts[1])


class measure:  # what the pool calls, as it calls a test
    @staticmethod
    def body(one: Configuration, way: str, steps: int, results: str) -> None:
        import warnings

        warnings.simplefilter("ignore")
        with model_parallel(**one.sizes):
            losses, fused, made = train(one, way, steps)
        if dist.get_rank() == 0:
            Path(results).write_text(json.dumps({"losses": losses, "losses_fused": fused, "logits_made": made}))


def run_one(pools: list, one: Configuration, way: str, steps: int) -> dict:
    """Return the results of `measure`, or {"error": the last line of the first traceback there is}."""
    if not pools:
        pools.append(_Pool(2))
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        try:
            arguments = {"one": one, "way": way, "steps": steps, "results": str(results)}
            pools[0].run(__name__, "measure", arguments)
        except pytest.fail.Exception as failure:
            pools.clear()
            return {"error": reason(str(failure))}
        return json.loads(results.read_text())


def reason(report: str) -> str:
    """The last line of the first rank's traceback in a pool's report; where no rank has one, which were silent."""
    silent, *tracebacks = report.split("--- rank ")
    said = tracebacks[0] if tracebacks else silent
    last = [line for line in said.splitlines() if line.strip()][-1]
    return re.sub(r"/\S+/", "", last)[:300]  # without the folders of this machine


def compare(pools: list, one: Configuration, ways=WAYS, steps: int = STEPS) -> dict:
    """{"stock": None or the reason why it does not run, way: what was found}.

    Of a way: {"worst", "losses_fused", "logits_made"}, {"error"}, or {"refused"} where the package says in advance that
    it does not serve this Megatron.
    """
    stock = run_one(pools, one, "stock", steps)
    found: dict = {"stock": stock.get("error")}
    if "error" in stock:
        return found
    for way in ways:
        refused = {"spec": why_no_spec, "local": why_not_local}.get(way, lambda one: None)(one)
        if refused:
            found[way] = {"refused": refused}
            continue
        ours = run_one(pools, one, way, steps)
        if "losses" in ours:
            pairs = zip(ours.pop("losses"), stock["losses"], strict=True)
            ours["worst"] = max(abs(a - b) / abs(b) for a, b in pairs)
        found[way] = ours
    return found


def passed(way: str, result: dict) -> bool:
    """The losses are stock's; where the head was asked for, it computed them, and no logits were made."""
    if not result.get("worst", math.inf) <= LIMIT:
        return False
    return way not in ("patch", "all") or (result["losses_fused"] > 0 and result["logits_made"] == 0)


@dataclass(frozen=True)
class Results:
    """Results kept in docs/`page`_matrix.json, and shown in docs/`page`.md."""

    page: str

    def keep(self, version: str, commit: str, name: str, found: dict) -> None:
        """Add what was found in one configuration; results of another commit of the same version are dropped."""
        kept = self._kept()
        if kept.get(version, {}).get("commit") != commit:
            kept[version] = {"commit": commit, "found": {}}
        before = kept[version]["found"].get(name, {})
        kept[version]["found"][name] = found if found["stock"] else before | found
        self._file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

    def is_kept(self, version: str, commit: str, name: str, way: str) -> bool:
        kept = self._kept().get(version, {"commit": None})
        found = kept["found"].get(name, {}) if kept["commit"] == commit else {}
        return way in found or bool(found.get("stock"))

    def write(self, passed: Callable[[str, dict], bool], names: list[str], ways: tuple[str, ...]) -> None:
        """Put the table of all that is kept between the marks of the page."""
        page = DOCS / f"{self.page}.md"
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{table(self._kept(), passed, names, ways)}{END}{after}")

    @property
    def _file(self) -> Path:
        return DOCS / f"{self.page}_matrix.json"

    def _kept(self) -> dict:
        return json.loads(self._file.read_text()) if self._file.exists() else {}


def table(kept: dict, passed: Callable[[str, dict], bool], names: list[str], ways: tuple[str, ...]) -> str:
    """A row for each model and layout, a column for each version; a cell counts over tied, untied, MTP and ways."""
    versions = sorted(kept, key=lambda version: [int(part) for part in version.split(".")[:2]])
    rows = list(dict.fromkeys(name.rsplit("-", 2)[0] for name in names))
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{v} ({kept[v]['commit']})" for v in versions) + " |",
        "|---" * (len(versions) + 1) + "|",
    ]
    for row in rows:
        cells = []
        for version in versions:
            found = kept[version]["found"]
            these = {name: found.get(name) for name in names if name.rsplit("-", 2)[0] == row}
            cells.append(_cell(these, passed, ways, notes))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    footnotes = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([*lines, "", *footnotes, ""] if footnotes else [*lines, ""])


def _cell(found: dict, passed: Callable[[str, dict], bool], ways: tuple[str, ...], notes: list[str]) -> str:
    if not any(found.values()):
        return "not run"
    asked = good = left = 0
    said: dict[str, list[str]] = {}
    for name, one in sorted(found.items()):
        which = " ".join(name.rsplit("-", 2)[1:])
        if one is not None and one["stock"]:
            said.setdefault(f"stock does not run: `{one['stock']}`", []).append(which)
            continue
        for way in ways:
            result = one.get(way) if one is not None else None
            if result is None:
                left += 1
            elif "refused" in result:
                said.setdefault(f"no {way} here: {result['refused']}", []).append(which)
            else:
                asked += 1
                good += passed(way, result)
                if not passed(way, result):
                    why = f"`{result['error']}`" if "error" in result else f"{result}"
                    said.setdefault(f"{way}: {why}", []).append(which)
    for text in said:
        if text not in notes:
            notes.append(text)
    counted = [f"{good} of {asked}"] if asked else []
    counted += [f"{left} not run"] if left else []
    marks = ", ".join(f"{notes.index(text) + 1} ({', '.join(which)})" for text, which in said.items())
    return (", ".join(counted) or "none") + (f"; note {marks}" if marks else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="configurations whose name contains it")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=("local", *OURS))
    parser.add_argument("--steps", type=int, default=STEPS, help="with fewer than 20 nothing is kept")
    parser.add_argument("--missing", action="store_true", help="only what is not kept yet")
    parser.add_argument("--commit", help="the commit of Megatron's sources; default: that of their clone, or PyPI")
    options = parser.parse_args(argv)
    prepare_process()
    results = Results("megatron")
    if WITH_ENGINE:
        import tests.on_transformer_engine.preload  # noqa: F401  without it Megatron cannot be imported

        results = Results("transformer_engine")
    import megatron.core

    version = megatron.core.__version__.partition("+")[0]  # it adds the commit of the repository that it lies in
    if WITH_ENGINE:
        version += f", Transformer Engine {importlib.metadata.version('transformer_engine')}"
    source = Path(megatron.core.__file__).parents[2]
    git = subprocess.run(["git", "-C", source, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    from_pypi = "site-packages" in source.parts
    commit = options.commit or ("PyPI" if from_pypi else git.stdout.strip() if git.returncode == 0 else "unknown")
    pools: list = []
    failed = 0
    for one in CONFIGURATIONS:
        if not any(text in one.name for text in options.only):
            continue
        ways = [
            way for way in options.ways if not (options.missing and results.is_kept(version, commit, one.name, way))
        ]
        if not ways:
            continue
        started = time.monotonic()
        found = compare(pools, one, ways, options.steps)
        bad = {
            way: result
            for way, result in found.items()
            if way != "stock" and "refused" not in result and not passed(way, result)
        }
        failed += bool(bad)
        state = f"stock does not run: {found['stock']}" if found["stock"] else f"not as stock: {bad}" if bad else "ok"
        print(f"{one.name}: {state} ({time.monotonic() - started:.0f} s)", flush=True)
        if options.steps == STEPS:
            results.keep(version, commit, one.name, found)
            results.write(passed, [one.name for one in CONFIGURATIONS], WAYS)
    while pools:
        pools.pop().kill()
    return 1 if failed else 0


if __name__ == "__main__":
    from tests.megatron import matrix  # by its own name, for the processes that run it

    sys.exit(matrix.main())
