"""Log-probabilities, top-k and a divergence from a teacher inside a model's forward, against whole logits."""

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_ext.distributed.groups import context_parallel_group
from megatron_ext.head import KL, LmHead, Teacher, TopK
from megatron_ext.megatron.fused_loss import log_probs as model_log_probs
from megatron_ext.megatron.fusion_report import fusion_report
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.megatron.output_processors import NextTokenLogProbs, ReadOuts
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.gpt import causal_mask, grouped, model_parallel
from tests.megatron.language_models import tiny_hybrid
from tests.megatron.patching import (
    ROUNDING,
    SEQ,
    assert_same,
    batch,
    counting_logits,
    grads_of,
    on_gpt,
    one_gpt,
    patched,
    run,
)
from tests.ranks import ranks

TEMPERATURE = 0.8
SLOW = pytest.mark.slow


def log_probs(z, ids, teacher):
    return z[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def kl(weight, hidden):
    return KL(Teacher(LmHead(weight), hidden))


OPTIONS = {"temperature": TEMPERATURE, "chunk_tokens": 3}
CASES = {
    "log_probs": (log_probs, lambda *teacher: NextTokenLogProbs(**OPTIONS)),
    "top_k": (lambda z, ids, teacher: z.topk(3).values, lambda *teacher: ReadOuts(readouts=[TopK(3)], **OPTIONS)),
    "divergence": (
        lambda z, ids, teacher: (teacher.exp() * (teacher - z)).sum(-1),
        lambda *teacher: ReadOuts(readouts=[kl(*teacher)], **OPTIONS),
    ),
}


@on_gpt(tied=False)
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_multiplies_its_logits(model, case):
    """Factors of the student (muP) are not the teacher's."""
    expect, make = CASES[case]
    ids = batch()[0]
    layer, hidden, teacher_hidden = model.output_layer, torch.randn(SEQ, 2, 32), torch.randn(SEQ, 2, 16)
    teacher_weight = torch.randn(layer.weight.shape[0], 16)

    def log_softmax(logits):
        return logits.div(TEMPERATURE).log_softmax(-1).transpose(0, 1)

    z = log_softmax(0.3 * hidden @ layer.weight.t())
    expected = expect(z, ids, log_softmax(teacher_hidden @ teacher_weight.t()))
    given = {"hidden_states": hidden, "output_layer": layer, "output_weight": layer.weight, "input_ids": ids}
    processor = make(teacher_weight, teacher_hidden)
    found = processor(**given, scale_logits=lambda logits: 0.3 * logits)
    first = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(first, expected, rtol=2e-6, atol=2e-6)
    for scale_logits in (torch.tanh, torch.zeros_like, lambda logits: hidden):
        with pytest.raises(ValueError, match="scale_logits is .* and does more than multiply logits"):
            processor(**given, scale_logits=scale_logits)


@on_gpt(tied=False)
def test_a_bias_and_a_softcap_go_with_every_read_out(model):
    layer = model.output_layer
    layer.bias, layer.softcap = torch.nn.Parameter(torch.linspace(-1, 1, layer.weight.shape[0])), 2.0
    hidden = torch.randn(SEQ, 2, 32)
    given = {"hidden_states": hidden, "output_layer": layer, "output_weight": layer.weight}
    z = 2.0 * torch.tanh((hidden @ layer.weight.t() + layer.bias) / 2.0)
    teacher_hidden, teacher_weight = torch.randn(SEQ, 2, 8), torch.randn(layer.weight.shape[0], 8)
    both = ReadOuts(readouts=[TopK(3), kl(teacher_weight, teacher_hidden)])
    (values, ids), found = both(**given)
    expected = z.log_softmax(-1).topk(3)
    torch.testing.assert_close(values, expected.values.transpose(0, 1), rtol=2e-6, atol=2e-6)
    assert ids.equal(expected.indices.transpose(0, 1))
    q, p = z.log_softmax(-1), (teacher_hidden @ teacher_weight.t()).log_softmax(-1)
    torch.testing.assert_close(found, (p.exp() * (p - q)).sum(-1).t(), rtol=2e-6, atol=2e-6)


@grouped(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", [one_gpt, pytest.param(tiny_hybrid, marks=SLOW)])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=SLOW), True], ids=["replicated", "sequence"])
def test_read_outs(build, case, sequence_parallel):
    expect, make = CASES[case]
    model, ids = build(sequence_parallel=sequence_parallel), batch()[0]
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2, 32, 16, generator=generator)[rank]
    hidden = torch.randn(SEQ, 2, 16, generator=generator)
    teacher = gather_from_tensor_model_parallel_region(hidden @ weight.t()).transpose(0, 1)
    z = run(model, runtime_gather_output=True).div(TEMPERATURE).log_softmax(-1)
    expected = expect(z, ids, teacher.div(TEMPERATURE).log_softmax(-1))
    weights = torch.rand_like(expected)
    stock = grads_of(model, expected, weights)
    own = hidden.chunk(2)[rank] if sequence_parallel else hidden
    processor = make(weight, own)
    with patched(), counting_logits(model.output_layer) as made:
        found = run(model, output_processor=processor)
        (counters,) = fusion_report().models
        assert counters.read_outs == 1
        first = found[0] if isinstance(found, tuple) else found
        fused = grads_of(model, first, weights)
    assert not made
    torch.testing.assert_close(first, expected, rtol=2e-6, atol=2e-6)
    # A divergence's gradient is a difference of probabilities: their last bits weigh more.
    assert_same(fused, stock, 5e-6 if case == "divergence" else ROUNDING)
    if case == "top_k":
        torch.testing.assert_close(z.gather(-1, found[1]), expected)


@ranks(2)
def test_log_probs_of_whole_sequences_under_context_parallelism():
    ids = batch()[0]
    with model_parallel():
        logits = one_gpt(spec=gpt_block_spec)(ids, batch()[2], causal_mask(SEQ))
        z = logits.log_softmax(-1)
    with model_parallel(cp=2), patched():
        model = one_gpt(spec=gpt_block_spec)
        parts = SequenceParts(context_parallel_group())
        tokens, positions = (parts.split(x, 1) for x in (ids, batch()[2]))
        found, entropy = model(tokens, positions, None, output_processor=NextTokenLogProbs(return_entropy=True))
        # The group is asked of the model, not of Megatron.
        asked, real = [], model_log_probs.context_parallel_group
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_log_probs, "context_parallel_group", lambda own: asked.append(own) or real(own))
            model.cp_group = parts.group
            again = model(tokens, positions, None, output_processor=NextTokenLogProbs())
        assert asked == [parts.group]
        assert asked[0] is not None
        torch.testing.assert_close(again, found)
    torch.testing.assert_close(found, log_probs(z, ids, None), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy, -(z.exp() * z).sum(-1)[:, :-1], rtol=2e-6, atol=2e-6)


@grouped(1)
def test_refusals():
    with patched():
        model, labels = tiny_hybrid(), batch()[1]
        with pytest.raises(ValueError, match="labels are given together with output_processor.* pass labels=None"):
            run(model, labels, output_processor=ReadOuts(readouts=[TopK(2)]))
