"""TRL's trainers with our log-probabilities: the same steps; and each function against plain PyTorch in fp64."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ext.integrations import substitution
from megatron_ext.integrations import trl as ours
from tests.integrations.stand_ins import applied

HAS_TRL = importlib.util.find_spec("trl") is not None

NAMES = ["selective_log_softmax", "selective_log_softmax_and_entropy", "_ChunkedLogProbFunction"]
# What TRL's versions take: the first up to 1.10, the others since.
KNOWN = {
    "selective_log_softmax": ["logits, index", "logits, index, temperature, row_mask"],
    "selective_log_softmax_and_entropy": ["logits, index, entropy_requires_grad, temperature, row_mask"],
    "_ChunkedLogProbFunction": [
        "hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs"
    ],
    "ChunkedDivergenceFunction": [
        "student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta, "
        "temperature, student_logit_scale, student_final_logit_softcapping, "
        "teacher_logit_scale, teacher_final_logit_softcapping"
    ],
}


def with_trl(test):
    """Slow for TRL's import alone."""
    return pytest.mark.slow(pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed")(test))


@pytest.fixture
def utils():
    from trl.trainer import utils

    yield utils
    ours.restore()


def truth(z, index, temperature=1.0):
    log_probs = (z.double() / temperature).log_softmax(-1)
    found = log_probs.gather(-1, index if index.dim() == z.dim() else index.unsqueeze(-1))
    return found.view(index.shape), -(log_probs.exp() * log_probs).sum(-1)


def test_ours_take_what_theirs_take():
    for seam in ours._replaced_names():
        function = seam.ours(None) if seam.made else seam.ours
        assert ", ".join(p.name for p in substitution.parameters(function)) == KNOWN[seam.name][-1]


def test_names_that_a_version_lacks_are_logged(caplog):
    seam = substitution.ReplacedName("json", "no_such_name", lambda: None, required=False)
    found = substitution.FrameworkSubstitution("json", lambda: [seam])
    with caplog.at_level("INFO", logger=substitution.__name__):
        found.apply()
    assert caplog.messages == ["this version of json does not have json.no_such_name"]


@with_trl
def test_what_is_replaced_is_what_this_version_has(utils):
    import trl

    assert trl.__version__ == "1.16.0", "look at the seams of the version that is installed"
    originals = {name: getattr(utils, name) for name in NAMES}
    for name, original in originals.items():
        assert ", ".join(p.name for p in substitution.parameters(original)) in KNOWN[name]
    from trl.experimental.orpo import orpo_trainer

    ours.apply()
    ours.apply()
    assert all(getattr(utils, name) is not originals[name] for name in NAMES)
    assert orpo_trainer.selective_log_softmax is utils.selective_log_softmax
    from trl.experimental.cpo import cpo_trainer  # imported while ours are there

    ours.restore()
    ours.restore()
    for module in (utils, orpo_trainer, cpo_trainer):
        assert module.selective_log_softmax is originals["selective_log_softmax"]
    assert all(getattr(utils, name) is originals[name] for name in NAMES)


@with_trl
def test_a_version_that_is_not_known_is_refused(utils, monkeypatch):
    """One function has parameters of another meaning: none is replaced."""

    def selective_log_softmax(logits, mask, index):
        pass

    monkeypatch.setattr(utils, "selective_log_softmax", selective_log_softmax)
    fused = utils._ChunkedLogProbFunction
    with pytest.raises(ValueError, match=r"trl 1\.16\.0 is not a version .* takes \(logits, mask, index\), ours"):
        ours.apply()
    assert utils.selective_log_softmax is selective_log_softmax
    assert utils._ChunkedLogProbFunction is fused
    monkeypatch.delattr(utils, "selective_log_softmax")
    with pytest.raises(ValueError, match=r"trl\.trainer\.utils has no selective_log_softmax"):
        ours.apply()
    assert utils._ChunkedLogProbFunction is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [None, 3])
def test_from_logits(dtype, k):
    z = torch.randn(2, 5, 40).to(dtype).requires_grad_()
    index, mask = torch.randint(40, (2, 5) if k is None else (2, 5, k)), torch.ones(2, 5).long()
    mask[1, 3:] = 0
    leaf = z.detach().double().requires_grad_()
    wanted, entropy = truth(leaf, index, 0.7)
    upstream = torch.randn(wanted.shape).double()
    found = ours.selective_log_softmax(z, index, temperature=0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-6)
    (grad,) = torch.autograd.grad(found, z, upstream.float())
    (dz,) = torch.autograd.grad(wanted, leaf, upstream, retain_graph=True)
    torch.testing.assert_close(grad, dz.to(dtype))
    if k is None:
        found, of_entropy = ours.selective_log_softmax_and_entropy(z, index, False, 0.7, mask)
        torch.testing.assert_close(found.double(), wanted.where(mask > 0, 0.0), rtol=0, atol=5e-6)
        torch.testing.assert_close(of_entropy.double(), entropy.where(mask > 0, 0.0), rtol=0, atol=5e-6)
        assert not of_entropy.requires_grad
        (grad,) = torch.autograd.grad(found, z, upstream.float())
        torch.testing.assert_close(grad, dz.where(mask.unsqueeze(-1) > 0, 0.0).to(dtype))


def test_masks_of_rows():
    """Masks have the shape of the ids, or a number for each token; a 0 anywhere leaves the token out."""
    z, index = torch.randn(2, 3, 40, requires_grad=True), torch.randint(40, (2, 3, 3))
    wanted, _ = truth(z.detach(), index)
    of_tokens = torch.tensor([[1, 0, 1], [0, 1, 1]])
    for mask in (of_tokens, of_tokens.unsqueeze(-1).expand(2, 3, 3).clone()):
        mask[..., 2] = 1
        if mask.dim() == 3:
            mask[0, 2, 1] = 0
        kept = mask != 0 if mask.dim() == 2 else (mask != 0).all(-1)
        found = ours.selective_log_softmax(z, index, row_mask=mask)
        torch.testing.assert_close(found.double(), wanted.where(kept.unsqueeze(-1), 0.0), rtol=0, atol=5e-6)
        (grad,) = torch.autograd.grad(found.sum(), z)
        assert torch.equal(grad.abs().sum(-1) > 0, kept)
    for given, wrong in (
        (index, torch.ones(2, 3, 2)),
        (index[..., 0], torch.ones(3)),
        (index[..., 0], torch.ones(2, 3, 1)),
    ):
        with pytest.raises(ValueError, match=r"row_mask has shape .* one number for each token, \(2, 3\)"):
            ours.selective_log_softmax(z, given, row_mask=wrong)


def check_fused_head(apply, softcap, scale, outputs):
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((7, 16), (50, 16), (50,))]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    z = nn.functional.linear(*doubles) * scale
    z = z if softcap is None else softcap * (z / softcap).tanh()
    targets = torch.randint(50, (7,))
    targets[0] = z[0].argmax()
    wanted, entropy = truth(z, targets, 0.7)
    found = apply(*leaves, targets, 0.7, 32, softcap, scale, outputs)
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=1e-5)
    made, expected = [found[0]], [wanted]
    if "entropy" in outputs:
        torch.testing.assert_close(found[1].double(), entropy, rtol=0, atol=1e-5)
        made, expected = [*made, found[1]], [*expected, entropy]
    if "is_top1" in outputs:
        assert torch.equal(found[4], targets == z.argmax(-1))
    log_probs = (z.detach() / 0.7).log_softmax(-1)
    unpulled = {"log_sum_sq_probs": log_probs.exp().square().sum(-1).log(), "mean_logits": z.detach().mean(-1) / 0.7}
    for name, value in zip(unpulled, found[2:4], strict=True):
        assert (value is not None) == (name in outputs)
        if value is not None:
            assert not value.requires_grad
            torch.testing.assert_close(value.double(), unpulled[name], rtol=0, atol=1e-5)
    upstream = torch.randn(7)
    grads = torch.autograd.grad(made, leaves, [upstream] * len(made))
    for grad, want in zip(grads, torch.autograd.grad(expected, doubles, [upstream.double()] * len(made)), strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "softcap, scale, outputs",
    [
        (None, 1.0, ("log_probs", "entropy", "is_top1")),
        (5.0, 1.0, ("log_probs", "entropy")),
        (None, 0.25, ("log_probs",)),
        (None, 0.25, ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")),
        (5.0, 0.25, ("log_probs", "log_sum_sq_probs", "mean_logits")),
    ],
)
def test_from_hidden_states(softcap, scale, outputs):
    check_fused_head(ours._fused_head(None).apply, softcap, scale, outputs)


def test_a_weight_of_another_dtype():
    """TRL casts weight and bias to the hidden states' dtype; gradients come back in their own."""
    x, w, b = torch.randn(7, 16).bfloat16(), torch.randn(50, 16), torch.randn(50)
    targets, upstream = torch.randint(50, (7,)), torch.randn(7)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    found = ours._fused_head(None).apply(*leaves, targets, 0.7, 32, None, 1.0, ("log_probs",))[0]
    doubles = [t.to(torch.bfloat16).double().requires_grad_() for t in (x, w, b)]
    wanted, _ = truth(nn.functional.linear(*doubles), targets, 0.7)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.06)  # logits are rounded to bf16
    grads = torch.autograd.grad(found, leaves, upstream)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    for grad, want in zip(grads, torch.autograd.grad(wanted, doubles, upstream.double()), strict=True):
        assert (grad.double() - want).norm() < 0.01 * want.norm()


def test_what_is_left_to_theirs():
    calls = []
    head = ours._fused_head(SimpleNamespace(apply=lambda *given: calls.append(given)))
    hidden, weight, targets = torch.randn(7, 16), torch.randn(50, 16), torch.zeros(7).long()
    for scale, outputs, why in (
        (0.0, ("log_probs",), r"logits are multiplied by 0\.0"),
        (1.0, ("log_probs", "varentropy"), r"the outputs varentropy are not known"),
    ):
        given = (hidden, weight, None, targets, 0.7, 32, None, scale, outputs)
        with pytest.warns(UserWarning, match=r"^TRL's own fused head runs, not megatron_ext's: .*" + why):
            head.apply(*given)
        assert calls.pop() == given
    weight.ds_id = 3  # DeepSpeed's mark of a parameter that is partitioned
    with pytest.warns(UserWarning, match=r"partitioned by DeepSpeed ZeRO-3; use another ZeRO stage"):
        head.apply(hidden, weight, None, targets, 0.7, 32)
    assert len(calls) == 1
    divergence = ours._fused_divergence(SimpleNamespace(apply=lambda *given: calls.append(given)))
    given = (hidden, torch.randn(50, 16), None) * 2 + (0.5, 1.0, 1.0, None, 0.0, None)
    with pytest.warns(UserWarning, match=r"own fused divergence runs, .* logits are multiplied by 0\.0"):
        divergence.apply(*given)
    assert calls.pop() == given


@with_trl
@pytest.mark.parametrize("outputs", [("log_probs", "entropy", "is_top1"), ("log_probs", "entropy", "mean_logits")])
def test_the_fused_head_in_its_place(utils, outputs):
    """Theirs meets the same expectations."""
    check_fused_head(utils._ChunkedLogProbFunction.apply, 5.0, 0.5, outputs)
    ours.apply()
    check_fused_head(utils._ChunkedLogProbFunction.apply, 5.0, 0.5, outputs)


def check_divergence(apply, beta, softcap, scale):
    """The teacher is wider, and has a scale and a cap of its own."""
    shapes = ((7, 16), (50, 16), (50,), (7, 24), (50, 24), (50,))
    leaves = [torch.randn(*shape, requires_grad=i < 3) for i, shape in enumerate(shapes)]
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    sides = ((doubles[:3], scale, softcap), (doubles[3:], 0.5, 3.0))
    student, teacher = (
        (z if cap is None else cap * (z / cap).tanh()).div(0.7).log_softmax(-1)
        for z, cap in ((nn.functional.linear(*side) * scale, cap) for side, scale, cap in sides)
    )
    if beta in (0, 1):
        of, to = (teacher, student) if beta == 0 else (student, teacher)
        wanted = (of.exp() * (of - to)).sum(-1)
    else:
        mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
        wanted = (1 - beta) * (student.exp() * (student - mixture)).sum(-1)
        wanted = wanted + beta * (teacher.exp() * (teacher - mixture)).sum(-1)
    found, entropy = apply(*leaves, beta, 0.7, scale, softcap, 0.5, 3.0)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(student.exp() * student).sum(-1), rtol=0, atol=1e-5)
    assert not entropy.requires_grad
    upstream = torch.randn(7)
    grads = torch.autograd.grad(found, leaves[:3], upstream)
    for grad, want in zip(grads, torch.autograd.grad(wanted, doubles[:3], upstream.double()), strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta, softcap, scale", [(0.0, None, 1.0), (0.3, 5.0, 0.25), (1.0, 5.0, 1.0)])
def test_divergence(beta, softcap, scale):
    check_divergence(ours._fused_divergence(None).apply, beta, softcap, scale)


@with_trl
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_in_its_place(utils, beta):
    """Theirs meets the same expectations."""
    from trl.kernels import chunked_divergence

    check_divergence(chunked_divergence.ChunkedDivergenceFunction.apply, beta, 5.0, 0.5)
    ours.apply()
    check_divergence(chunked_divergence.ChunkedDivergenceFunction.apply, beta, 5.0, 0.5)
    assert [row.calls for row in ours.report().replaced if "Divergence" in row.name] == [1]


def _parts(folder):
    """A tokenizer of words and a model of two layers, which lies in the folder: reference models are read there."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    numbers = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    words = ["<pad>", "<eos>", "what", "is", "the", "sum", "of", "it", "a", *numbers]
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), num_key_value_heads=2, **sizes, **special))
    model.save_pretrained(folder / "model")
    return Qwen2ForCausalLM.from_pretrained(folder / "model"), tokenizer


def _trained(make, model):
    """Losses of the steps and the weights after them."""
    torch.manual_seed(7)
    model = type(model).from_pretrained(model.name_or_path)
    trainer = make(model)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], model.state_dict()


def _same_steps(kind, rows, parts, folder, monkeypatch, options, **given):
    """Every call of the fused head is ours, those whose gradients train the policy too.

    `options`: of the config of TRL's trainers of this kind; `given`: what the trainer takes besides.
    """
    import trl
    from datasets import Dataset

    common = {"output_dir": str(folder), "max_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True}
    common |= {"save_strategy": "no", "bf16": False, "learning_rate": 1e-2, "seed": 3, "gradient_checkpointing": False}
    common["adam_epsilon"] = 1e-4  # a gradient that is rounding alone does not move its weight by the learning rate
    model, tokenizer = parts
    given |= {"processing_class": tokenizer, "train_dataset": Dataset.from_dict(rows)}

    def make(model):
        config = getattr(trl, f"{kind}Config")(**common, per_device_train_batch_size=4, **options)
        return getattr(trl, f"{kind}Trainer")(model=model, args=config, **given)

    counts = {"ours": 0, "theirs": 0}
    read, left = ours.head.LmHead.read, ours._left_to_theirs

    def counted(lm_head, hidden, *args, **kwargs):
        counts["ours"] += hidden.requires_grad and torch.is_grad_enabled()
        return read(lm_head, hidden, *args, **kwargs)

    def asked(*args):
        why = left(*args)
        counts["theirs"] += why is not None
        return why

    losses, weights = _trained(make, model)
    monkeypatch.setattr(ours.head.LmHead, "read", counted)
    monkeypatch.setattr(ours, "_left_to_theirs", asked)
    with applied(ours):
        our_losses, our_weights = _trained(make, model)
    assert counts == {"ours": 2, "theirs": 0}
    assert len(losses) == 2
    torch.testing.assert_close(our_losses, losses, rtol=1e-4, atol=1e-5)
    moved = [not torch.equal(weights[name], model.state_dict()[name]) for name in weights]
    assert any(moved)
    for name in weights:
        torch.testing.assert_close(our_weights[name], weights[name], rtol=1e-3, atol=2e-5)


PROMPTS = ["the sum of one two", "what is three four", "five six", "it is a sum"]
ROWS = {
    "DPO": {"prompt": PROMPTS, "chosen": ["three"] * 4, "rejected": ["nine ten"] * 4},
    "KTO": {"prompt": PROMPTS, "completion": ["three", "nine ten"] * 2, "label": [True, False] * 2},
    "SFT": {"text": PROMPTS},
}


@with_trl
@pytest.mark.parametrize(
    "kind, options",
    [("DPO", {}), ("DPO", {"use_weighting": True}), ("KTO", {}), ("SFT", {}), ("SFT", {"loss_type": "dft"})],
)
def test_steps(kind, options, tmp_path, monkeypatch):
    """DPO and KTO ask for the mean logit too, a weighted DPO (WPO) for the sum of squared probabilities."""
    _same_steps(kind, ROWS[kind], _parts(tmp_path), tmp_path, monkeypatch, options)


@with_trl
@pytest.mark.parametrize("kind, options", [("GRPO", {"temperature": 0.9}), ("RLOO", {})])
def test_online_steps(kind, options, tmp_path, monkeypatch):
    def reward(completions, **_):
        return [float(text.count("one")) - 0.1 * len(text) for text in completions]

    options = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1} | options
    rows = {"prompt": PROMPTS[:2] * 4}
    _same_steps(kind, rows, _parts(tmp_path), tmp_path, monkeypatch, options, reward_funcs=reward)


@with_trl
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_steps(beta, tmp_path, monkeypatch):
    """The student is distilled on its own answers."""
    model, tokenizer = _parts(tmp_path)
    torch.manual_seed(5)
    teacher = type(model)(model.config)
    options = {"beta": beta, "max_completion_length": 6, "temperature": 0.9}
    rows = {"prompt": PROMPTS * 2}
    _same_steps("Distillation", rows, (model, tokenizer), tmp_path, monkeypatch, options, teacher_model=teacher)
