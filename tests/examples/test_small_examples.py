"""The small examples, as functions against plain PyTorch and stock Megatron, and as programs."""

import re

import patch_gpt
import pipeline_stage
import pipeline_vocabulary
import pytest
import replace_loss
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report
from tests.examples import EXAMPLES
from tests.gpt import model_parallel
from tests.programs import python
from tests.ranks import ranks

pytestmark = pytest.mark.slow

HYBRID = str(EXAMPLES / "pretrain_hybrid.py")


def assert_learns_alike(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert losses[-1] < losses[0] - 0.1


@ranks(1, 2, 3)
def test_replacing_the_loss_changes_no_loss():
    assert_learns_alike(replace_loss.train(fused=True), replace_loss.train(fused=False))


@ranks(1, 2)
@pytest.mark.parametrize("fsdp2", [False, True], ids=["tensor parallel", "fsdp2"])
def test_patching_gpt_changes_no_loss(fsdp2):
    with model_parallel(tp=1 if fsdp2 else dist.get_world_size()):
        stock = patch_gpt.train(fsdp2)
        reset_fusion_report()
        patch_gpt.patch(chunk_tokens=16)
        try:
            assert_learns_alike(patch_gpt.train(fsdp2), stock)
        finally:
            patch_gpt.unpatch()
        found = fusion_report()
    assert (found.losses_fused, found.logits_made) == (patch_gpt.STEPS, 0)


def test_launcher_fuses_the_loss_of_an_unmodified_hybrid_script():
    launcher = ("-m", "megatron_ext.run", "--cpu")
    stock, ours = python(*launcher, HYBRID, ranks=2), python(*launcher, "--linear-ce", HYBRID, ranks=2)
    assert stock.returncode == ours.returncode == 0, stock.stderr + ours.stderr
    stock_losses, our_losses = (
        [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)] for done in (stock, ours)
    )
    assert len(stock_losses) == 10
    assert_learns_alike(our_losses, stock_losses)
    assert re.search(r"fused head: (Hybrid|Mamba)Model: 1 loss fused, logits made 0 times\n", ours.stderr)
    assert "Warning" not in ours.stderr


@ranks(4)
def test_stages_share_the_vocabulary(tmp_path):
    """Losses are stock's, each stage has as many parameters, and the picture is drawn."""
    with model_parallel(pp=4):
        (stock, spans, sizes), (ours, our_spans, our_sizes) = map(pipeline_vocabulary.train, (False, True))
        assert ours == pytest.approx(stock, rel=1e-6)
        assert max(sizes) > 5 * min(sizes)
        assert max(our_sizes) < 1.01 * min(our_sizes)
        if dist.get_rank() == 0:  # one folder for all ranks
            pipeline_vocabulary.draw({"stock": spans, "ours": our_spans}, tmp_path / "timeline.png")
            assert (tmp_path / "timeline.png").stat().st_size > 10000


@ranks(1, 2)
def test_a_pipeline_of_own_stages():
    """Loss and gradients of this rank's stage are those of the whole model in plain PyTorch."""
    with model_parallel(pp=dist.get_world_size()):
        stage = pipeline_stage.Stage()
        loss = pipeline_stage.step(stage)
    example = pipeline_stage
    whole = nn.Module()
    whole.layers = nn.ModuleList([example.seeded(i, nn.Linear, example.H, example.H) for i in range(example.LAYERS)])
    whole.embedding = example.seeded(100, nn.Embedding, example.V, example.H)
    whole.head = example.seeded(101, nn.Linear, example.H, example.V, bias=False)
    tokens = torch.cat(example.microbatches(), 1)
    x = whole.embedding(tokens[:-1])
    for layer in whole.layers:
        x = x + torch.tanh(layer(x))
    expected = F.cross_entropy(whole.head(x).flatten(0, 1), tokens[1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    wanted = dict(whole.named_parameters())
    assert any("layers" in name for name, _ in stage.named_parameters())
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-5, atol=1e-8, msg=name)


def printed(name: str, ranks: int, also: str = "") -> list[list[str]]:
    """The numbers of each line that the program prints, which has `also` in one."""
    done = python(str(EXAMPLES / name), ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert also in done.stdout
    return [re.findall(r"\d+\.\d+", line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name, also", [("replace_loss.py", ""), ("patch_gpt.py", "10 losses fused")])
def test_programs_print_both_losses(name, also):
    lines = [numbers for numbers in printed(name, 2, also) if numbers]
    assert len(lines) == 10
    assert all(float(stock) == pytest.approx(float(ours), abs=2e-5) for stock, ours in lines)


def test_the_pipeline_program_does_not_depend_on_its_stages():
    one, two = (printed("pipeline_stage.py", ranks) for ranks in (0, 2))
    assert len(one) == 10
    assert [float(x) for (x,) in one] == pytest.approx([float(x) for (x,) in two], abs=2e-5)


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}]
)
def test_hybrid_script_says_how_to_start_it(variables, monkeypatch):
    """The script is started by python, and as by torchrun on a machine without a GPU."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = python(HYBRID)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "run it by torchrun, which says who is who, and without a GPU by the launcher: "
        "torchrun --nproc-per-node 2 -m megatron_ext.run --cpu --linear-ce examples/pretrain_hybrid.py"
    )


def test_trl_sft_prints_equal_losses_stock_and_ours(tmp_path):
    pytest.importorskip("trl")
    done = python(str(EXAMPLES / "trl_sft.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step \d  TRL's head (\S+)  ours (\S+)$", done.stdout, re.M)
    stock, ours = zip(*(map(float, pair) for pair in found), strict=True)
    assert len(stock) == 8
    assert stock[-1] < stock[0] - 0.5
    assert ours == pytest.approx(stock, abs=2e-5)
    assert re.search(r"^  trl\S+\._ChunkedLogProbFunction: in \d modules, ran 8 times$", done.stdout, re.M)
    assert "own fused head runs" not in done.stderr
    assert not list(tmp_path.iterdir())
