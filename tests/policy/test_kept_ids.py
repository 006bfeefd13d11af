"""Replay of a generator's sampling mask by the workers: scores, steps, what is refused, beside one plain process."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.meter import measure
from megatron_ext.policy import ClippedPGLoss, DTensorPolicyWorker, MegatronPolicyWorker
from tests.marks import slow
from tests.policy.problems import (
    LAYOUTS,
    batching,
    counts_for,
    end_worker,
    inside,
    plain_model,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.ranks import ranks

MODEL = tiny_model(vocab_size=98)
K, TEMPERATURE = 5, 0.7


def drawn():
    """A batch, and the ids that were kept where each token was drawn: 1 to K, of the first two in a row none."""
    data = tiny_batch(8)
    g = torch.Generator().manual_seed(7)
    others = torch.rand(*data["input_ids"].shape, MODEL.vocab_size, generator=g)
    others.scatter_(-1, data["input_ids"].unsqueeze(-1), 2.0)  # the token itself is among them
    kept = others.topk(K).indices
    place = torch.rand(kept.shape, generator=g).argsort(-1)
    many = torch.randint(1, K + 1, (*kept.shape[:2], 1), generator=g)
    kept = kept.where(torch.arange(K) < many, -1).gather(-1, place)
    kept[:, :2] = -1
    kept[~inside(data)] = -1
    full = data["input_lengths"].argmax()
    assert data["input_lengths"][full] == kept.shape[1]
    kept[full, 0, 0] = data["input_ids"][full, 0]  # of the first token, which nothing predicts
    data["kept_token_ids"] = kept
    return data


def among_kept(logits, data):
    """`[B, S]` of each token that has kept ids, else 0."""
    kept = data["kept_token_ids"]
    there = torch.zeros(*kept.shape[:2], MODEL.vocab_size + 1, dtype=torch.bool).scatter(-1, kept + 1, True)[..., 1:]
    has_any = there.any(-1)
    z = logits[:, :-1].masked_fill(~there[:, 1:] & has_any[:, 1:, None], -torch.inf)
    found = z.log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return F.pad(found, (1, 0)).where(has_any, 0.0)


def config(kind="fixed", generation=None, **layout):
    generation = {"temperature": TEMPERATURE, **(generation or {})}
    return tiny_config(MODEL, generation=generation, **batching(kind), **layout)


@pytest.mark.parametrize(
    "backend, layout, kind",
    [
        (DTensorPolicyWorker, "cp", "packed"),
        *slow(
            (DTensorPolicyWorker, "dp", "dynamic"),
            (DTensorPolicyWorker, "tp_sp", "fixed"),
            (MegatronPolicyWorker, "tp_sp", "packed"),
            (MegatronPolicyWorker, "cp", "packed"),
            (MegatronPolicyWorker, "dp", "fixed"),
        ),
    ],
)
@ranks(2)
def test_scores_and_a_step(backend, layout, kind):
    """The KL penalty is on the whole distribution; kept ids overrule the configuration's filters."""
    data, loss_fn = drawn(), ClippedPGLoss(reference_policy_kl_penalty=0.3)
    model = plain_model(MODEL)
    logits = model(input_ids=data["input_ids"], use_cache=False).logits / TEMPERATURE
    want = among_kept(logits, data)
    sampled = (data["kept_token_ids"] >= 0).any(-1)
    data["token_mask"][::2] *= sampled[::2]  # of the other rows tokens count that were not sampled
    plain = F.pad(logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0], (1, 0))
    loss, _ = loss_fn(want, dict(data, curr_logprobs_unfiltered=plain), *counts_for(loss_fn, data))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for skip in (False, True):
        settings = config(kind, {"top_k": 3} if skip else None, **LAYOUTS[layout]) | {"skip_masked_tokens": skip}
        worker = backend(settings, init_reference_model=not skip)
        mine = shard(data, worker)
        rows = slice(worker.dp_rank * mine.size, (worker.dp_rank + 1) * mine.size)
        torch.testing.assert_close(worker.get_logprobs(mine)["logprobs"], want[rows].detach(), rtol=1e-5, atol=1e-5)
        if not skip:
            whole = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
            torch.testing.assert_close(whole[sampled[rows]], plain[rows][sampled[rows]].detach(), rtol=1e-5, atol=1e-5)
        found = worker.train(mine, loss_fn)
        torch.testing.assert_close(float(found["global_loss"][0]), float(loss), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(float(found["grad_norm"][0]), float(norm), rtol=1e-4, atol=1e-6)
        end_worker(worker)


@ranks(1)
def test_largest_id_of_a_narrow_integer_type():
    data = tiny_batch(4)
    kept = data["input_ids"].unsqueeze(-1) + torch.tensor([0, 1])
    kept[..., 1] = 127
    worker = DTensorPolicyWorker(tiny_config(tiny_model(vocab_size=128)), init_reference_model=False)
    wide, narrow = (
        worker.get_logprobs(dict(data, kept_token_ids=kept.to(dtype)))["logprobs"]
        for dtype in (torch.int64, torch.int8)
    )
    assert wide[0, 1] != 0
    assert torch.equal(wide, narrow)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_products_are_over_the_kept_columns(backend):
    """Each element of hidden states takes 6 FLOPs for each column that any token of the micro-batch has kept, if few
    are kept."""
    data, loss_fn = drawn(), ClippedPGLoss()
    few = torch.arange(20, 20 + K).expand_as(data["kept_token_ids"])
    data["input_ids"] = 20 + data["input_ids"] % K
    data["kept_token_ids"] = few.where(data["kept_token_ids"].amax(-1, keepdim=True) >= 0, -1)
    flops = {}
    for replay in (False, True):
        worker = backend(config(), init_reference_model=False)
        given = data if replay else type(data)({k: v for k, v in data.items() if k != "kept_token_ids"})
        with measure() as found:
            worker.train(given, loss_fn)
        flops[replay] = found.flops
        end_worker(worker)
    each = 6 * data["input_ids"].numel() * MODEL.hidden_size
    assert flops[False] - flops[True] == each * (MODEL.vocab_size - K)


WRONG = [
    (lambda kept: kept.float(), r"kept_token_ids is torch.float32"),
    (lambda kept: kept[..., 0], r"kept_token_ids is \[4, 13\]: it must be a tensor \[rows, positions, ids\]"),
    (lambda kept: kept - 1, "-1 for none; pad it so"),
    (lambda kept: kept.where(kept < 0, 97), "kept_token_ids of input_ids, as labels: ids holds one twice"),
    (lambda kept: kept.where(kept < 0, kept + 98), r"ids holds \[\d+\], outside \[0, 98\)"),
    (lambda kept: kept.roll(1, 1), "labels holds one that is not among the kept ids of its token"),
]


@pytest.mark.slow
@ranks(2)
def test_what_one_data_parallel_rank_has_wrong_is_refused_on_all():
    worker = DTensorPolicyWorker(config(), init_reference_model=False)
    for change, said in WRONG:
        mine = shard(drawn(), worker)
        if worker.dp_rank == 1:
            mine["kept_token_ids"] = change(mine["kept_token_ids"])
        for call in (worker.get_logprobs, lambda batch: worker.train(batch, ClippedPGLoss())):
            with pytest.raises(ValueError, match=said):
                call(mine)
    end_worker(worker)
