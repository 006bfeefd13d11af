"""Sequences from the policy: drawn as training scores them, whatever the layout and the padding."""

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from megatron_ext import reference
from megatron_ext.policy import BatchedDataDict, DTensorPolicyWorker, MegatronPolicyWorker, NLLLoss
from megatron_ext.policy.config import read_config
from megatron_ext.policy.worker.sampling import Sampler, row_seeds, stopping
from tests.gpt import forget_megatron
from tests.marks import slow
from tests.policy.problems import VOCAB, plain_model, shard, tiny_batch, tiny_config, tiny_model
from tests.policy.test_megatron_worker import model_config
from tests.ranks import ranks

FILTERED = {"max_new_tokens": 6, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "_pad_token_id": 3}


def prompts(rows=5, positions=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([positions, 1, 4, 2, 6][:rows])
    inside = torch.arange(positions) < lengths[:, None]
    tokens = torch.randint(VOCAB, (rows, positions), generator=generator)
    return BatchedDataDict(input_ids=tokens.where(inside, 3), input_lengths=lengths)


def scored(config, output, temperature, top_k, top_p):
    """Log-probabilities of every generated token, by transformers' logits of one row after another, without padding."""
    model = plain_model(config) if not isinstance(config, torch.nn.Module) else config
    found = torch.zeros(output["output_ids"].shape)
    for row, end in enumerate(output["unpadded_sequence_lengths"].tolist()):
        begin = end - int(output["generation_lengths"][row])
        tokens = output["output_ids"][row : row + 1, :end]
        z = model(tokens).logits[:, :-1] / temperature
        found[row, begin:end] = reference.sampled_log_probs(z, tokens[:, 1:], top_k, top_p)[0, begin - 1 :]
    return found


@pytest.mark.parametrize("layout", ["tp", *slow("dp")])
@ranks(2)
def test_sampled_and_scored_log_probs_agree(layout):
    config = tiny_config(tp=2 if layout == "tp" else 1, generation=FILTERED)
    worker = DTensorPolicyWorker(config)
    data = prompts()
    with torch.no_grad():
        for greedy in (False, True):
            output = worker.generate(data, greedy, seed=5)
            true = scored(tiny_model(), output, 0.7, 20, 0.8)
            torch.testing.assert_close(output["logprobs"], true, rtol=1e-5, atol=1e-5)
    assert worker.generation.generator is None
    worker.train(shard(tiny_batch(), worker), NLLLoss())
    trained = AutoModelForCausalLM.from_config(tiny_model())
    trained.load_state_dict(dict(worker.iter_weights()))
    with torch.no_grad():
        output = worker.generate(data, seed=5)
        true = scored(trained, output, 0.7, 20, 0.8)
    torch.testing.assert_close(output["logprobs"], true, rtol=1e-5, atol=1e-5)
    worker.shutdown()


@ranks(1)
def test_rows_and_padding():
    """A row alone gets what it gets among others; prompts are kept, and what stands behind a row is padding."""
    worker = DTensorPolicyWorker(tiny_config(generation=FILTERED))
    data = prompts()
    worker.prepare_for_generation()
    output = worker.generate(data, seed=5)
    for row, length in enumerate(data["input_lengths"].tolist()):
        alone = worker.generate(data.slice(row, row + 1), seed=5, rows=[row])
        end = int(alone["unpadded_sequence_lengths"][0])
        assert end == int(output["unpadded_sequence_lengths"][row]) == length + 6
        assert torch.equal(alone["output_ids"][0, :end], output["output_ids"][row, :end])
        assert torch.equal(output["output_ids"][row, :length], data["input_ids"][row, :length])
        assert (output["output_ids"][row, end:] == 3).all()
        assert (output["logprobs"][row, length:end] < 0).all()
        assert (output["logprobs"][row, :length] == 0).all()
        assert (output["logprobs"][row, end:] == 0).all()
    again, other = worker.generate(data, seed=5), worker.generate(data, seed=6)
    assert torch.equal(again["output_ids"], output["output_ids"])
    assert not torch.equal(other["output_ids"], output["output_ids"])
    drawn = [worker.generate(data)["output_ids"].tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    worker.shutdown()
    assert worker.generation.generator is None


@ranks(1)
def test_stops():
    """A row ends with its stop token, which counts; greedy rows are those of transformers' own."""
    plain = plain_model(tiny_model())
    free = DTensorPolicyWorker(tiny_config(generation={"max_new_tokens": 6}))
    data = prompts()
    output = free.generate(data, greedy=True)
    with torch.no_grad():
        tokens = data["input_ids"][:1]
        for _ in range(6):
            tokens = torch.cat([tokens, plain(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(output["output_ids"][:1], tokens)
    free.shutdown()
    stop = int(tokens[0, 9])  # the third new one
    first = tokens[0, 7:].tolist().index(stop) + 1
    worker = DTensorPolicyWorker(tiny_config(generation={"max_new_tokens": 6, "stop_token_ids": [stop]}))
    stopped = worker.generate(data, greedy=True)
    assert int(stopped["generation_lengths"][0]) == first
    assert stopped["output_ids"][0, 7 : 7 + first].tolist() == tokens[0, 7 : 7 + first].tolist()
    for row, end in enumerate(stopped["unpadded_sequence_lengths"].tolist()):
        answer = stopped["output_ids"][row, int(data["input_lengths"][row]) : end].tolist()
        assert stop not in answer[:-1]
        assert len(answer) == 6 or answer[-1] == stop
    worker.shutdown()
    # Without stop_token_ids a row ends where the folder's generation_config.json says; nothing else of it counts.
    with tempfile.TemporaryDirectory() as folder:
        plain.generation_config = GenerationConfig(eos_token_id=[VOCAB - 1, stop], repetition_penalty=50.0)
        plain.save_pretrained(folder)
        worker = DTensorPolicyWorker(tiny_config(folder, generation={"max_new_tokens": 6}))
        again = worker.generate(data, greedy=True)
        for name in ("output_ids", "generation_lengths", "logprobs"):
            torch.testing.assert_close(again[name], stopped[name])
        worker.shutdown()
        Path(folder, "generation_config.json").write_text("{")
        with pytest.raises(ValueError, match="generation_config.json cannot be read .*mend or remove it"):
            DTensorPolicyWorker(tiny_config(folder))


@pytest.mark.slow
@ranks(2)
def test_from_megatron():
    config = tiny_config(model_config(), generation=FILTERED) | {"megatron_cfg": {"pipeline_model_parallel_size": 2}}
    worker = MegatronPolicyWorker(config)
    with torch.no_grad():
        output = worker.generate(prompts(), seed=5)
        true = scored(model_config(), output, 0.7, 20, 0.8)
    torch.testing.assert_close(output["logprobs"], true, rtol=1e-5, atol=1e-5)
    worker.shutdown()
    forget_megatron()


def test_tokens_are_drawn_by_their_probability():
    """A chi-square test of 5000 rows, that a wrong distribution fails: the bound is exceeded once in 10^6 times."""
    rows, settings = 5000, read_config(tiny_config(generation={"temperature": 0.5, "top_k": 4}))
    z_V = torch.tensor([1.0, 0.5, 0.2, 0.2, 0.2, -1.0, -2.0])
    sampler = Sampler(settings, row_seeds(1, range(rows)), torch.device("cpu"))
    drawn = sampler(torch.zeros(rows, 1), z_V.expand(rows, -1)).argmax(-1)
    kept = reference.kept(z_V / 0.5, 4)
    assert kept.tolist() == [True] * 5 + [False] * 2  # the fourth has an equal
    p_V = (z_V / 0.5).masked_fill(~kept, -torch.inf).softmax(-1)
    counts_V = torch.bincount(drawn, minlength=7)
    assert counts_V[5:].tolist() == [0, 0]
    expected = rows * p_V[:5]
    assert ((counts_V[:5] - expected) ** 2 / expected).sum() < 33.4  # 4 degrees of freedom
    torch.testing.assert_close(sampler.log_probs()[:, 0], p_V.log()[drawn])


@pytest.mark.parametrize(
    "generation, message",
    [
        ({}, "max_new_tokens is None"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2, "stop_strings": ["."]}, "stop_strings are set: .* set stop_token_ids"),
    ],
)
def test_settings_that_cannot_be(generation, message):
    with pytest.raises(ValueError, match=message):
        stopping({"generation": generation}, None)


@ranks(1)
def test_prompts_that_cannot_be():
    worker = DTensorPolicyWorker(tiny_config(generation={"max_new_tokens": 1}))
    data = prompts()
    worker.prepare_for_generation()
    for change, message in (
        ({"input_lengths": data["input_lengths"] * 0}, "must lie in 1 to 7"),
        ({"input_ids": data["input_ids"] + VOCAB}, "input_ids are"),
        ({"input_ids": data["input_ids"][0]}, r"must be a tensor of integers \[rows"),
    ):
        with pytest.raises(ValueError, match=message):
            worker.generate({**data, **change})
    with pytest.raises(ValueError, match="data lacks input_lengths"):
        worker.generate({"input_ids": data["input_ids"]})
    worker.shutdown()
