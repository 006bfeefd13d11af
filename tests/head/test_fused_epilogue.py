"""`fused_epilogue`: products that take exponentials of their logits, which are not written."""

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks import plan
from benchmarks.implementations import fused_epilogue
from benchmarks.launches import EPILOGUE_INSTRUCTIONS
from megatron_ext.head import CrossEntropy, Entropy, LmHead, LogProbs, LoRA, TopK
from megatron_ext.head.call.gpu_properties import DEVICES
from megatron_ext.memory.fake_cuda import kernels
from tests.head.as_on_cuda import cuda_branches
from tests.head.hopper import recorded
from tests.programs import python
from tests.ranks import ranks

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(interpreted, reason="interpreted kernels are not compiled; the ordinary run does")
on_cpu = pytest.mark.skipif(not interpreted, reason="CPU tensors take Triton's passes where they are interpreted")
LABELS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "options, readout, width, message",
    [
        ({"softcap": 30.0}, LogProbs(LABELS), 16, "softcap is 30.0"),
        ({"bits": "batch"}, LogProbs(LABELS), 16, 'bits is "batch"'),
        ({"logit_dtype": torch.bfloat16}, LogProbs(LABELS), 16, "logit_dtype is torch.bfloat16"),
        ({"chunk_tokens": 64}, LogProbs(LABELS), 16, "chunk_tokens is 64"),
        ({"lora": LoRA(torch.zeros(2, 16).bfloat16(), torch.zeros(40, 2).bfloat16())}, Entropy(), 16, "lora is given"),
        ({}, TopK(5), 16, "TopK read more than sums of exponentials"),
        ({}, CrossEntropy(LABELS, label_smoothing=0.1), 16, "CrossEntropy with label_smoothing read more"),
        ({}, LogProbs(LABELS), 12, "hidden has 12 columns, no multiple of 8"),
        ({}, LogProbs(LABELS), 16, "hidden is on cpu, without Triton's kernels"),
    ],
)
def test_fused_epilogue_refuses_options_it_does_not_have(options, readout, width, message):
    head = LmHead(torch.zeros(40, width).bfloat16(), fused_epilogue=True, **options)
    with pytest.raises(ValueError, match=f"fused_epilogue is True and .*{message}.*leave fused_epilogue out"):
        head.read(torch.zeros(3, width).bfloat16(), readout)


def test_fused_epilogue_refuses_hidden_states_in_fp32():
    with pytest.raises(ValueError, match=r"computed in torch\.float32, not bfloat16"):
        LmHead(torch.zeros(40, 16), fused_epilogue=True).read(torch.zeros(3, 16), LogProbs(LABELS))


@pytest.mark.parametrize("margin, fused", [(8, False), (-1, True), (True, True), (1.5, True)])
def test_sm_margin_without_effect_is_refused(margin, fused):
    with pytest.raises(ValueError, match=rf"sm_margin is {margin} and fused_epilogue {fused}.*leave sm_margin out"):
        LmHead(torch.zeros(40, 16).bfloat16(), sm_margin=margin, fused_epilogue=fused)


@ranks(2)
@compiled
def test_a_fused_epilogue_refused_on_one_rank_is_told_to_all():
    """The other rank's exchange tells of it: neither waits."""
    head = LmHead(torch.zeros(40, 16).bfloat16(), dist.group.WORLD, fused_epilogue=dist.get_rank() == 0)
    with pytest.raises(ValueError, match="fused_epilogue is True|another rank"):
        head.read(torch.zeros(3, 16).bfloat16(), LogProbs(LABELS))


@pytest.mark.slow
def test_fused_epilogue_errs_no_more_than_plain_pytorch():
    """Values and gradients of the head at each cache, as on CUDA; interpreted."""
    done = python("-m", "tests.head.fused_products", interpreted=True, ignore_warnings=True)
    assert done.returncode == 0, done.stderr[-3000:]


# Tokens, columns, layout and logit scale. "reach": rows whose maximum is far from the first columns', made once more.
CASES = {
    "shards": (20, 300, "replicated", 1.0),
    "layouts": (20, 300, "sequence", 0.5),
    "reach": (20, 600, "replicated", 1.0),
    "frozen": (20, 300, "replicated", 1.0),
    "one": (1, 300, "replicated", 1.0),
    "nothing": (0, 300, "replicated", 1.0),
}


@ranks(2)
@on_cpu
@pytest.mark.parametrize("name", CASES)
def test_fused_epilogue_on_two_ranks_agrees_with_pytorch(name):
    """Values and gradients beside those in fp64, with z-loss, labels that do not count and labels of the other rank."""
    (tokens, columns, layout, scale), group, rank = CASES[name], dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).bfloat16() for n in (tokens, columns))
    labels, up = torch.randint(0, columns, (tokens,), generator=generator), torch.randn(3, tokens, generator=generator)
    labels[1::5] = -100
    if name == "reach":
        x[::2] *= 0.1
        w.view(2, 300, 16)[:, 256:] *= 8
    wide = x.double().requires_grad_(), w.double().requires_grad_()
    z = scale * wide[0] @ wide[1].t()
    assert ((z.amax(1) - z[:, :256].amax(1)) > 40).any() == (name == "reach")
    log_p, counts = z.log_softmax(-1), labels >= 0
    of_labels = counts * log_p.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    wanted = [counts * 0.01 * z.logsumexp(-1).square() - of_labels, of_labels, -(log_p.exp() * log_p).sum(-1)]
    grads = [*torch.autograd.grad(wanted, wide, [*up.double()])]
    shard = w.chunk(2)[rank].clone().requires_grad_(name != "frozen")
    own = (x.chunk(2)[rank] if layout == "sequence" else x).clone().requires_grad_()
    grads = [grads[0].chunk(2)[rank] if layout == "sequence" else grads[0], grads[1].chunk(2)[rank]]
    head = LmHead(shard, group, layout, cache=0.5, logit_scale=scale, fused_epilogue=True)
    values = head.read(own, CrossEntropy(labels, z_loss=0.01), LogProbs(labels), Entropy())
    leaves = [x for x in (own, shard) if x.requires_grad]
    found = [*values, *torch.autograd.grad(values, leaves, [*up])]
    for ours, theirs in zip(found, [*wanted, *grads[: len(leaves)]], strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= 0.01 * theirs.norm()


@on_cpu
def test_sm_margin_leaves_multiprocessors_free(monkeypatch):
    """Forward, with kept exponentials and without, and backward launch fewer programs and give the same numbers."""
    from triton.runtime.interpreter import InterpretedFunction

    from megatron_ext.head.kernels.epilogues import tiles

    run, programs = InterpretedFunction.run, []

    def noted(kernel, *args, grid, **kwargs):
        if kernel.fn.__name__ in ("product_statistics_kernel", "product_gradient_kernel"):
            programs.append((kernel.fn.__name__, grid[0]))
        return run(kernel, *args, grid=grid, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(tiles, "device_of", lambda x: DEVICES["H200"]._replace(multiprocessors=4))
    x, w, labels = torch.randn(300, 16).bfloat16(), torch.randn(600, 16).bfloat16(), torch.randint(0, 600, (300,))
    found = []
    for margin in (0, 3):
        programs.clear()
        for cache in (0.5, 0):
            leaf = w.clone().requires_grad_()
            head = LmHead(leaf, cache=cache, fused_epilogue=True, sm_margin=margin)
            value = head.read(x, LogProbs(labels))
            found.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
        assert {count for name, count in programs if name == "product_statistics_kernel"} == {
            4 - margin,
            min(3, 4 - margin),
        }
        assert min(count for name, count in programs if name == "product_gradient_kernel") <= 4 - margin
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)


def _compiled(x):
    return LmHead(torch.ones(300, 16).bfloat16(), fused_epilogue=True).read(x, LogProbs(LABELS))


@on_cpu
def test_compiled_fused_epilogue_is_the_plain_one():
    x = torch.randn(3, 16).bfloat16().requires_grad_()
    found = []
    for function in (_compiled, torch.compile(_compiled, fullgraph=True, backend="aot_eager")):
        value = function(x)
        found.append([value.detach(), *torch.autograd.grad(value.sum(), x)])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(interpreted, reason="interpreted kernels take CPU tensors")
def test_compiled_fused_epilogue_is_refused_on_cpu():
    with pytest.raises(ValueError, match="hidden is on cpu, without Triton's kernels"):
        torch.compile(_compiled, backend="eager")(torch.ones(3, 16).bfloat16())


@compiled
def test_launches_of_logits_made_again_are_an_eighth():
    """One product makes a block's logits, where eight products and passes did, at 16384 x 8192 x 152064 / 8 without
    kept exponentials. Blocks are larger in no more memory, since no logits lie beside them."""
    fused, peak = plan.plan(plan.B, fused_epilogue(0))
    made = [one for one in fused.launches if one.name == "product_gradient_kernel"]
    assert len(made) <= 8
    assert sum(one.flops for one in made) == 2 * plan.B.nvh
    assert not any(one.name in ("row_gradient_kernel", "long_row_kernel", "whole_row_kernel") for one in fused.launches)
    apart, peak_apart = plan.plan(plan.B, plan.NONE)
    assert sum(one.name == "row_gradient_kernel" for one in apart.launches) >= 72
    assert peak <= peak_apart


@compiled
def test_log_probs_without_gradient_write_no_logits():
    """The only product, at 8192 x 4096 x 128256, writes 12 bytes for each row and tile."""
    launches = plan.reads(plan.A)[f"read: {plan.LOG_PROBS}, fused epilogue"].launches
    products = [one for one in launches if one.flops]
    assert [one.name for one in products] == ["product_statistics_kernel"]
    assert products[0].written == 12 * 8192 * 501


@compiled
@pytest.mark.slow
def test_fused_epilogues_on_hopper():
    """Nothing is spilled, operands come by TMA, warp groups multiply, and epilogues take as few instructions a logit as
    the plan has; the budgets count also what few tiles run, those with a label's or the last columns."""
    from megatron_ext.head.kernels.epilogues.gradient import product_gradient
    from megatron_ext.head.kernels.epilogues.statistics import product_statistics

    tokens, width, columns = 1000, 256, 1280
    x, w = torch.zeros(tokens, width).bfloat16(), torch.zeros(columns, width).bfloat16()
    target, f, e = torch.zeros(tokens).long(), torch.zeros(tokens), torch.zeros(tokens, columns).bfloat16()
    bends = {"bias_V": torch.zeros(columns), "temperature": 0.7, "counted": columns}
    with cuda_branches(kernels), recorded() as found:
        for given, sums in (({"counted": columns}, {}), (bends, {"with_entropy": True, "with_hits": True})):
            for kept in (None, e):
                product_statistics(x, w, target, torch.zeros(5, tokens), f, kept, **given, **sums)
        product_gradient(x, w, target, f, e, counted=columns)
        product_gradient(x, w, target, f, e, scale_T=f, slope_T=f, **bends)
    counts, usual = [], []
    for launch in found:
        launch.check_spills()
        if launch.name in EPILOGUE_INSTRUCTIONS:
            text = [each for _, each in launch.instructions()]
            for needed, least in (("HGMMA.64x256x16.F32.BF16", 4), ("UTMALDG", 6)):
                assert sum(needed in each for each in text) >= least, (launch.name, needed)
            main = min((loop for loop in launch.loops() if any("HGMMA" in each for each in loop)), key=len)
            assert len(main) <= 100
            counts.append(len(text) / 128)
            usual.append((launch.name, (len(text) - launch.skipped()) / 128))
    # Statistics; the sample's, statistics with exponentials, the launch for rows far from the sample; the same with
    # all options; gradients, without options and with all.
    budgets = [15, 15, 18, 12, 22, 17, 27, 14, 11, 18]
    assert all(count <= budget for count, budget in zip(counts, budgets, strict=True)), counts
    for name, count in (*usual[:4], usual[8]):  # without options: the epilogue, and 1 of the main loop
        assert count <= EPILOGUE_INSTRUCTIONS[name] + 1, (name, count)
