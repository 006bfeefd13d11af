"""The distribution that was sampled from, the largest logits, and losses of logits, against one plain process."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext import reference
from megatron_ext.head.call import chunk_sizes
from megatron_ext.policy import (
    ClippedPGLoss,
    DistillationLossFn,
    DTensorPolicyWorker,
    LossInputType,
    LossType,
    MegatronPolicyWorker,
    NLLLoss,
)
from megatron_ext.policy.config import read_config
from tests.marks import slow
from tests.operators import Largest
from tests.policy.problems import (
    LAYOUTS,
    VOCAB,
    batching,
    counts_for,
    end_worker,
    ended,
    gradients_of_steps,
    inside,
    largest_error,
    plain_model,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
    with_teacher,
)
from tests.policy.test_reward_model import REWARDS
from tests.ranks import ranks

SAMPLING = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}
K = 3
BACKENDS = pytest.mark.parametrize("cls", [DTensorPolicyWorker, MegatronPolicyWorker])


def model_of(cls):
    """Megatron cuts the vocabulary evenly; the ids of the batches are those below `VOCAB`."""
    return tiny_model(vocab_size=VOCAB + (cls is not DTensorPolicyWorker))


def plain_logits(model, data, temperature=0.7):
    return model(input_ids=data["input_ids"], use_cache=False).logits / temperature


def filtered(logits, data, top_k, top_p):
    """`[B, S]` of each token; 0 for the first, padding, and what is not kept."""
    found = reference.sampled_log_probs(logits[:, :-1], data["input_ids"][:, 1:], top_k, top_p)
    return F.pad(found.where(found > -torch.inf, 0.0), (1, 0)) * inside(data)


def worker_of(cls=DTensorPolicyWorker, reference_model=False, generation=SAMPLING, kind="fixed", **layout):
    config = tiny_config(model_of(cls), **batching(kind) | layout, generation=generation)
    return cls(config, init_reference_model=reference_model)


@ranks(1)
def test_log_probs_of_an_earlier_policy_are_not_read():
    """NeMo-RL's loss takes the current policy's by this name for its KL penalty."""
    loss_fn, data = ClippedPGLoss(reference_policy_kl_penalty=0.5), tiny_batch(8)
    with ended(worker_of(generation={"temperature": 1.0})) as worker:
        stale = data | {"curr_logprobs_unfiltered": data["reference_policy_logprobs"] - 1}
        found, want = (worker.train(given, loss_fn, eval_mode=True)["global_loss"] for given in (stale, data))
    assert torch.equal(found, want)


def check_scores(cls, layout, kind):
    data = tiny_batch(8)
    for sampling in (SAMPLING, {"temperature": 0.7, "top_p": 0.6}, {"temperature": 0.7, "top_k": 4}):
        worker = worker_of(cls, reference_model=sampling is SAMPLING, generation=sampling, kind=kind, **layout)
        mine = shard(data, worker)
        logits = plain_logits(plain_model(model_of(cls)), mine)
        want = filtered(logits, mine, sampling.get("top_k"), sampling.get("top_p", 1.0))
        torch.testing.assert_close(worker.get_logprobs(mine)["logprobs"], want, rtol=1e-5, atol=1e-5)
        assert (want[inside(mine)] == 0).sum() > mine.size  # beside the first ones some are not kept
        if sampling is SAMPLING:  # of the whole distribution
            found = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
            torch.testing.assert_close(found, filtered(logits, mine, None, 1.0), rtol=1e-5, atol=1e-5)
        found = worker.get_topk_logits(mine, K)
        top = logits.topk(K)
        kept = inside(mine)[..., None]
        torch.testing.assert_close(found["topk_logits"], top.values * kept, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["topk_indices"], top.indices * kept)
        end_worker(worker)
    with pytest.raises(ValueError, match="k is 0: it must be an int from 1"):
        worker.get_topk_logits(mine, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout, kind", [("tp_sp", "fixed"), ("cp", "packed"), ("dp", "packed"), ("cp", "dynamic")])
@ranks(2)
def test_scores(layout, kind):
    check_scores(DTensorPolicyWorker, LAYOUTS[layout], kind)


class LogitsLoss:
    """The negative log-likelihood, from logits, called as NeMo-RL calls its own."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGIT

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        assert logits.shape[-1] >= VOCAB
        found = F.pad(logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0], (1, 0))
        return NLLLoss()(found, data, global_valid_seqs, global_valid_toks)


class KeywordLoss:
    """A loss of log-probabilities, called as NeMo-RL calls its own."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        assert next_token_logprobs.shape[1] == data["input_ids"].shape[1] - 1
        return NLLLoss()(F.pad(next_token_logprobs, (1, 0)), data, global_valid_seqs, global_valid_toks)


def distilled(loss_fn):
    def truth(logits, data, counts):
        log_p = logits.log_softmax(-1)
        student = log_p.gather(-1, data["teacher_topk_indices"])
        student = student if loss_fn.zero_outside_topk else student.log_softmax(-1)
        sums = (log_p.exp() * log_p).sum(-1)[:, :-1]
        teacher = data["teacher_topk_logits"].log_softmax(-1)[:, :-1]
        return loss_fn(student[:, :-1], teacher, sums, data, *counts)[0]

    return truth


def of_log_probs(loss_fn, top_k=None, top_p=1.0):
    def truth(logits, data, counts):
        data = dict(data, curr_logprobs_unfiltered=filtered(logits, data, None, 1.0))
        return loss_fn(filtered(logits, data, top_k, top_p), data, *counts)[0]

    return truth


FILTERED = {"generation": SAMPLING}
WHOLE = {"generation": {"temperature": 0.7}}
GRPO, ZERO, TOP = ClippedPGLoss(0.3), DistillationLossFn("mixed", 0.3, True), DistillationLossFn("reverse")
LOSSES = {
    "filtered": (GRPO, of_log_probs(GRPO, 9, 0.8), FILTERED),
    "logits": (LogitsLoss(), of_log_probs(NLLLoss()), WHOLE),
    "by keywords": (KeywordLoss(), of_log_probs(NLLLoss()), WHOLE),
    "distillation": (ZERO, distilled(ZERO), WHOLE),
    "distillation of k": (TOP, distilled(TOP), WHOLE),
}


def check_loss(cls, name, layout, kind):
    """Loss and updated weights of a step."""
    loss_fn, truth, options = LOSSES[name]
    data = with_teacher(tiny_batch(8), K)
    model = plain_model(model_of(cls))
    logits = plain_logits(model, data)
    want = truth(logits, data, counts_for(loss_fn, data))
    want.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    worker = worker_of(cls, kind=kind, **options, **layout)
    gradients = gradients_of_steps(worker)
    found = worker.train(shard(data, worker), loss_fn)
    torch.testing.assert_close(found["global_loss"][0], want.detach(), rtol=1e-5, atol=1e-6)
    if cls is DTensorPolicyWorker:
        assert largest_error(gradients, {name: p.grad for name, p in model.named_parameters()}) < 3e-5
    else:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(min(float(found["grad_norm"][0]), 0.05), float(norm), rtol=1e-4, atol=1e-6)
    end_worker(worker)


@pytest.mark.parametrize("layout", ["dp", *slow("tp_sp", "cp")])
@pytest.mark.parametrize("name", LOSSES)
@ranks(2)
def test_losses(name, layout):
    check_loss(DTensorPolicyWorker, name, LAYOUTS[layout], "packed" if layout == "dp" else "fixed")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp_sp", "cp"])
@ranks(2)
def test_megatron(layout):
    from megatron_ext.megatron.fusion_report import reset_fusion_report

    reset_fusion_report()
    check_scores(MegatronPolicyWorker, LAYOUTS[layout], "packed")
    for name in LOSSES:
        check_loss(MegatronPolicyWorker, name, LAYOUTS[layout], "fixed")


@pytest.mark.slow
@BACKENDS
@ranks(2, 4)
def test_packed_distillation(cls):
    """Documents end to end, cut over tensor- and context-parallel ranks and both, as NeMo-RL's recipe has them."""
    layouts = ["cp_tp_sp"] if dist.get_world_size() == 4 else ["tp_sp", "cp"]
    for layout, name in itertools.product(layouts, ("distillation", "distillation of k")):
        check_loss(cls, name, LAYOUTS[layout], "packed")


def _widest_logits(columns):
    """The most tokens whose logits stand in one tensor."""

    def tokens(x):
        memory = x.untyped_storage().nbytes() // x.element_size()  # of a promise of logits one element
        return min(x.numel(), memory) // columns if x.shape[-1:] == (columns,) else 0

    return Largest(tokens)


@ranks(1)
@BACKENDS
def test_whole_logits_exist_for_losses_of_logits_alone(cls):
    data = with_teacher(tiny_batch(16), K)
    columns, chunk = VOCAB + (cls is MegatronPolicyWorker), 64
    assert data["input_ids"].numel() > 2 * chunk
    batch = {"train_global_batch_size": 16, "train_micro_batch_size": 16, "logprob_batch_size": 16}
    with mock.patch.multiple(chunk_sizes, _CHUNK=chunk * columns, _CPU_CHUNK=chunk * columns):
        for options in (WHOLE, FILTERED):
            with ended(worker_of(cls, **options, **batch)) as worker:
                with _widest_logits(columns) as made:
                    worker.get_logprobs(data)
                    worker.get_topk_logits(data, K)
                    for loss_fn in (ZERO, TOP) if options is WHOLE else (GRPO,):
                        worker.train(data, loss_fn)
                assert 0 < made.size <= chunk
                if options is WHOLE:
                    with _widest_logits(columns) as made:
                        worker.train(data, LogitsLoss())
                    assert made.size == data["input_ids"].numel()


@pytest.mark.slow
@ranks(1)
def test_what_is_refused():
    assert not worker_of(generation={"top_k": -1, "top_p": None}).scorer.reader.narrows(tiny_batch(8))
    with pytest.raises(ValueError, match="reward_model_cfg.enabled is True: .*use DTensorPolicyWorker"):
        read_config(tiny_config(reward_model_cfg=REWARDS), "megatron_cfg")
    loss_fn = KeywordLoss()
    loss_fn.input_type = "draft"
    worker = worker_of()
    with pytest.raises(
        ValueError, match="KeywordLoss.input_type is 'draft': a policy worker has only inputs for 'logprob'"
    ):
        worker.train(tiny_batch(8), loss_fn)
