import numpy as np
import pytest
import text
import torch


@pytest.fixture(scope="module")
def files():
    return [str(text.Path(text.__file__).parents[1] / "LICENSE")]


@pytest.mark.slow
def test_documents_are_pythons_own_or_the_users(files):
    own = text.documents()
    assert any("The assignment statement" in document or "Assignment statements" in document for document in own)
    assert sum(map(len, own)) > 5e6, "too little text for a vocabulary of 16384"
    assert text.documents(files) == [text.Path(files[0]).read_text(encoding="utf-8")]


def test_tokens_are_the_text(files):
    texts = [*text.documents(files), "naïve café, 数字 and \t tabs"]
    tokens, tokenizer = text.tokenize(texts, 512)
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() <= tokens.max() < 512
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "".join(t + text.END_OF_DOCUMENT for t in texts)
    again, _ = text.tokenize(texts, 512)
    assert np.array_equal(tokens, again)


def test_tokens_are_made_once(files, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CACHE", tmp_path)
    first = text.load_tokens(files, 300)
    monkeypatch.setattr(text, "tokenize", lambda *args: pytest.fail("tokenized again"))
    assert np.array_equal(text.load_tokens(files, 300), first)
    with pytest.raises(pytest.fail.Exception, match="tokenized again"):
        text.load_tokens(files, 301)


def test_an_epoch_has_each_sample_once_in_an_order_of_its_own():
    samples = text.Samples(np.arange(41, dtype=np.int32), seq_length=4, seed=0)
    assert samples.per_epoch == 10
    assert all(torch.equal(samples[i], samples[i][0] + torch.arange(5)) for i in range(10))
    first, second = ([int(samples[i][0]) for i in range(e, e + 10)] for e in (0, 10))
    assert sorted(first) == sorted(second) == list(range(0, 40, 4))
    assert first != second
    assert [int(samples[i][0]) for i in range(10)] == first, "going back an epoch"
    other_seed = text.Samples(samples.tokens, seq_length=4, seed=1)
    assert [int(other_seed[i][0]) for i in range(10)] != first


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicas_share_out_the_same_samples(ranks):
    samples = text.Samples(np.arange(401, dtype=np.int32), seq_length=4, seed=0)
    parts = [list(samples.microbatches(8, 8 // ranks, 2, rank, ranks)) for rank in range(ranks)]
    got = torch.cat([microbatch for part in parts for microbatch in part])
    assert sorted(map(tuple, got.tolist())) == sorted(tuple(samples[i].tolist()) for i in range(8, 24))


def test_too_little_text():
    with pytest.raises(ValueError, match="has 5 tokens, fewer than seq_length \\+ 1 = 9"):
        text.Samples(np.zeros(5, dtype=np.int32), seq_length=8, seed=0)
