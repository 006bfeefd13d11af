"""Fine-tuning in every layout next to a plain loop over stock transformers, and the program as a user starts it."""

import json

import finetune_hf
import hf_directory
import pytest
import text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.test_programs import FINETUNE, ROOT, TORCHRUN, run
from tests.ranks import ranks

SMALL = (
    "--hidden-size 64 --layers 1 --vocab-size 300 --seq-length 25 --global-batch-size 4 --steps 4 "
    f"--data {ROOT / 'LICENSE'}"
)


def parse(words, world_size=None):
    args = finetune_hf.parse_arguments(f"{SMALL} {words}".split())
    finetune_hf.check_arguments(args, world_size or dist.get_world_size())
    return args


def finetune(words):
    return finetune_hf.finetune(parse(words), torch.device("cpu"))


def samples_of(args, tokenizer):
    """Samples to train on, and samples held out."""
    tokens = hf_directory.tokenize(text.documents(args.data), tokenizer)
    held_out = max(int(finetune_hf.HELD_OUT * len(tokens)), args.seq_length + 1)
    return (text.Samples(part, args.seq_length, args.seed) for part in (tokens[:-held_out], tokens[-held_out:]))


def stock(words):
    """The losses of the same run: one process, transformers' own attention and logits, torch's cross entropy."""
    args = finetune_hf.parse_arguments(f"{SMALL} {words}".split())
    tokenizer = hf_directory.new_tokenizer(text.documents(args.data), args.vocab_size)
    samples, _ = samples_of(args, tokenizer)
    model = hf_directory.new_model(args.hidden_size, args.layers, args.vocab_size, not args.untied, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    losses = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - 0.9 * step / args.steps)
        batch = torch.stack([samples[step * args.global_batch_size + i] for i in range(args.global_batch_size)])
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize(
    "words",
    [
        "--tensor-parallel-size 2",
        "--tensor-parallel-size 2 --context-parallel-size {half} --sequence-parallel --untied",
        "--context-parallel-size {all} --activation-checkpointing",
        "",
    ],
)
def test_ranks_train_as_plain_transformers_do(words):
    ranks = dist.get_world_size()
    words = words.format(half=ranks // 2, all=ranks)
    torch.testing.assert_close(finetune(words)["losses"], stock(words), rtol=2e-6, atol=0)


@pytest.mark.slow
@ranks(4)
def test_a_run_goes_on_in_another_layout(tmp_path):
    whole = finetune(f"--tensor-parallel-size 2 --save {tmp_path} --save-interval 2")["losses"]
    for layout in ("--tensor-parallel-size 2 --context-parallel-size 2", ""):
        rest = finetune(f"{layout} --load {tmp_path / 'step_2'}")["losses"]
        torch.testing.assert_close(rest, whole[2:], rtol=5e-7, atol=0)
    with pytest.raises(ValueError, match="4 steps behind it"):
        finetune(f"--load {tmp_path / 'step_4'}")


def held_out_loss(directory, args):
    """Loss of stock transformers on held-out samples, with the model of a directory."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    _, samples = samples_of(args, tokenizer)
    count = args.global_batch_size * finetune_hf.EVALUATION_BATCHES
    batch = torch.stack([samples[i] for i in range(count)])
    with torch.no_grad():
        return F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()).item()


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("words", ["", "--untied"])
def test_transformers_loads_what_was_exported_and_so_do_we(tmp_path, words):
    words = f"{words} --tensor-parallel-size 2"
    metrics = finetune(f"{words} --export {tmp_path / 'model'}")
    dist.barrier()
    expected = held_out_loss(tmp_path / "model", parse(words))
    assert metrics["held_out_after"] == pytest.approx(expected, rel=2e-6)
    again = finetune(f"--model {tmp_path / 'model'}")
    assert again["held_out_before"] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--tensor-parallel-size 3", "3 x 1 = 3: it must divide the number of ranks, which is 4"),
        ("--tensor-parallel-size 2 --context-parallel-size 4", "2 x 4 = 8: it must divide"),
        ("--global-batch-size 6", r"--global-batch-size is 6: .* 4 ranks / 1 = 4"),
        ("--seq-length 0", "--seq-length is 0: it must be above 0"),
        ("--hidden-size 48", "a multiple of 32"),
        ("--vocab-size 200", "a vocabulary of 257"),
        ("--save-interval 2", "without --save DIR"),
        ("--data nothing.txt", "'nothing.txt', which is not a file"),
        (f"--export {__file__}", "--export writes to '.*py': File exists; give a folder that can be written"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words, 4)


@ranks(1)
def test_sequences_and_models_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="knows positions up to 2048"):
        finetune("--seq-length 2049")
    (tmp_path / "short.txt").write_text("too short\n")
    with pytest.raises(ValueError, match="fewer than seq_length"):
        finetune(f"--data {tmp_path / 'short.txt'}")
    with pytest.raises(ValueError, match="which has no config.json"):
        finetune(f"--model {tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="of which no model and tokenizer can be loaded"):
        finetune(f"--model {tmp_path}")


@pytest.mark.slow
def test_the_program_learns_and_goes_on_in_one_process(tmp_path):
    launch = [*TORCHRUN, FINETUNE]
    words = "--global-batch-size 8 --seq-length 64 --learning-rate 6e-3"
    more = "--tensor-parallel-size 2 --save run --save-interval 110 --export model --metrics metrics.json"
    done = run(*launch, *words.split(), *more.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "120/120" in done.stderr
    assert "Warning" not in done.stderr
    assert "dp 1 x cp 1 x tp 2: held-out loss" in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["held_out_after"] < 0.8 * metrics["held_out_before"]
    more = "--load run/step_110 --metrics alone.json"
    alone = run(*launch[:1], FINETUNE, *words.split(), *more.split(), cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    found = json.loads((tmp_path / "alone.json").read_text())["losses"]
    torch.testing.assert_close(found, metrics["losses"][110:], rtol=5e-7, atol=0)
