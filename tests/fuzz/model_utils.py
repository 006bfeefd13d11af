"""Cases of functions with NeMo-RL's names, on ranks that share the vocabulary, the sequence, or both.

Legend: B sequences, S tokens of each, P positions of each with padding at the end, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import model_utils, reference
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens
from tests.fuzz.case import Case
from tests.fuzz.cross_entropy import as_list, results_dtype
from tests.fuzz.draw import Draw
from tests.fuzz.sequence import cumulative, packing
from tests.model_utils.sharded import Grid, grid

# How much of the gradient each context-parallel rank's loss brings: powers of two, which add up to 1.
SHARES = {1: (1.0,), 2: (0.25, 0.75), 3: (0.5, 0.25, 0.25), 4: (0.5, 0.25, 0.125, 0.125)}


@dataclass
class Problem:
    """Sequences side by side, or documents in a pack, over a grid of ranks.

    Attributes:
        tokens: `[B, S]`, unshifted, as the functions take them.
        positions: P, the positions that the context-parallel ranks share: S and padding.
        rows: function from `[B, P]`, a number for each position's next token, to the functions' result.
        call: arguments that describe a pack beside its tokens.
        joins: the number of exchanges of results over the context-parallel ranks, and of their gradients in backward.
    """

    grid: Grid
    tokens: Tensor
    positions: int
    parts: SequenceParts
    rows: Callable[[Tensor], Tensor]
    labels: Tensor
    call: dict[str, Any]
    joins: int


def _grid_of(draw: Draw) -> Grid:
    return grid(draw.one_of("tp", *(n for n in range(1, draw.ranks + 1) if draw.ranks % n == 0)))


def _marked(draw: Draw, tokens: Tensor) -> Tensor:
    """Replace some tokens by -1 or -100, which stand for no token."""
    none = torch.rand(tokens.shape, generator=draw.generator) < draw.one_of("no token", 0.0, 0.0, 0.3)
    return tokens.masked_fill(none, draw.random.choice([-1, -100]))


def _labels(tokens: Tensor, *bounds: Tensor) -> Tensor:
    labels = next_tokens(tokens, *bounds)
    return labels.masked_fill(labels == -1, -100)


def _padded(draw: Draw, grid: Grid, vocabulary: int, slices: int) -> Problem:
    batch, length = draw.integer(1, 3), draw.integer(1, 9)
    multiple = (2 * grid.cp if grid.cp > 1 else 1) * slices
    positions = (-(-length // multiple) + draw.random.choice([0, 0, 1, 3])) * multiple
    tokens = _marked(draw, torch.randint(vocabulary, (batch, length), generator=draw.generator))
    draw.record |= {"batch": batch, "length": length, "positions": positions}
    labels = F.pad(_labels(tokens), (0, positions - length), value=-100)
    unit = grid.cp * math.lcm(2, grid.tp if slices > 1 else 1)
    joins = 2 if positions > -(-length // unit) * unit else 1  # what is padded further follows
    return Problem(
        grid,
        tokens,
        positions,
        SequenceParts(grid.cp_group),
        lambda x: x[:, : length - 1],
        labels,
        {},
        joins if grid.cp > 1 else 0,
    )


def _packed(draw: Draw, grid: Grid, vocabulary: int, slices: int) -> Problem:
    pack = packing(draw, (2 * grid.cp if grid.cp > 1 else 1) * slices)
    starts, ends = cumulative(pack.places), cumulative(pack.lengths)
    known = draw.one_of("lengths known", True, False)
    lengths = pack.lengths if known else pack.places
    longest = max(1, *lengths) + draw.integer(0, 2)
    if not known and draw.chance(0.4):
        longest = draw.integer(1, longest)  # rows end before what may be padding
    tokens = _marked(draw, torch.randint(vocabulary, (1, sum(pack.places)), generator=draw.generator))

    def rows(x: Tensor) -> Tensor:
        found = []
        for start, length in zip(starts.tolist(), lengths, strict=False):
            row = x[0, start : start + max(length - 1, 0)]
            found.append(F.pad(row, (0, longest - 1 - len(row))))
        return torch.stack(found)

    call = {"cu_seqlens_padded": starts.int(), "unpacked_seqlen": longest}
    call |= {"cu_seqlens": ends.int()} if known else {}
    labels = _labels(tokens, *([ends, starts] if known else [starts]))
    parts = SequenceParts(grid.cp_group, starts)
    return Problem(grid, tokens, sum(pack.places), parts, rows, labels, call, int(grid.cp > 1))


def _problem(draw: Draw, vocabulary: int, slices: int = 1) -> Problem:
    packed = draw.one_of("packed", False, True)
    return (_packed if packed else _padded)(draw, _grid_of(draw), vocabulary, slices)


def _sampling(draw: Draw) -> dict[str, Any]:
    return draw.options(top_k=(None, 1, 3, 100, -1, 0), top_p=(1.0, 0.9, 0.537))


def _log_probs(z: Tensor, labels: Tensor, sampling: dict[str, Any]) -> Tensor:
    top_k, top_p = sampling.get("top_k") or None, sampling.get("top_p", 1.0)
    found = reference.sampled_log_probs(z, labels, top_k, top_p if top_p < 1 else torch.inf)
    return found.where(found > -torch.inf, found.detach())  # a token that is not kept brings no gradient


def _shared(problem: Problem) -> dict[str, Any]:
    return {"share": SHARES[problem.grid.cp][problem.grid.cp_rank]}


def _sent(
    problem: Problem, sampling: dict[str, Any], chunk: int | None, head: tuple[int, int] = (1, 0), results: int = 1
) -> tuple[int, int]:
    """Return the collectives of forward and backward, of which `head` are over the vocabulary; top-p without top-k adds
    1 to forward, or with a chunk size 1 and 1 for each chunk."""
    forward, backward = head
    if sampling.get("top_k", -1) in (None, -1, 0) and sampling.get("top_p", 1.0) < 1:
        held = problem.positions // problem.grid.cp
        # Where a chunk size is asked for, there are two at least.
        forward += 1 if chunk is None else max(2, -(-held // chunk)) + 1
    shared, joined = problem.grid.tp > 1, results * problem.joins
    return forward * shared + joined, backward * shared + joined


def from_logits(draw: Draw) -> Case:
    """Draw a case of `from_parallel_logits_to_logprobs` or its form for packed sequences."""
    columns = draw.integer(1, 8)
    vocabulary = columns * draw.ranks  # divides by every tensor-parallel size
    problem, sampling = _problem(draw, vocabulary), _sampling(draw)
    grid, dtype = problem.grid, draw.dtype()
    z = draw.normal(problem.tokens.shape[0], problem.positions, vocabulary, dtype=dtype, size=2.0)
    z = draw.strided(draw.words(z, -1))
    options = draw.options(chunk_size=(None, 1, 3))
    packed, target = "cu_seqlens_padded" in problem.call, problem.tokens
    if packed and draw.chance(0.3):  # shifted before, and split as the logits are
        documents = target.split(problem.call["cu_seqlens_padded"].diff().tolist(), 1)
        target = problem.parts.split(torch.cat([document.roll(-1, 1) for document in documents], 1), 1)
        options["target_is_pre_rolled"] = draw.record["target_is_pre_rolled"] = True
    params = model_utils.TrainingSamplingParams(**sampling, temperature=0.7)  # the temperature is the caller's part
    given = params if sampling or draw.chance(0.5) else None

    def truth(z: Tensor) -> list[Tensor]:
        return [problem.rows(_log_probs(z, problem.labels, sampling))]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        name = "from_parallel_logits_to_logprobs" + ("_packed_sequences" if packed else "")
        return [
            getattr(model_utils, name)(
                mine[0],
                target,
                **grid.vocab(vocabulary),
                **{"group" if packed else "tp_group": grid.tp_group},
                cp_group=grid.cp_group,
                sampling_params=given,
                **problem.call,
                **options,
            )
        ]

    return Case(
        "logits to log-probabilities",
        [(z, lambda x, rank: grid.columns(problem.parts.split(x, 1)))],
        truth,
        ours,
        [draw.upstream(*truth(z.double())[0].shape)],
        logit_size=z.double().abs().max().item() if z.numel() else 0.0,
        value_dtype=results_dtype(dtype),
        grad_size=4.0,
        sent=_sent(problem, sampling, options.get("chunk_size")),
        **_shared(problem),
    )


def from_hidden(draw: Draw) -> Case:
    """Draw a case of `from_parallel_hidden_states_to_logprobs`, in 16 and 32 bits with integers, of exact logits."""
    vocabulary, width = draw.integer(1, 8) * draw.ranks, draw.integer(1, 8)
    layout = draw.one_of("layout", "sequence", "replicated")
    problem = _problem(draw, vocabulary, draw.ranks if layout == "sequence" else 1)
    grid = problem.grid
    entropy = draw.one_of("entropy", False, True)
    sampling = {} if entropy else _sampling(draw)
    dtype = draw.dtype(*([torch.float64, torch.float32, torch.bfloat16] if draw.exact else [torch.float64]))
    options = draw.options(chunk_size=(None, 1, 3))
    options |= {} if sampling else draw.options(cache=("bounded", 0, 1))
    temperature = draw.one_of("temperature", 1.0, 0.5, 2.0)
    hidden = draw.normal(problem.positions, problem.tokens.shape[0], width, dtype=dtype)
    weight = draw.words(draw.normal(vocabulary, width, dtype=dtype))

    def slices(x: Tensor, rank: int) -> Tensor:
        x = problem.parts.split(x, 0)
        return x.chunk(grid.tp)[grid.tp_rank] if layout == "sequence" else x

    def truth(x: Tensor, w: Tensor) -> list[Tensor]:
        z = reference.logits(x, w, temperature=temperature).transpose(0, 1)
        found = [problem.rows(_log_probs(z, problem.labels, sampling))]
        if entropy:
            found.append(problem.rows(reference.entropy(z).where(problem.labels != -100, 0.0)))
        return found

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        params = model_utils.TrainingSamplingParams(**sampling, temperature=temperature)
        return as_list(
            model_utils.from_parallel_hidden_states_to_logprobs(
                mine[0],
                mine[1],
                None,
                problem.tokens,
                **grid.vocab(vocabulary),
                tp_group=grid.tp_group,
                cp_group=grid.cp_group,
                hidden_layout=layout,
                sampling_params=params,
                return_entropy=entropy,
                **problem.call,
                **options,
            )
        )

    def gradient(leaf: Tensor) -> Tensor | None:
        grad = leaf.grad
        if leaf.dim() == 2 and grad is not None:  # the weight, which all context-parallel ranks have
            dist.all_reduce(grad, group=grid.cp_group)
        return grad

    largest = (hidden.double() @ weight.double().t()).abs().max().item() / temperature if hidden.numel() else 0.0
    shapes = [x.shape for x in truth(hidden.double(), weight.double())]
    return Case(
        "hidden states to log-probabilities",
        [(hidden, slices), (weight, lambda w, rank: w.chunk(grid.tp)[grid.tp_rank])],
        truth,
        ours,
        [draw.upstream(*shape) for shape in shapes],
        logit_size=largest,
        value_dtype=results_dtype(dtype),
        grad_size=64.0 * max(1, problem.tokens.numel()) / temperature,
        gradient_of=gradient,
        sent=_sent(
            problem,
            sampling,
            options.get("chunk_size"),
            (2, 2) if layout == "sequence" else (1, 1),
            1 + entropy,
        ),
        **_shared(problem),
    )


def at_ids(draw: Draw) -> Case:
    """Draw a case of logits at chosen ids, or of a student's log-probabilities at a teacher's likeliest ids."""
    kind = draw.one_of("of", "gather", "distillation", "distillation, whole")
    vocabulary, k = draw.integer(1, 8) * draw.ranks, draw.integer(1, 4)
    grid = _grid_of(draw)
    problem, dtype = _padded(draw, grid, vocabulary, 1), draw.dtype()
    batch, length = problem.tokens.shape
    z = draw.strided(draw.words(draw.normal(batch, problem.positions, vocabulary, dtype=dtype, size=2.0), -1))
    ids = torch.randint(-1, vocabulary, (batch, length, k), generator=draw.generator)
    teacher = draw.normal(batch, length, k)
    there = ids >= 0
    entropy = kind.endswith("whole") and draw.one_of("entropy", False, True)

    def truth(z: Tensor) -> list[Tensor]:
        z = z[:, :length]
        if kind == "gather":
            return [z.gather(-1, ids.clamp(min=0)).where(there, 0.0)]
        if kind == "distillation":
            student = z.gather(-1, ids.clamp(min=0)).where(there, 0.0).log_softmax(-1)
        else:
            student = z.log_softmax(-1).gather(-1, ids.clamp(min=0)).where(there, 0.0)
        more = [-reference.entropy(z)[:, :-1]] if entropy else []
        return [student[:, :-1], *more, teacher.log_softmax(-1)[:, :-1]]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        if kind == "gather":
            groups = {"tp_group": grid.tp_group, "cp_group": grid.cp_group, **grid.vocab(vocabulary)}
            return [model_utils.gather_logits_at_global_indices(mine[0], ids, **groups)]
        student, of_teacher, negative = model_utils.get_distillation_topk_logprobs_from_logits(
            mine[0],
            teacher,
            ids,
            kind.endswith("whole"),
            bool(entropy),
            vocab_parallel_rank=grid.tp_rank,
            vocab_parallel_group=grid.tp_group,
            context_parallel_group=grid.cp_group,
        )
        return [x for x in (student, negative, of_teacher) if x is not None]

    shapes = [x.shape for x in truth(z.double())]
    return Case(
        f"logits at ids, {kind}",
        [(z, lambda x, rank: grid.columns(problem.parts.split(x, 1)))],
        truth,
        ours,
        [draw.upstream(*shape) for shape in (shapes if kind == "gather" else shapes[:-1])],
        logit_size=z.double().abs().max().item() if z.numel() else 0.0,
        value_dtype=results_dtype(dtype),
        grad_size=8.0,
        sent=_sent(problem, {}, None),
        **_shared(problem),
    )
