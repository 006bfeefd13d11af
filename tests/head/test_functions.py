"""Functions of read-outs give the bits of `LmHead.read` and `Logits.read`, whose values `tests.fuzz.heads` has."""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron_ext import VocabShard, head

T, D, V = 12, 8, 41
LABELS, IDS = torch.arange(T) * 3, torch.arange(3 * T).view(T, 3)
VOCAB = VocabShard(0, V, 37)
SHARED = {"vocab": VOCAB, "temperature": 0.7, "chunk_tokens": 5}
FACTS = {"bias": torch.linspace(-1, 1, V), "softcap": 3.0, "logit_scale": 0.5, "cache": 0.4}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


THEIR_HIDDEN, THEIR_WEIGHT, THEIR_LOGITS = drawn(T, D, seed=2), drawn(V, D, seed=3), drawn(T, V, seed=4)
THEIRS = {"teacher_hidden": THEIR_HIDDEN, "teacher_weight": THEIR_WEIGHT}
TEACHER = head.Teacher(head.LmHead(THEIR_WEIGHT, vocab=VOCAB), THEIR_HIDDEN)
OTHER = head.Logits(THEIR_LOGITS, vocab=VOCAB)

# The function, what it takes after hidden states and weight, and its read-outs.
OF_HIDDEN = [
    (head.linear_gather_log_probs, {"indices": IDS}, [head.Gather(IDS)]),
    (head.linear_gather_log_probs, {"indices": IDS, "return_entropy": True}, [head.Gather(IDS), head.Entropy()]),
    (head.linear_topk_log_probs, {"k": 3}, [head.TopK(3)]),
    (head.linear_sampled_log_probs, {"labels": LABELS, "top_k": 5, "top_p": 0.9}, [head.Sampled(LABELS, 5, 0.9)]),
]
OF_HIDDEN += [
    (head.linear_kl_divergence, {**THEIRS, "direction": way}, [head.KL(TEACHER, way)]) for way in ("forward", "reverse")
]
OF_HIDDEN.append((head.linear_js_divergence, {**THEIRS, "beta": 0.3}, [head.JensenShannon(TEACHER, 0.3)]))
OF_LOGITS = [
    (head.gather_log_probs, {"indices": IDS}, [head.Gather(IDS)]),
    (head.gather_log_probs, {"indices": IDS, "return_entropy": True}, [head.Gather(IDS), head.Entropy()]),
    (head.gather_logits, {"indices": IDS}, [head.Gather(IDS, normalised=False)]),
    (head.vocab_topk, {"k": 3}, [head.TopK(3, normalised=False)]),
    (head.sampled_log_probs, {"labels": LABELS, "top_k": 5, "top_p": 0.9}, [head.Sampled(LABELS, 5, 0.9)]),
    (head.soft_cross_entropy, {"teacher_logits": THEIR_LOGITS}, [head.KL(OTHER, "cross entropy")]),
    (head.kl_divergence, {"teacher_logits": THEIR_LOGITS}, [head.KL(OTHER)]),
    (head.kl_divergence, {"teacher_logits": THEIR_LOGITS, "direction": "reverse"}, [head.KL(OTHER, "reverse")]),
    (head.js_divergence, {"teacher_logits": THEIR_LOGITS, "beta": 0.3}, [head.JensenShannon(OTHER, 0.3)]),
]


def assert_same_bits(calls, *tensors):
    found = []
    for call in calls:
        leaves = [x.clone().requires_grad_() for x in tensors]
        results = tree_leaves(call(*leaves))
        found.append([*results, *torch.autograd.grad(sum(y.sum() for y in results if y.requires_grad), leaves)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("function, given, read_outs", OF_HIDDEN)
def test_function_of_hidden_states_is_its_read_outs(function, given, read_outs):
    options = SHARED | FACTS
    calls = lambda x, w: function(x, w, **given, **options), lambda x, w: head.LmHead(w, **options).read(x, *read_outs)
    assert_same_bits(calls, drawn(T, D, seed=0), drawn(V, D, seed=1))


@pytest.mark.parametrize("function, given, read_outs", OF_LOGITS)
def test_function_of_logits_is_its_read_outs(function, given, read_outs):
    options = {
        name: x
        for name, x in SHARED.items()
        if name != "temperature" or function not in (head.gather_logits, head.vocab_topk)
    }
    calls = lambda z: function(z, **given, **options), lambda z: head.Logits(z, **options).read(*read_outs)
    assert_same_bits(calls, drawn(T, V, seed=0))


def test_every_function_is_here_or_in_a_test_of_its_own():
    here = {function.__name__ for function, *_ in OF_HIDDEN + OF_LOGITS}
    here |= {"linear_cross_entropy", "linear_log_probs", "token_log_probs", "token_entropy"}  # tests.fuzz.cross_entropy
    here |= {"vocab_parallel_cross_entropy", "vocab_parallel_softmax", "vocab_parallel_log_softmax"}  # test_gather.py
    functions = {name for name in head.__all__ if inspect.isfunction(getattr(head, name)) and name.islower()}
    assert here == functions - {"batch_invariant_mode"}
