"""`bits="batch"` and "tensor_parallel" of every read-out: the same bits for other tokens, chunks, layout and ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron_ext import VocabShard, head
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.head import LmHead, LoRA
from megatron_ext.head.engine.chunk_logits import LogitTransform
from megatron_ext.numerics.tensors import new_matrix
from tests.head.problems import error
from tests.head.test_fixed_bits import MODES, VOCAB, WIDTH, assert_as_near, problem, same, shard_of
from tests.marks import quick_if, slow
from tests.ranks import ranks

TOKENS = 264
ROUNDED = pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)], ids=["fp32", "bf16"])
BENT = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}


def read_outs(labels, ids, teacher):
    some = ids[:, 0].masked_fill(ids[:, 0] % 11 == 0, -100)
    return {
        "loss": [head.CrossEntropy(some, label_smoothing=0.1, z_loss=0.01), head.Entropy(), head.IsArgmax(some)],
        "ids": [head.Gather(ids), head.Entropy()],
        "the largest": [head.TopK(7)],
        "squares": [head.SumOfSquares(), head.LogProbs(labels)],
        "top-k": [head.Sampled(labels, 5, 1.0)],
        "top-k beside a loss": [head.Sampled(labels, 5, 1.0), head.CrossEntropy(labels, z_loss=0.1)],
        "top-k and top-p": [head.Sampled(labels, 5, 0.8)],
        "top-p": [head.Sampled(labels, None, 0.9)],
        "forward KL": [head.KL(teacher, "forward")],
        "reverse KL": [head.KL(teacher, "reverse")],
        "Jensen-Shannon": [head.JensenShannon(teacher, 0.3)],
        "total variation": [head.TotalVariation(teacher)],
        "acceptance": [head.AcceptanceRate(teacher)],
        "kept ids": [head.Kept(labels, *kept_ids(ids)), head.KeptEntropy(labels, *kept_ids(ids))],
        "all at once": [head.KL(teacher), head.TopK(3), head.Sampled(labels, None, 0.9), head.MeanLogit()],
    }


def kept_ids(ids):
    """Offsets of each token's ids, and the ids, as a generator gives them: the token's label and three others."""
    kept = (ids[:, :1] + torch.tensor([0, 5, 90, 401], device=ids.device)) % VOCAB
    return 4 * torch.arange(len(ids) + 1, device=ids.device), kept.flatten()


NAMES = list(read_outs(None, torch.zeros(1, 1, dtype=torch.int64), None))
MANY = ("top-k beside a loss", "kept ids", "all at once")  # what these do is in most of the others


class Problem:
    def __init__(self, dtype, tokens=TOKENS, device="cpu"):
        hidden, weight, bias, labels = problem(dtype)
        self.hidden, self.weight, self.bias = hidden[:tokens], weight, bias
        self.their_hidden, self.their_weight = self.hidden[:, :24].contiguous(), weight[:, 7:31].contiguous()
        self.labels = labels[:tokens].clamp(min=0)
        self.ids = torch.stack([self.labels, self.labels.flip(0), self.labels], 1)
        if dtype != torch.float64:  # as many equals as logits of 16 bits have
            self.weight[50:60] = self.weight[40:50]
        for name, x in vars(self).items():
            setattr(self, name, x.to(device))

    def read(self, name, bits, some=slice(None), rows=slice(None), dtype=None, biased=False, adapted=False, **options):
        """Results and dx, which are of each token, and the gradients of weight (and bias, or B and A of LoRA).

        `adapted`: the weights of head and teacher have a low rank beside them.
        """
        width = options.pop("width", None)

        def part(x):
            return x if width is None else shard_of(x, width)

        def leaf(x):
            return (x if dtype is None else x.to(dtype)).clone().requires_grad_()

        hidden, their_hidden = self.hidden[some], self.their_hidden[some]
        if dtype is not None:
            their_hidden = their_hidden.to(dtype)
        x, w, b = leaf(hidden[rows]), leaf(part(self.weight)), leaf(part(self.bias)) if biased else None
        their_weight = part(self.their_weight if dtype is None else self.their_weight.to(dtype))
        group = {key: options[key] for key in ("tp_group", "vocab", "hidden_layout") if key in options}
        low, their_low = (adapters(y.shape[1], hidden, x, part) if adapted else None for y in (x, their_hidden))
        teacher = head.Teacher(LmHead(their_weight, lora=their_low, **group), their_hidden[rows])
        of = LmHead(w, bias=b, lora=low, bits=bits, **options)
        found = of.read(x, *read_outs(self.labels[some], self.ids[some], teacher)[name])
        flat = tree_leaves(found)
        slopes = torch.linspace(0.5, 1.5, TOKENS, device=hidden.device)[some]
        of_token = (y.flatten(1).sum(1) if y.dim() > 1 else y for y in flat if y.requires_grad)
        sum(((y.where(y.isfinite(), 0.0)) * slopes).sum() for y in of_token).backward()
        leaves = [w, b, *((low.B, low.A) if adapted else ())]
        return [*(y.detach() for y in flat), x.grad], [leaf.grad for leaf in leaves if leaf is not None]


def adapters(width, given, like, part):
    draws = torch.Generator().manual_seed(width)
    a, b = (torch.randn(*shape, generator=draws).to(given).to(like) / 4 for shape in ((5, width), (VOCAB, 5)))
    return LoRA(a.requires_grad_(), part(b).clone().requires_grad_(), 0.5)


@ROUNDED
@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("name", quick_if(MANY.__contains__, NAMES))
def test_the_same_bits_for_other_tokens_and_chunks(name, bits, dtype):
    given = Problem(dtype)
    for options in ({}, {**BENT, "biased": True}, {"adapted": True}):
        found, of_weights = given.read(name, bits, **options)
        again, of_weights_again = given.read(name, bits, chunk_tokens=100, **options)
        same([*found, *of_weights], [*again, *of_weights_again])
        for count in (1, 65, 257):
            some = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(count))[:count]
            same([x[some] for x in found], given.read(name, bits, some, **options)[0])


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64, torch.bfloat16)], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_as_near_the_truth_as_fast_ones(name, bits, dtype):
    given = Problem(dtype)
    truth, found, fast = (
        [x for each in given.read(name, mode, dtype=wide, **BENT, biased=True, adapted=True) for x in each]
        for mode, wide in (("fast", torch.float64), (bits, None), ("fast", None))
    )
    floor = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-3}[dtype]
    assert_as_near(found, fast, truth, *((1.1, floor / 10) if name == "loss" else (1.2, floor)))


def sharded(layout):
    """This rank's rows of the weight, without padding, and of hidden states; and what a head is told of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = 26 * 8 // world
    own = slice(rank * width, min((rank + 1) * width, VOCAB))
    rows = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world) if layout == "sequence" else slice(None)
    vocab = VocabShard(rank * width, (rank + 1) * width, VOCAB)
    return own, rows, {"tp_group": dist.group.WORLD, "vocab": vocab, "hidden_layout": layout}


@ranks(2, 4, 8)
@ROUNDED
@pytest.mark.parametrize("name", quick_if(("loss", *MANY[1:]).__contains__, NAMES))
def test_the_same_bits_on_any_number_of_ranks(name, dtype):
    """A's gradient too, but for slices: it is an all-reduce there, whose order nobody promises."""
    given = Problem(dtype)
    for options in ({}, {**BENT, "biased": True}, {"adapted": True}):
        alone, of_weights = given.read(name, "tensor_parallel", tp_group=UNSHARDED, **options)
        for layout in ("replicated", "sequence"):
            own, rows, facts = sharded(layout)
            facts |= {"width": facts["vocab"].columns, "chunk_tokens": 70, **options}
            with count_collectives() as sent:
                found, of_shard = given.read(name, "tensor_parallel", rows=rows, **facts)
            assert name != "loss" or "adapted" in options or sent.total() == (4 if layout == "sequence" else 3), sent
            same([*alone[:-1], alone[-1][rows]], found)
            if "adapted" in options:
                of_a = of_shard.pop()
                assert error(of_a, of_weights[-1]) < (1e-6 if dtype == torch.float32 else 2e-2)
                assert layout == "sequence" or torch.equal(of_a, of_weights[-1])
            whole = of_weights[: len(of_shard)]
            same([g[own] for g in whole], [g[: own.stop - own.start] for g in of_shard])
            assert all((g[own.stop - own.start :] == 0).all() for g in of_shard), "padding has no gradient"


@pytest.mark.parametrize("size", [2, 9, *slow(1, 7, 21)])
def test_a_vocabulary_whose_last_eighths_have_no_columns(size):
    """One rank has the bits of a vocabulary padded to eight equal parts, and values near fp64."""
    draws = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 6, generator=draws), torch.randn(size, 6, generator=draws)
    labels = torch.randint(size, (30,), generator=draws)

    def read(w, bits="tensor_parallel", **options):
        leaves = [x.clone().requires_grad_() for x in (hidden.to(w.dtype), w)]
        wanted = [head.LogProbs(labels), head.Entropy(), head.SumOfSquares(), head.Gather(labels.unsqueeze(1))]
        found = LmHead(leaves[1], bits=bits, **options).read(leaves[0], *wanted)
        sum(y.sum() for y in found).backward()
        softmax = LmHead(leaves[1], bits=bits, **options).read(leaves[0], *wanted[:2])
        return [y.detach() for y in (*found, *softmax)], [x.grad for x in leaves]

    found, (dx, dw) = read(weight)
    columns = -(-size // 8) * 8
    padded = torch.cat([weight, torch.ones(columns - size, 6)])
    again, (dx_again, dw_again) = read(padded, vocab=VocabShard(0, columns, size))
    same([*found, dx, dw], [*again, dx_again, dw_again[:size]])
    truth, grads = read(weight.double(), bits="fast")
    torch.testing.assert_close([*found, dx, dw], [x.float() for x in (*truth, *grads)], rtol=1e-5, atol=1e-5)


@ranks(2)
def test_shards_out_of_rank_order_are_refused():
    """dx is added in the order of ranks, which must be that of the leaves."""
    rank, given = dist.get_rank(), Problem(torch.float32)
    vocab = VocabShard(104 * (1 - rank), 104 * (2 - rank), VOCAB)
    of = LmHead(torch.randn(104, WIDTH), dist.group.WORLD, vocab=vocab, bits="tensor_parallel")
    with pytest.raises(ValueError, match=f"on rank {rank} of 2.*in rank order"):
        of.read(given.hidden, head.LogProbs(given.labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformed_logits_of_one_token_lie_as_those_of_many(dtype):
    """Kernels add in an order that goes by how far apart rows are: 203 columns fill no multiple of 16."""
    rule = LogitTransform(torch.ones(203), softcap=3.0, scale=0.7)
    one, many = (rule.applied(new_matrix(torch.ones(1, dtype=dtype), tokens, 203)) for tokens in (1, 20))
    assert (one.stride(), one.dtype) == (many.stride(), many.dtype)
