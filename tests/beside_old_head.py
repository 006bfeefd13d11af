"""Runs random cases of the head of this commit and of an earlier one, and compares results and gradients bit by bit.

`python tests/beside_old_head.py --cases 20000 --ranks 1`: both packages, of which the earlier one is taken from a
worktree of its commit, run the cases that `tests/fuzz` of this commit draws, in processes of their own. Every tensor's
bytes are hashed, and the hashes are compared; those of the inputs too, so that both packages have had the same ones.
"""

import argparse
import collections
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parents[1]
STUCK_S = 60  # a case takes milliseconds
# Numbers of rows, columns, elements or bytes that both packages work on at a time on a CPU, for `--small-blocks`.
SMALL = {"CPU_ROWS": 8, "_CPU_ROWS": 8, "_SCALED": 64, "_FEW": 16, "_CPU_BLOCK": 64, "_CHUNK": 1024, "_CPU_CHUNK": 256}
SMALL |= {"_CPU_CHUNK_ROWS": 4, "_CPU_KEPT_CHUNK": 512, "_CPU_BLOCK_BYTES": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="42662e5d^", help="the earlier package's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--as-they-are", action="store_true", help="put no known change back")
    parser.add_argument("--small-blocks", action="store_true", help="take a few rows and columns at a time")
    parser.add_argument("--shown", type=int, default=20, help="differences that are printed (default: 20)")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)  # of a process of its own: name, rank, folder
    options = parser.parse_args()
    if options.work:
        work(options, options.work[0], int(options.work[1]), Path(options.work[2]))
        return
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), options.commit], check=True)
        try:
            with ThreadPoolExecutor() as pool:
                both = (("old", tree), ("new", HERE))
                found = [*pool.map(lambda each: run(options, *each, Path(folder)), both)]
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    compare(options, *found)
    print(f"{time.monotonic() - begun:.0f} s")


def run(options: argparse.Namespace, name: str, package: Path, folder: Path) -> list[dict[int, dict]]:
    """The records of each rank's cases, by their number. Where a case ends the ranks, they go on behind it."""
    path = folder / name
    path.mkdir()
    for part, root in (("tests", HERE), ("benchmarks", HERE), ("megatron_ext", package), ("megatron_on_cpu", package)):
        (path / part).symlink_to(root / part)
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    records: list[dict[int, dict]] = [{} for _ in range(options.ranks)]
    first, last = options.first, options.first + options.cases
    while first < last:
        common = ["--seed", options.seed, "--first", first, "--cases", last - first, "--ranks", options.ranks]
        common += ["--as-they-are"] * options.as_they_are + ["--small-blocks"] * options.small_blocks
        started = []
        for rank in range(options.ranks):
            command = [sys.executable, path / "tests" / Path(__file__).name, *common, "--work", name, rank, path]
            started.append(subprocess.Popen([*map(str, command)], cwd=path, env=environment))
        for process in started:
            process.wait()
        for rank, of_rank in enumerate(records):
            lines = (path / f"rank{rank}").read_text().splitlines()
            of_rank.update((one["number"], one) for one in map(json.loads, lines))
        first = 1 + max(first, *(max(of_rank, default=first) for of_rank in records))
        (path / "store").unlink(missing_ok=True)
    return records


def work(options: argparse.Namespace, name: str, rank: int, folder: Path) -> None:
    """Run cases of one rank, and write a line of each."""
    import torch
    import torch.distributed as dist

    import megatron_ext

    assert folder in Path(megatron_ext.__file__).parents, megatron_ext.__file__
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    kinds = kinds_of()
    for module in [one for path, one in sys.modules.items() if options.small_blocks and "megatron_ext.head." in path]:
        vars(module).update((name, size) for name, size in SMALL.items() if name in vars(module))
    if not options.as_they_are:
        put_back(name)
    with open(folder / f"rank{rank}", "w") as out:
        for number in range(options.first, options.first + options.cases):
            watch = threading.Timer(STUCK_S, os._exit, [1])
            watch.daemon = True
            watch.start()
            out.write(json.dumps({"number": number, **record(options, kinds, number, rank)}) + "\n")
            out.flush()
            watch.cancel()
    dist.destroy_process_group()


def kinds_of() -> list:
    """Return the functions that draw a case, each as often as it shall be taken."""
    from tests.fuzz import cross_entropy, distillation, heads, losses, model_utils, same_bits, sharded_vocabulary

    side = heads._side
    heads._side = lambda *given: side(*given[:-1], True)  # softcaps in every dtype: no truth is asked
    kinds = [cross_entropy.from_hidden] * 4 + [heads.read] * 4 + [cross_entropy.from_logits, heads.read_logits] * 2
    kinds += [heads.draft, same_bits.read, same_bits.read, distillation.of_students, losses.of_policies]
    kinds += [model_utils.from_logits, model_utils.from_hidden, model_utils.at_ids, sharded_vocabulary.over_vocabulary]
    return kinds


def put_back(name: str) -> None:
    """Take the changes that are known out of the way, in the package that they can be taken out of with least.

    In the new one: rows of up to 256 numbers are summed in fp64 at the end again (72a9de09 sums them in their own
    dtype); losses are reduced after the head has read them (0ad7c6e1 weighs them in it, so that forward can make the
    gradient of a mean or a sum); a transform of logits leaves them in the memory order that they have, and so does
    their gradient (6db7bc2f, 632e2419: on a CPU the bits of tanh and exp depend on an element's place).

    In the old one: products and sums of fixed bits are the new one's (6db7bc2f pads products to 16 and gives sums over
    tokens one order, a9dd57ce those over columns, of which biases and offsets have theirs); with them a main_grad is
    added to a sum instead of beginning it (2c6dac85); both halves of a Jensen-Shannon divergence are one sum, and the
    derivative of an acceptance rate is negative, which tells in the sign of a 0 (1fb44fa3); and the shards of a kept
    entropy are joined as those of a divergence's side (5503ce33).
    """
    import torch

    import megatron_ext.numerics as numerics

    if name == "new":
        from megatron_ext.head import cross_entropy
        from megatron_ext.head.engine import chunk_logits, stored_logits
        from megatron_ext.numerics import tensors

        tensors._SHORT = -1
        cross_entropy.token_weights = lambda *given: None
        chunk_logits.new_matrix = lambda z_tV, tokens, columns, dtype: z_tV.to(dtype, copy=True)
        stored_logits.new_gradient = lambda z: (
            torch.empty_like(z) if z.dim() == 2 else z.new_empty(z.shape[:-1].numel(), z.shape[-1])
        )
        return
    from megatron_ext.head.fixed_bits import gradient, leaves, linear
    from megatron_ext.head.readouts.divergences.jensen_shannon import JensenShannon
    from megatron_ext.head.readouts.divergences.total_variation import AcceptanceRate, _side

    from megatron_ext.head.engine import linear_passes
    from megatron_ext.head.engine.chunked import ways
    from megatron_ext.head.readouts.kept import KeptEntropy
    from megatron_ext.numerics import fixed_order, matrices, readable_values

    numerics.tensors = types.ModuleType("megatron_ext.numerics.tensors")
    vars(numerics.tensors).update(vars(readable_values) | vars(matrices))
    sys.modules["megatron_ext.numerics.tensors"] = numerics.tensors
    source = HERE / "megatron_ext" / "numerics" / "fixed_order.py"
    exec(compile(source.read_text(), str(source), "exec"), vars(fixed_order))
    fixed_order.product = lambda g_TV, w_VD, before_TD=None: fixed_order.add_product(before_TD, g_TV, w_VD)

    def add_db(self: Any, total_V: Any, rows: slice, at: int, block: slice, g_tV: Any) -> None:
        fixed_order.add_column_sums(total_V[self._rows_of(at, block)], g_tV, self._grads[at].scale[rows])

    def add_labels(self: Any, total_VD: Any, x_TD: Any, made: Any = gradient.Gradient.add_labels) -> None:
        with mock.patch.object(linear_passes, "weighed_sum", fixed_order.weighed_sum):
            made(self, total_VD, x_TD)

    def summed(self: Any, student: Any, teacher: Any) -> tuple[Any, Any]:
        sides, mixture = ((student, 1 - self.beta), (teacher, self.beta)), self._mixture(student, teacher)
        first, second = ((x.exp() * (share * (x - mixture))).where(x.exp() > 0, 0.0) for x, share in sides)
        return first, first + second

    gradient.Gradient.add_db, gradient.Gradient.add_labels = add_db, add_labels
    gradient.total_of = ways.total_of = lambda columns, weight, dtype, fused=None: leaves.total_of(
        columns, weight, dtype
    )
    linear.of_shard = ways.of_shard = lambda total, weight, fused=None, begun=False: leaves.of_shard(
        total, weight, fused, begun=False
    )
    KeptEntropy.value = lambda self, own_RT, sums_RT, of: (
        of.log_sum_T - self.added((of.below_RT - of.log_sum_T).exp() * (own_RT + sums_RT * of.below_RT))
    )
    JensenShannon.summed, JensenShannon.value = summed, lambda self, first_T, second_T: second_T
    JensenShannon.pulled = lambda self, student, teacher, first_t1: (
        (1 - self.beta) * (student - self._mixture(student, teacher)) - first_t1
    )
    AcceptanceRate.summed = lambda self, student, teacher: (
        student.exp() * -_side(student, teacher),
        student.minimum(teacher).exp(),
    )
    AcceptanceRate.pulled = lambda self, student, teacher, first_t1: -_side(student, teacher) - first_t1


def record(options: argparse.Namespace, kinds: list, number: int, rank: int) -> dict[str, Any]:
    """Hashes of a case's inputs, results and gradients by name, or what it raised; and what was drawn."""
    import torch

    from tests.fuzz import cross_entropy, same_bits
    from tests.fuzz.case import whole
    from tests.fuzz.draw import DTYPES, Draw

    class AnyDtype(Draw):
        """Draws every dtype for cases that ask for those alone in which results can be compared with a truth."""

        def dtype(self, *among: torch.dtype) -> torch.dtype:
            return self.one_of("dtype", *DTYPES)

    draw = AnyDtype(options.seed, number, options.ranks)
    kind = draw.random.choice(kinds)
    found: dict[str, str] = {}
    told = {"kind": f"{kind.__module__.split('.')[-1]}.{kind.__name__}", "hashes": found}
    arranged: list = []
    read = same_bits._Problem.read
    same_bits._Problem.read = lambda self, way: arranged.append(read(self, way)) or arranged[-1]
    try:
        case = kind(draw)
        wanted = case.wanted or [True] * len(case.inputs)
        mine = [
            cut(x, rank).detach().clone(memory_format=torch.preserve_format).requires_grad_(want)
            for (x, cut), want in zip(case.inputs, wanted, strict=True)
        ]
        found |= {f"input {i}": hashed(x) for i, x in enumerate(mine)}
        results = list(case.ours(mine, rank))
        found |= {f"result {i}": hashed(x) for i, x in enumerate(results)}
        cuts = case.outputs or [whole] * len(results)
        flows = [(i, g) for i, g in enumerate(case.upstream) if g is not None and results[i].requires_grad]
        if flows:
            upstream = [case.share * cuts[i](g, rank).to(results[i].dtype) for i, g in flows]
            torch.autograd.backward([results[i] for i, _ in flows], upstream)
        if case.finish is not None:
            case.finish()
        found |= {f"gradient {i}": hashed(case.gradient_of(x)) for i, x in enumerate(mine) if x.requires_grad}
    except Exception as error:
        told["raised"] = f"{type(error).__name__}: {error}"[:600]
    finally:
        same_bits._Problem.read = read
    for at, (values, grads) in enumerate(arranged):
        found |= {f"arrangement {at} result {i}": hashed(x) for i, x in enumerate(values)}
        found |= {f"arrangement {at} gradient of {name}": hashed(x) for name, x in grads.items()}
    drawn, words = draw.record, [*draw.record.get("read-outs", ()), draw.record.get("divergence")]
    known = {
        "fixed bits": drawn.get("bits", "fast") != "fast" or drawn.get("mode") is True,
        "mean or sum of losses": kind is cross_entropy.from_hidden and drawn.get("reduction", "none") != "none",
        "Jensen-Shannon": "JS" in words or "jsd" in words,
        "kept entropy": "kept entropy" in words,
    }
    told["known"] = [name for name, there in known.items() if there]
    told["drawn"] = f"{draw.record}, exact={draw.exact}"
    return told


def hashed(x: Any) -> str:
    import torch

    if x is None:
        return "none"
    whole = x.detach().flatten().clone(memory_format=torch.contiguous_format)  # of one number a stride may be any
    numbers = hashlib.sha1(whole.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{x.dtype} {tuple(x.shape)} {numbers}"


def compare(options: argparse.Namespace, old: list[dict[int, dict]], new: list[dict[int, dict]]) -> None:
    """Print how many cases are equal on all ranks, how many both packages refuse, and those that differ."""
    counts: collections.Counter = collections.Counter()
    shown: collections.Counter = collections.Counter()
    refusals: collections.Counter = collections.Counter()
    for number in range(options.first, options.first + options.cases):
        sides = [(one.get(number, {}), other.get(number, {})) for one, other in zip(old, new, strict=True)]
        kind = sides[0][1].get("kind", "none")
        names = sorted({name for one, other in sides for name in differences(one, other)})
        refused = all("raised" in each for pair in sides for each in pair)
        outcome = "differ" if names else "refused by both" if refused else "equal"
        counts[outcome] += 1
        counts[f"{kind}: {outcome}"] += 1
        counts.update(f"with {name}: {outcome}" for name in sides[0][1].get("known", ()))
        if outcome == "refused by both":
            refusals[" | ".join(each["raised"][:70] for each in sides[0])] += 1
        if names:
            shown[f"{kind} {names}"] += 1
        if names and shown[f"{kind} {names}"] <= 2 and shown.total() <= options.shown:
            print(f"{number} {kind}: {names}\n  {sides[0][1].get('drawn')}")
            for name, each in zip(("old", "new"), sides[0], strict=True):
                print(f"  {name}: {each.get('raised')}")
    print(dict(sorted(counts.items())))
    print("\n".join(f"{n} {what}" for what, n in [*shown.most_common(), *refusals.most_common()]))


def differences(one: dict, other: dict) -> list[str]:
    if not one or not other:
        return ["no record"]
    if "raised" in one or "raised" in other:
        kinds = [each.get("raised", "nothing").split(":")[0] for each in (one, other)]
        return [] if kinds[0] == kinds[1] else [f"raised {' and '.join(kinds)}"]
    names = one["hashes"].keys() | other["hashes"].keys()
    return [name for name in names if one["hashes"].get(name) != other["hashes"].get(name)]


if __name__ == "__main__":
    main()
