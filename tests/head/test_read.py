"""Random heads, random sets of read-outs, layouts and ranks, beside fp64 without shards or chunks: values, gradients,
`main_grad`, and how many collectives a call takes, whatever its chunks.

`python -m tests.head.test_read SEED` prints one case again.
"""

import math
import random
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import (
    KL,
    AcceptanceRate,
    CrossEntropy,
    Entropy,
    Gather,
    IsArgmax,
    JensenShannon,
    Kept,
    KeptEntropy,
    LmHead,
    Logits,
    LogProbs,
    LogSumExp,
    LoRA,
    MeanLogit,
    ReadOut,
    Sampled,
    SumOfSquares,
    Teacher,
    TopK,
    TotalVariation,
    ZLoss,
)
from megatron_ext.head.engine.logit_gradient import Basis
from tests.ranks import ranks

# Of all sums in a case the largest error relative to the largest entry, by dtype.
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-4}

# These exchange more than the statistics of one pass forward.
SEND_MORE = {"top-p", "js", "total variation", "accepted"}


def log_softmax(z):
    return z - z.logsumexp(-1, keepdim=True)


def weighed(p, x):
    """`sum p x`, with 0 where p is 0."""
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)


def entropy(z):
    log_p = log_softmax(z)
    return -weighed(log_p.exp(), log_p)


def sampled(z, labels, top_k, top_p):
    """The distribution over what is kept; see `sampled_log_probs`."""
    kept = z > -torch.inf
    if top_k is not None:
        kept &= z >= z.topk(min(top_k, z.shape[-1]), -1).values[..., -1:]
    p = log_softmax(z.masked_fill(~kept, -torch.inf)).exp()
    order = p.argsort(-1, descending=True)
    before = p.gather(-1, order).cumsum(-1) - p.gather(-1, order)
    kept &= torch.zeros_like(kept).scatter(-1, order, before < top_p)
    log_p = log_softmax(z.masked_fill(~kept, -torch.inf))
    return log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def divergence(student, teacher, kind, beta):
    p, q = log_softmax(student), log_softmax(teacher)
    if kind == "forward":
        return weighed(q.exp(), q - p)
    if kind == "reverse":
        return weighed(p.exp(), p - q)
    m = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return (1 - beta) * weighed(p.exp(), p - m) + beta * weighed(q.exp(), q - m)


def total_variation(draft, target):
    return (log_softmax(draft).exp() - log_softmax(target).exp()).abs().sum(-1) / 2


class Case:
    """One random case, drawn alike on every rank. `names`: of the read-outs; None: drawn too."""

    def __init__(self, seed: int, ranks_: int, names: list[str] | None = None):
        self.draw = random.Random(seed * 8 + ranks_)
        self.ranks, pick = ranks_, self.draw.choice
        g = torch.Generator().manual_seed(seed)
        self.dtype = pick([torch.float64, torch.float32])
        self.shape = (ranks_ * self.draw.randint(1, 4), *([self.draw.randint(1, 3)] if pick([0, 1]) else []))
        self.width, self.columns = self.draw.randint(1, 9), self.draw.randint(max(4, ranks_), 40)
        self.equal = pick([True, False])
        if self.equal:
            self.columns += -self.columns % ranks_
        cuts = sorted(self.draw.randint(0, self.columns) for _ in range(ranks_ - 1))
        if self.equal:
            cuts = [self.columns // ranks_ * i for i in range(1, ranks_)]
            self.columns -= pick([0, 0, 1])  # the last rank's may be fewer
        self.ends = [0, *cuts, self.columns]
        self.size = self.draw.randint(3, self.columns)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        self.hidden, self.weight = randn(*self.shape, self.width), randn(self.columns, self.width)
        self.bias = randn(self.columns) if pick([0, 1]) else None
        self.facts = {
            "logit_scale": pick([1.0, 1.0, 0.5]),
            "softcap": pick([None, None, 3.0]),
            "temperature": pick([1.0, 0.7]),
            "chunk_tokens": pick([None, 3]),
        }
        self.cache = pick([0, 0.5, 1, "bounded"])
        self.layout = pick(["replicated", "sequence"])
        self.labels = torch.randint(0, self.size, self.shape, generator=g)
        self.labels.view(-1)[::5] = -100
        self.ids = torch.randint(0, self.size, (*self.shape, self.draw.randint(1, 4)), generator=g)
        self.counts = torch.rand(self.shape, generator=g) < 0.7
        # What a sampler kept: a few ids at each token, the label among them, and nothing at some that do not count.
        kept = torch.rand((*self.shape, self.size), generator=g) < pick([0.0, 0.1, 0.5])
        kept.scatter_(-1, self.labels.clamp(min=0).unsqueeze(-1), True)
        self.kept = kept & ((self.labels != -100) | self.counts).unsqueeze(-1)
        self.kept_ids = self.size - 1 - self.kept.view(-1, self.size).flip(1).nonzero()[:, 1]  # falling at each token
        self.offsets = torch.cat([torch.zeros(1).long(), self.kept.sum(-1).view(-1).cumsum(0)])
        self.teacher_width = self.draw.randint(1, 5)
        self.teacher = randn(*self.shape, self.teacher_width), randn(self.columns, self.teacher_width)
        self.teacher_softcap = pick([None, 2.0])
        self.names = names or self.draw.sample(sorted(self.makers()), self.draw.randint(1, 5))
        self.only = self.counts if pick([0, 0, 1]) and "top-p" not in self.names else None
        self.graded = [pick([True, True, True, False]) for _ in self.names]
        self.upstream = randn(64, *self.shape)
        self.fused = pick([False, False, True])
        ranks_of_lora = pick([(), (), (2,), (1, 3)])
        self.lora = [LoRA(randn(r, self.width), randn(self.columns, r), 0.5 / r) for r in ranks_of_lora]
        self.frozen = bool(self.lora) and pick([True, False])

    def makers(self):
        """The name of each read-out: what makes it, and what it should give of whole logits `z` and the teacher's."""
        labels, ids, counts = self.labels, self.ids, self.counts
        kept, safe = labels != -100, labels.clamp(min=0).unsqueeze(-1)
        k = min(3, self.size)

        def picked(z):
            return log_softmax(z).gather(-1, safe).squeeze(-1).where(kept, 0.0)

        def mean(z):
            return z[..., : self.size].mean(-1)

        def loss(z):
            smooth = 0.9 * picked(z) + 0.1 * (mean(z) - z.logsumexp(-1)).where(kept, 0.0)
            return 0.01 * z.logsumexp(-1).square().where(kept, 0.0) - smooth

        def kept_of(top_k, top_p):
            return lambda z, _: sampled(z, labels, top_k, top_p).where(kept, 0.0)

        def among_kept(z):
            support = torch.nn.functional.pad(self.kept | ~kept.unsqueeze(-1), (0, z.shape[-1] - self.size))
            return z.masked_fill(~support, -torch.inf)

        rows = labels, self.offsets, self.kept_ids
        found = {
            "kept": (lambda t: Kept(*rows), lambda z, _: picked(among_kept(z))),
            "kept entropy": (lambda t: KeptEntropy(*rows), lambda z, _: entropy(among_kept(z)).where(kept, 0.0)),
            "log-probs": (lambda t: LogProbs(labels), lambda z, _: picked(z)),
            "loss": (lambda t: CrossEntropy(labels, label_smoothing=0.1, z_loss=0.01), lambda z, _: loss(z)),
            "hits": (lambda t: IsArgmax(labels), lambda z, _: z.argmax(-1) == labels),
            "entropy": (lambda t: Entropy(counts), lambda z, _: entropy(z).where(counts, 0.0)),
            "mean": (lambda t: MeanLogit(), lambda z, _: mean(z)),
            "lse": (lambda t: LogSumExp(), lambda z, _: z.logsumexp(-1)),
            "z-loss": (lambda t: ZLoss(counts), lambda z, _: z.logsumexp(-1).square().where(counts, 0.0)),
            "squares": (lambda t: SumOfSquares(), lambda z, _: log_softmax(z).exp().square().sum(-1)),
            "gather": (lambda t: Gather(ids), lambda z, _: log_softmax(z).gather(-1, ids)),
            "logits": (lambda t: Gather(ids, normalised=False), lambda z, _: z.gather(-1, ids) * self.temperature),
            "top-k": (lambda t: TopK(k), lambda z, _: log_softmax(z).topk(k, -1)),
            "top-k filter": (lambda t: Sampled(labels, k), kept_of(k, 1.0)),
            "both filters": (lambda t: Sampled(labels, k, 0.8), kept_of(k, 0.8)),
            "kl": (lambda t: KL(t), lambda z, t: divergence(z, t, "forward", 0)),
            "reverse kl": (lambda t: KL(t, "reverse"), lambda z, t: divergence(z, t, "reverse", 0)),
            "total variation": (lambda t: TotalVariation(t), lambda z, t: total_variation(z, t)),
            "accepted": (lambda t: AcceptanceRate(t), lambda z, t: 1 - total_variation(z, t)),
            "js": (lambda t: JensenShannon(t, 0.3), lambda z, t: divergence(z, t, "js", 0.3)),
        }
        if self.equal:
            found["top-p"] = (lambda t: Sampled(labels, top_p=0.7), kept_of(None, 0.7))
        return found

    @property
    def temperature(self):
        return self.facts["temperature"]

    def truth(self, from_logits: bool):
        """Results and gradients in fp64, of the whole."""
        leaves = [x.double().clone().requires_grad_() for x in (self.hidden, self.weight)]
        bias = None if self.bias is None else self.bias.double().clone().requires_grad_()
        adapters = [[x.double().clone().requires_grad_() for x in (each.A, each.B)] for each in self.lora]
        z = raw = leaves[0] @ leaves[1].t()
        for (a, b), each in zip(adapters, self.lora, strict=True):
            z = raw = z + each.scaling * (leaves[0] @ a.t() @ b.t())
        if from_logits:
            raw = z.detach().clone().requires_grad_()
            z, leaves = raw, [raw]
        else:
            z = (z if bias is None else z + bias) * self.facts["logit_scale"]
            leaves = [leaves[0], *([] if self.frozen else leaves[1:]), *([] if bias is None else [bias])]
            leaves += [x for pair in adapters for x in pair]
        teacher = self.teacher[0].double() @ self.teacher[1].double().t()
        cap = self.facts["softcap"]
        z = z if cap is None else cap * torch.tanh(z / cap)
        cap = self.teacher_softcap
        teacher = teacher if cap is None else cap * torch.tanh(teacher / cap)
        past = torch.arange(self.columns) >= self.size
        z, teacher = ((x / self.temperature).masked_fill(past, -torch.inf) for x in (z, teacher))
        found = [self.makers()[name][1](z, teacher) for name in self.names]
        if self.only is not None and not from_logits:
            found = [self._only(x) for x in found]
        return self._with_gradients(found, leaves)

    def _only(self, x):
        if isinstance(x, tuple):
            return tuple(self._only(part) for part in x)
        return x.where(self.only.view(*self.shape, *[1] * (x.dim() - len(self.shape))), torch.zeros_like(x))

    def _with_gradients(self, found, leaves):
        total = sum(x.sum() * 0 for x in leaves)
        for x, graded, upstream in zip(found, self.graded, self.upstream, strict=False):
            x = x[0] if isinstance(x, tuple) else x
            if graded and x.is_floating_point():
                finite = x.masked_fill(x == -torch.inf, 0.0)
                weight = upstream.to(x.dtype)
                total = total + (finite * weight.view(*weight.shape, *[1] * (x.dim() - weight.dim()))).sum()
        grads = torch.autograd.grad(total, leaves)
        flat = [part for x in found for part in (x if isinstance(x, tuple) else (x,))]
        return [x.detach() for x in flat], list(grads)

    def ours(self, from_logits: bool, group):
        rank = dist.get_rank(group) if group is not None else 0
        shard = VocabShard(self.ends[rank], self.ends[rank + 1], self.size)
        mine = slice(shard.start, shard.stop)
        facts = {name: value for name, value in self.facts.items() if name != "logit_scale" or not from_logits}
        group_ = group if self.ranks > 1 else "unsharded"
        if from_logits:
            merged = self.weight.double() + sum(x.scaling * (x.B.double() @ x.A.double()) for x in self.lora)
            z = (self.hidden.double() @ merged.t()).to(self.dtype)[..., mine].clone().requires_grad_()
            teacher = (self.teacher[0].double() @ self.teacher[1].double().t()).to(self.dtype)[..., mine]
            teacher = Logits(teacher, group_, vocab=shard, softcap=self.teacher_softcap)
            readouts = [self.makers()[name][0](teacher) for name in self.names]
            with count_collectives() as forward:
                found = Logits(z, group_, vocab=shard, **facts).read(*readouts)
            leaves = [z]
        else:
            part = self.layout == "sequence"

            def cut(x):
                return x.chunk(self.ranks)[rank] if part else x

            hidden = cut(self.hidden).clone().requires_grad_()
            weight = self.weight[mine].clone().requires_grad_(not self.frozen)
            lora = [
                LoRA(x.A.clone().requires_grad_(), x.B[mine].clone().requires_grad_(), x.scaling) for x in self.lora
            ]
            bias = None if self.bias is None else self.bias[mine].clone().requires_grad_()
            weight.main_grad = torch.full_like(weight, 0.5)
            facts |= {"bias": bias, "cache": self.cache, "gradient_accumulation_fusion": self.fused, "lora": lora}
            head = LmHead(weight, group_, self.layout, vocab=shard, **facts)
            softcap = self.teacher_softcap
            theirs = LmHead(self.teacher[1][mine].clone(), group_, self.layout, vocab=shard, softcap=softcap)
            teacher = Teacher(theirs, cut(self.teacher[0]).clone())
            readouts = [self.makers()[name][0](teacher) for name in self.names]
            with count_collectives() as forward:
                found = head.read(hidden, *readouts, counts=self.only)
                with pytest.raises(ValueError, match="do not have the same labels"):  # and nothing is sent
                    head.read(hidden, *readouts, LogProbs(self.labels), IsArgmax(self.labels.clone()))
            leaves = [hidden, *([] if self.frozen else [weight]), *([] if bias is None else [bias])]
            leaves += [x for each in lora for x in each[:2]]
        found = found if len(self.names) > 1 else (found,)
        with count_collectives() as backward:
            results, grads = self._with_gradients(found, leaves)
        if self.only is None or self.only.any():  # where no token counts all ranks know it, and may send nothing
            self._check_collectives(from_logits, found, forward.total(), backward.total())
        if self.fused and not from_logits and not self.frozen:
            grads[1] = weight.main_grad - 0.5
        return results, grads, mine, rank

    def _check_collectives(self, from_logits, found, forward, backward):
        """One forward and one backward, none backward of logits; with the sequence layout twice as many, and one for
        all A of LoRA."""
        sent = 0 if self.ranks == 1 else 1 if from_logits or self.layout == "replicated" else 2
        assert forward == sent or (sent and forward > sent and SEND_MORE & {*self.names}), (self.names, forward)
        first = [x[0] if isinstance(x, tuple) else x for x in found]
        asked = any(graded and x.requires_grad for graded, x in zip(self.graded, first, strict=True))
        of_lora = 1 if self.lora and sent == 2 else 0  # each rank has A's gradient of its own tokens
        assert backward == (sent + of_lora if asked and not from_logits else 0), (self.names, backward)

    def check(self, from_logits: bool, group):
        wanted, wanted_grads = self.truth(from_logits)
        found, grads, mine, rank = self.ours(from_logits, group)
        if from_logits:
            wanted_grads = [wanted_grads[0][..., mine]]
        else:
            dx = wanted_grads[0].chunk(self.ranks)[rank] if self.layout == "sequence" else wanted_grads[0]
            whole = {len(wanted_grads) - 2 * at for at in range(1, len(self.lora) + 1)}  # where A's are
            rest = enumerate(wanted_grads[1:], 1)
            wanted_grads = [dx, *(x if at in whole else x[mine] for at, x in rest)]
        limit = LIMITS[self.dtype]
        for ours, theirs in zip([*found, *grads], [*wanted, *wanted_grads], strict=True):
            assert ours.shape == theirs.shape, (self.names, ours.shape, theirs.shape)
            if not ours.is_floating_point():
                assert self.dtype == torch.float32 or ours.equal(theirs), self.names
                continue
            assert ours.isinf().equal(theirs.isinf()), self.names
            finite = theirs.isfinite()
            if not finite.any():
                continue
            error = (ours.double() - theirs)[finite].abs().max() / theirs[finite].abs().max().clamp(min=1.0)
            assert error <= limit, f"{self.names} {self.facts} {self.layout} {self.shape} {self.dtype}: {error:.1e}"


def run(seeds, group):
    world = dist.get_world_size() if dist.is_initialized() else 1
    for seed in seeds:
        for from_logits in (False, True):
            try:
                Case(seed, world).check(from_logits, group)
            except Exception as fault:
                fault.add_note(f"seed {seed}, from_logits {from_logits}, {world} ranks")
                raise


@ranks(1, 2, 4)
def test_a_hundred():
    run(range(40), dist.group.WORLD)


@pytest.mark.slow
@ranks(1, 2, 3, 4)
def test_thousands():
    run(range(1000, 1700), dist.group.WORLD)


class OfAnyNumber(ReadOut):
    """The log-probability of a label that may be none, and is then that of nothing."""

    reads_labels = True

    def __init__(self, labels):
        self.labels = labels

    def flatten(self, flat):
        self.labels_T = flat(self.labels)

    def results(self, stats, stats_RKT, own_KT):
        return [(stats.target - stats.log_sum).to(own_KT.dtype)], []

    def basis(self, stats, saved, grad):
        return Basis(log_prob=grad)


def test_labels_that_a_read_out_does_not_check():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.tensor([3, -1, 19, -100])
    there, logits = labels >= 0, hidden @ weight.T
    want = logits.log_softmax(-1)[there].gather(1, labels[there, None])[:, 0]
    grads = torch.autograd.grad(want.sum(), (hidden, weight), retain_graph=True)
    for found in (LmHead(weight).read(hidden, OfAnyNumber(labels)), Logits(logits).read(OfAnyNumber(labels))):
        torch.testing.assert_close(found[there], want)
        assert (found[~there] == -torch.inf).all()
        torch.testing.assert_close(torch.autograd.grad(found[there].sum(), (hidden, weight), retain_graph=True), grads)


if __name__ == "__main__":
    run([int(sys.argv[1])], None)
