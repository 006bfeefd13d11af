"""The documentation's pages: their code runs, and what their tables and quoted messages say is true."""

import csv
import importlib.util
import re
import sys
from collections import Counter
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PhiConfig, PhiForCausalLM

from megatron_ext import LmHead, LogProbs, reference
from megatron_ext.megatron.fusion_report import fusion_report
from tests.dtensor.models import SIZES, make
from tests.gpt import VOCAB, LoRALinear, causal_mask, model_parallel
from tests.megatron.patching import SEQ, assert_same, batch, grads_of, one_gpt, patched, run, unpatch
from tests.pages import DOCS, ROOT, blocks, python_blocks, section
from tests.programs import python
from tests.ranks import ranks

sys.path.insert(0, str(DOCS / "hooks"))
from error_messages import MARK, messages

README = ROOT / "README.md"


def test_quoted_messages_are_those_of_the_package():
    texts = {message.text for message in messages()}
    assert len(texts) > 400
    for one in ("teacher_topk_indices has an id twice", "mask has a weight below 0"):  # faults that travel first
        assert any(one in text for text in texts)
    page, mark, _ = (DOCS / "troubleshooting.md").read_text().partition(MARK)
    assert mark
    quoted = re.findall(r"^\| `([^`]*)` \|", page, re.M)
    assert len(quoted) > 60
    for quote in quoted:
        assert any(quote in text for text in texts), f"no error of the package says {quote!r}"


def test_performance_tables_are_the_measured_rows():
    tables = re.findall(
        r"<!-- (benchmarks/results/\S+): (.*) -->\n((?:\|.*\n)+)", (DOCS / "performance.md").read_text()
    )
    assert len(tables) >= 10
    for file, case, table in tables:
        with (ROOT / file).open() as rows:
            measured = {(row["impl"], row["metric"]): row["p50"] for row in csv.DictReader(rows) if row["case"] == case}
        header, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
        for head, *cells in lines:
            for metric, cell in zip(header[1:], cells, strict=True):
                value = measured.get((head, metric))
                shown = "" if value is None else f"{float(value):.{len(cell.partition('.')[2])}f}"
                assert cell == shown, f"{file}: {case}, {head}, {metric}"


# Blocks of Python on each page that a test runs: those of this file, of tests/megatron/test_page.py, of
# tests/dtensor/test_pages.py and of tests/head/test_read_outs_page.py. One that is not run is called a fragment in the
# line before it.
RUN = {
    "README.md": 9,
    "docs/api/read_outs.md": 6,
    "docs/exactness.md": 3,
    "docs/fsdp2.md": 3,
    "docs/getting_started.md": 5,
    "docs/hugging_face.md": 1,
    "docs/index.md": 2,
    "docs/megatron.md": 2,
    "docs/nccl_rules.md": 1,
    "docs/numerics.md": 2,
    "docs/one_gpu.md": 2,
    "docs/pipeline.md": 1,
    "docs/plug_in.md": 10,
    "docs/rl.md": 5,
    "docs/trainer.md": 2,
}


def test_every_block_of_python_is_run_or_called_a_fragment():
    pages = [README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    found = {}
    for page in pages:
        before, *parts = re.split(r"^```python\n", page.read_text(), flags=re.M)
        count = 0
        for part in parts:
            count += "fragment" not in before.strip().splitlines()[-1]
            before = part
        if count:
            found[str(page.relative_to(ROOT))] = count
    assert found == RUN


# What a program prints stands in blocks called `text`: on each page, the test that runs the program and compares.
PRINTED = {
    "README.md": ["tests/test_readme.py::test_table_of_the_demo_is_what_it_prints"],
    "docs/debug_a_difference.md": ["tests/verify/test_two_runs.py::test_page_shows_the_table_that_is_printed"],
    "docs/faq.md": ["tests/memory/test_memory.py::test_page_shows_the_table_that_is_printed"],
}


def test_what_a_program_prints_is_held_by_a_test():
    """Tables of Markdown that programs print are held by `tests/benchmarks`, and by the test of measured rows here."""
    pages = [README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    found = Counter(str(p.relative_to(ROOT)) for p in pages for name, _ in blocks(p.read_text()) if name == "text")
    assert found == {page: len(tests) for page, tests in PRINTED.items()}
    for test in chain(*PRINTED.values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_the_loop_of_the_page_about_rl_runs():
    given = {}
    of_the_model, of_hidden_states = python_blocks(section(DOCS / "rl.md", "Your own loop"))
    (scored,) = python_blocks(section(DOCS / "rl.md", "Scoring what was sampled"))
    for code in (of_the_model, of_hidden_states, scored):
        exec(code, given)
        assert given["loss"].requires_grad
    logits = given["policy"](given["tokens"]).logits[:, :-1] / 0.7
    whole = logits.log_softmax(-1).gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(given["old"], whole)
    inside = given["sampled"][given["kept"] > 0]
    assert (inside > whole[given["kept"] > 0]).all()  # the filter leaves the others' probability to them
    assert given["policy"].lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2", "granite", "cohere"])
def test_heads_of_models_that_change_their_logits(family):
    """Heads of the page about RL give the model's log-probabilities; the weight alone gives those of Llama only."""
    rows = re.findall(r"\((\w+ ?\d?)\) \| `(.*)` \|$", section(DOCS / "rl.md", "Your own loop"), re.M)
    torch.manual_seed(0)
    if family == "phi":
        policy = PhiForCausalLM(PhiConfig(**SIZES | {"num_key_value_heads": 4}))
        torch.nn.init.normal_(policy.lm_head.bias)
    else:
        policy = make(family)
    tokens = torch.randint(policy.config.vocab_size, (2, 8))
    with torch.no_grad():
        expected = reference.log_probs(policy(tokens).logits[:, :-1], tokens[:, 1:])
        hidden = policy.base_model(tokens).last_hidden_state[:, :-1]
        lines = {name.lower().replace(" ", ""): code for name, code in rows}
        head = eval(lines[family], {"LmHead": LmHead, "policy": policy})
        found, of_weight = (
            (one if isinstance(one, LmHead) else LmHead(one)).read(hidden, LogProbs(tokens[:, 1:]))
            for one in (head, policy.lm_head.weight)
        )
    torch.testing.assert_close(found, expected)
    assert (family == "llama") == torch.allclose(of_weight, expected, atol=1e-4)


def test_the_lines_for_a_laptop():
    laptop = python_blocks(section(README, "Megatron-Core on a laptop"))
    assert len(laptop) == 1
    inside = "print(parallel_state.get_tensor_model_parallel_rank(), torch.empty(1, device='cuda').device)"
    inside += "; torch.distributed.barrier()"  # rank 0 has the store that the other still asks
    done = python("-c", laptop[0].replace("...", inside), ranks=2)
    assert sorted(done.stdout.splitlines()) == ["0 cpu", "1 cpu"], done.stderr
    rules = python_blocks(section(DOCS / "nccl_rules.md", "Switch it on"))
    assert len(rules) == 1
    exchange = "x = torch.ones(2)\ntorch.distributed.all_reduce(x)\nprint(x.tolist())\n"
    done = python("-c", f"import torch\n{rules[0]}{exchange}", ranks=2)
    assert done.stdout.splitlines() == ["[2.0, 2.0]"] * 2, done.stderr
    shared = python_blocks(section(DOCS / "pipeline.md", "Using it"))
    # The README's lines, which tests/megatron/test_page.py runs.
    assert [block.split() for block in shared] == [
        ["from", "megatron_ext.experimental", "import", "pipeline_vocabulary", "pipeline_vocabulary.share_vocabulary()"]
    ]


def run_blocks(text: str, names: dict | None = None, least: int = 1) -> dict:
    names = {} if names is None else names
    blocks = python_blocks(text)
    assert len(blocks) >= least
    for block in blocks:
        exec(block, names)
    return names


def test_numerics():
    run_blocks((DOCS / "numerics.md").read_text(), least=2)
    run_blocks((DOCS / "exactness.md").read_text(), least=3)


@pytest.mark.slow
def test_getting_started():
    """Lines of the page run from the first to the last in one program, as it says, on two ranks."""
    blocks = python_blocks((DOCS / "getting_started.md").read_text())
    assert len(blocks) == 5
    done = python("-c", "\n".join([*blocks, "print('reached', loss.sum().item())"]), ranks=2)
    assert done.returncode == 0, done.stderr
    reached = re.findall(r"^reached (.*)$", done.stdout, re.M)
    assert len(reached) == 2
    assert reached[0] == reached[1]


def head_inputs() -> dict:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(10, 8)
    labels = torch.randint(10, (2, 6))
    shard = weight.chunk(2)[dist.get_rank()].clone().requires_grad_()
    return {
        "hidden": hidden,
        "weight_shard": shard,
        "labels": labels,
        "group": dist.group.WORLD,
        "advantages": torch.tensor([1.0, -0.5]),
        "mask": torch.ones(2, 6),
        "expected": reference.cross_entropy(hidden.double() @ weight.double().t(), labels),
    }


@ranks(2)
def test_a_loop_of_your_own():
    """The lines of the home page and of "Plug it in", on two shards of a vocabulary."""
    names = head_inputs()
    loop = [section(DOCS / "plug_in.md", "A loop of your own"), section(DOCS / "index.md", "Plug it in")]
    run_blocks(loop[0], names)
    torch.testing.assert_close(names["loss"], names["expected"].float())
    torch.testing.assert_close(names["log_probs"], -names["loss"])
    # At the policy that the advantages are of, each ratio is 1.
    torch.testing.assert_close(names["policy_loss"].detach(), -names["advantages"].mean())
    _, own_loss = python_blocks(loop[1])
    exec(own_loss, names)
    wanted = torch.autograd.grad(names["expected"].mean(), names["hidden"])[0]
    torch.testing.assert_close(names["hidden"].grad, wanted.float())


@ranks(2)
def test_the_heads_and_losses_lines():
    names = head_inputs()
    run_blocks(section(README, "The head"), names)
    torch.testing.assert_close(names["loss"], names["expected"].float())
    expected = names["expected"].float().detach()
    policies, distillation = python_blocks(section(DOCS / "rl.md", "Losses"))
    exec(python_blocks(section(README, "RL"))[1], names)
    torch.testing.assert_close(names["log_probs"].detach(), -expected)
    of_policies = {}
    exec(policies, of_policies)
    for found in (names, of_policies):
        # At the policy that the advantages are of, each ratio is 1, and nothing diverges from the reference.
        torch.testing.assert_close(found["loss"].detach(), -found["advantages"].mean())
    exec(distillation, {})


@ranks(2)
def test_the_lines_about_other_losses_and_log_probabilities():
    losses, read_outs = python_blocks(section(DOCS / "megatron.md", "The fused head in a language model"))
    with model_parallel(tp=2):
        names = {}
        exec(losses, names)
        ids, labels, positions = batch()
        stock, ours = one_gpt(tied=False), one_gpt(spec=names["spec"], tied=False)
        mask = causal_mask(SEQ)
        logits = run(stock, runtime_gather_output=True).double()
        expected = logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
        found = run(ours, labels)
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=2e-6
        )  # without the z-loss, its gradient with it
        wanted = grads_of(stock, expected + 1e-4 * logits.logsumexp(-1) ** 2)
        ours_by_name = grads_of(ours, found)
        worst = max((ours_by_name[name] - grad).abs().max() / grad.abs().max() for name, grad in wanted.items())
        assert worst < 5e-6
        whole = torch.randn(VOCAB, 16)
        names |= {"tokens": ids, "positions": positions, "mask": mask, "hidden": torch.randn(SEQ, 2, 16)}
        names |= {"model": stock, "weight": whole.chunk(2)[dist.get_rank()]}
        with patched():
            exec(read_outs.replace("TopK(64)", "TopK(8)"), names)
        next_ids = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(names["log_probs"].double(), next_ids, rtol=0, atol=2e-6)
        torch.testing.assert_close(names["values"].double(), logits.log_softmax(-1).topk(8)[0], rtol=0, atol=2e-6)
        teacher = (names["hidden"] @ whole.t()).double().transpose(0, 1).log_softmax(-1)
        divergence = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
        torch.testing.assert_close(names["kl"].double(), divergence, rtol=2e-6, atol=2e-6)


@ranks(2)
def test_the_lines_for_megatron():
    patch, report, unpatch_again, substitute = python_blocks(section(DOCS / "plug_in.md", "Megatron-Core"))
    home = python_blocks(section(DOCS / "index.md", "Plug it in"))[0]
    with model_parallel(tp=2):
        from megatron.core import tensor_parallel
        from megatron.core.models.gpt import GPTModel

        arguments = batch()[1]
        model = one_gpt(tied=False)
        loss = run(model, arguments)
        for lines in (patch, home):
            stock = GPTModel._postprocess
            try:
                exec(lines, {})
                assert GPTModel._postprocess is not stock
                torch.testing.assert_close(run(model, arguments), loss, rtol=1e-5, atol=1e-6)
                exec(report, {})
                exec(unpatch_again, {})
                assert GPTModel._postprocess is stock
            finally:
                unpatch()
        del model
        layer = tensor_parallel.ColumnParallelLinear
        exec(substitute, {})
        assert tensor_parallel.ColumnParallelLinear is layer


@ranks(1)
def test_the_lines_for_megatron_bridge():
    (lines,) = python_blocks(section(DOCS / "plug_in.md", "Megatron-Bridge"))
    with model_parallel():
        model, labels = one_gpt(tied=False), batch()[1]
        block = model.decoder.layers[0].mlp
        block.linear_fc1 = LoRALinear(block.linear_fc1)
        expected = torch.nn.functional.cross_entropy(run(model).transpose(1, 2), labels, reduction="none")
        wanted = grads_of(model, expected)
        try:
            exec(lines, {})
            found = run(model, labels)
            grads = grads_of(model, found)
            assert fusion_report().models[-1].losses_fused == 1
        finally:
            unpatch()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert_same(grads, wanted)


@pytest.mark.slow
@ranks(2)
def test_the_lines_for_hugging_face():
    from tests.dtensor.models import VOCAB, make

    tokens = torch.arange(2 * 8).view(2, 8) % VOCAB
    model = make("llama")
    logits = model.double()(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    given = {"torch": torch, "device": "cpu", "dp": 1, "cp": 1, "tp": 2, "model": make("llama"), "tokens": tokens}
    names = run_blocks(section(DOCS / "plug_in.md", "Hugging Face"), given)
    # bf16 errs by hundredths, and the losses differ by tenths.
    torch.testing.assert_close(names["loss"][:, :-1].double(), expected.view(2, 7), rtol=0, atol=0.05)
    assert expected.std() > 0.2
    assert all(parameter.grad is not None for parameter in names["model"].parameters())

    readme = section(README, "Hugging Face models, and a policy worker").replace('"cuda"', '"cpu"')
    given |= {"init_device_mesh": init_device_mesh, "model": make("llama")}
    names = run_blocks(readme, given)
    torch.testing.assert_close(names["loss"][:, :-1].double(), expected.view(2, 7), rtol=0, atol=0.05)
    given = {"torch": torch, "mesh": names["mesh"], "model": make("llama"), "tokens": tokens}
    names = run_blocks((DOCS / "hugging_face.md").read_text(), given)
    torch.testing.assert_close(names["log_probs"][:, :-1].double(), -expected.view(2, 7), rtol=0, atol=0.05)


@pytest.mark.parametrize("framework", ["NeMo-RL", "verl", "TRL"])
def test_the_lines_for_a_framework(framework, monkeypatch):
    """Lines of a framework that is not installed say so; the frameworks' own tests show what `apply()` does."""
    name = framework.lower().replace("-", "_")
    apply = python_blocks(section(DOCS / "plug_in.md", framework))[0]
    assert apply.split() == ["import", f"megatron_ext.integrations.{name}", f"megatron_ext.integrations.{name}.apply()"]
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package, *more: None if package == name else found(package, *more)
    )
    with pytest.raises(ImportError, match=f"{name} is not installed: apply"):
        exec(apply, {})
