"""Ranks that share the vocabulary decide alike, also when one alone has changed; others decide alone. None hangs."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.dtensor import use_fused_loss
from megatron_ext.dtensor.output import loss_proof
from megatron_ext.proof import Proof
from tests.dtensor.models import batch, check_step, error, loss_and_gradients, make, meshes, parallelize
from tests.dtensor.models import mean_loss as read
from tests.marks import slow
from tests.ranks import ranks, shared_folder

CHANGES = {
    "hook": lambda model: model.lm_head.register_forward_hook(lambda module, given, out: 2 * out),
    "loss": lambda model: setattr(model, "loss_function", lambda *args, **kwargs: 2 * ForCausalLMLoss(*args, **kwargs)),
    "logits": lambda model: setattr(model, "loss_function", with_squares),
}
_CHANGED = "has changed since its tensor-parallel ranks|the options are not the same on every rank"


def with_squares(logits, *args, **kwargs):
    """A loss that reads its logits."""
    return ForCausalLMLoss(logits, *args, **kwargs) + 0.1 * logits.float().square().mean()


def sharded(way, **sizes):
    model = parallelize(make("llama"), *meshes(**sizes))
    return use_fused_loss(model) if way == "use_fused_loss" else model


def check_two_reads(model, given, expected, true):
    """Two losses of a model, with all gradients, beside those of the plain one."""
    for _ in range(2):
        check_step(model, read("read", model, given), expected, true)


@pytest.mark.parametrize(
    "way, change",
    [("use_fused_loss", "hook"), ("use_fused_loss", "loss"), *slow(("use_fused_loss", "logits")), ("read", "hook")],
)
@ranks(2)
def test_a_change_on_one_rank_is_raised_on_every_rank(way, change):
    given, model = batch(2, 10), sharded(way, tp=2)
    expected = make("llama")(**given).loss
    assert error(read(way, model, given), expected) < 3e-6
    if dist.get_rank() == 1:
        CHANGES[change](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=_CHANGED):
            read(way, model, given)


def without_head(logits):
    """A forward that computes with the weight of the lm head, and never calls the head."""

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        weight = self.lm_head.weight
        shard = DTensor.from_local(2 * hidden @ weight.to_local().T, weight.device_mesh, [Shard(2)])
        found = {"its own shard": shard, "whole": torch.zeros(*hidden.shape[:-1], weight.shape[0])}
        return CausalLMOutput(loss=hidden.sum(), logits=found.get(logits))

    return forward


@pytest.mark.parametrize(
    "way, logits, sequence_parallel",
    [
        *(*slow(("use_fused_loss", None, False)), ("use_fused_loss", None, True)),
        *(("read", "its own shard", False), ("read", "whole", False)),
    ],
)
@ranks(2)
def test_a_forward_without_its_head_on_one_rank_is_told(way, logits, sequence_parallel):
    given = batch(2, 10)
    model = parallelize(make("llama"), *meshes(tp=2), sequence_parallel=sequence_parallel)
    model = use_fused_loss(model) if way == "use_fused_loss" else model
    read(way, model, given)
    changed = mock.patch.object(transformers.LlamaForCausalLM, "forward", without_head(logits))
    with changed if dist.get_rank() == 1 else contextlib.nullcontext():
        for _ in range(2):
            with pytest.raises(ValueError, match=_CHANGED):
                read(way, model, given)


@pytest.mark.parametrize("way, logits", [("use_fused_loss", None), ("read", "whole")])
@ranks(2)
def test_a_head_that_one_call_leaves_out_on_one_rank_is_told(way, logits):
    """A forward that decides by itself, in which no change is seen."""
    given, leaves_out = batch(2, 10), []
    own, other = transformers.LlamaForCausalLM.forward, without_head(logits)

    def forward(self, *args, **kwargs):
        return (other if leaves_out else own)(self, *args, **kwargs)

    with mock.patch.object(transformers.LlamaForCausalLM, "forward", forward):
        model = sharded(way, tp=2)
        before = read(way, model, given)
        leaves_out += [True] * dist.get_rank()
        for _ in range(2):
            with pytest.raises(ValueError, match=_CHANGED):
                read(way, model, given)
        leaves_out[:] = []
        assert torch.equal(read(way, model, given), before)
        leaves_out.append(True)
        read(way, model, given)


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
@ranks(2)
def test_a_change_in_a_captured_graph_is_told_on_every_rank(where):
    given, model = batch(2, 10), sharded("use_fused_loss", tp=2)
    read("use_fused_loss", model, given)
    if dist.get_rank() == 1 or where == "all ranks":
        CHANGES["hook"](model)
    with captured(), pytest.raises(ValueError, match=_CHANGED):
        read("use_fused_loss", model, given)


@ranks(2)
def test_a_change_in_a_captured_graph_leaves_logits_to_the_model():
    given, model = batch(2, 10), sharded("read", tp=2)
    expected, true = loss_and_gradients(make("llama"), **given)
    read("read", model, given)
    if dist.get_rank() == 1:
        model.config.tokens_seen = 1
    with captured():
        check_two_reads(model, given, expected, true)


@contextlib.contextmanager
def captured():
    """Stands for the capture of a CUDA graph, in which nothing can be compared."""
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True):
        yield


@pytest.mark.parametrize("proved", ["fused", "through logits"])
@ranks(2)
def test_a_users_error_in_a_changed_forward_stays_itself(proved):
    given, model = batch(2, 10), sharded("read", tp=2)
    if proved == "through logits":
        CHANGES["hook"](model)
    read("read", model, given)

    def fails(module, given, out=None):
        raise ValueError("a user's own error")

    model.lm_head.register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="a user's own error") as raised:
        read("read", model, given)
    assert "has changed" not in str(raised.value)


@ranks(2)
def test_a_label_refused_in_a_changed_model_stays_itself():
    given, model = batch(2, 10), sharded("read", tp=2)
    read("read", model, given)
    model.config.tokens_seen = 1
    given["labels"] = given["labels"].clone()
    given["labels"][0, 5] = 1000
    with pytest.raises(ValueError, match=r"holds \[1000\]") as raised:
        read("read", model, given)
    assert "has changed" not in str(raised.value)


@ranks(2)
def test_a_change_on_all_ranks_is_proved_anew():
    given = batch(2, 10)
    expected = make("llama")(**given).loss
    model = sharded("read", tp=2)
    assert error(read("read", model, given), expected) < 3e-6
    CHANGES["hook"](model)
    plain = make("llama")
    CHANGES["hook"](plain)
    expected, true = loss_and_gradients(plain, **given)
    check_two_reads(model, given, expected, true)
    model = sharded("use_fused_loss", tp=2)
    model(**given)
    CHANGES["loss"](model)
    torch.testing.assert_close(model(**given).loss, 2 * make("llama")(**given).loss)
    CHANGES["logits"](model)
    with pytest.raises(ValueError, match="its forward reads its logits by"):
        model(**given)


@ranks(2)
def test_a_change_of_config_on_all_ranks_stays_fused():
    given = batch(2, 10)
    expected, true = loss_and_gradients(make("llama"), **given)
    for way in ("use_fused_loss", "read"):
        model = sharded(way, tp=2)
        for value in (1, 2, 2):
            model.config.tokens_seen = value
            check_step(model, read(way, model, given), expected, true)


@pytest.mark.parametrize("fault", ["hook", "proof", "raises"])
@ranks(2)
def test_one_rank_without_a_proof_decides_for_all(fault):
    given, model = batch(2, 10), sharded("read", tp=2)
    expected, true = loss_and_gradients(make("llama"), **given)

    def fails(*args):
        if fault == "raises":
            raise RuntimeError("out of memory")
        return Proof.refused("differs on these tokens", 9)

    compare = loss_proof.compare
    if dist.get_rank() == 1:
        compare = fails if fault != "hook" else compare
        if fault == "hook":
            model.lm_head.register_forward_hook(lambda module, given, out: None)
    with mock.patch.object(loss_proof, "compare", compare):
        check_two_reads(model, given, expected, true)
        with pytest.raises(ValueError, match="call megatron_ext.dtensor.causal_lm_loss"):
            use_fused_loss(model)(**given)


@pytest.mark.parametrize("way", ["use_fused_loss", "read"])
@ranks(2)
def test_later_steps_send_what_the_model_sends(way):
    given, model = batch(2, 10), sharded(way, tp=2)
    counts = []
    for _ in range(3):
        with count_collectives() as sent:
            read(way, model, given).backward()
        counts.append(sum(sent.values()))
    assert counts[0] - counts[1] <= 2
    assert counts[1] == counts[2]


@pytest.mark.parametrize("wrap", ["parallelize", "fsdp2", *slow("fsdp2, the head by itself")])
@pytest.mark.parametrize("when", ["at the first call", "later"])
@ranks(2)
def test_data_parallel_ranks_prove_alone(wrap, when):
    """A rank that has other code keeps that, as stock does, and sends what the others send."""
    rank, given = dist.get_rank(), batch(2, 10)
    mine = {name: x[rank : rank + 1] for name, x in given.items()}
    plain, expected = make("llama"), []
    for i in range(2):
        plain.loss_function = with_squares if i else ForCausalLMLoss
        expected.append(plain(**{name: x[i : i + 1] for name, x in given.items()}).loss)
    sum(expected).div(2).backward()
    true = {name: p.grad for name, p in plain.named_parameters()}
    model = make("llama")
    if wrap == "parallelize":
        model = use_fused_loss(parallelize(model, *meshes(dp=2)))
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        if wrap != "fsdp2":
            fully_shard(model.lm_head)
        model = use_fused_loss(fully_shard(model))
    if when == "later":
        assert model(**mine).logits is None
    if rank == 1:
        CHANGES["logits"](model)
    for _ in range(2):
        found = model(**mine)
        assert (found.logits is None) == (rank == 0)
        check_step(model, found.loss, expected[rank], true)


@ranks(2)
def test_context_parallel_ranks_prove_alone():
    given, model = batch(2, 8), parallelize(make("llama"), *meshes(cp=2))
    expected, true = loss_and_gradients(make("llama"), **given)
    for _ in range(3):
        check_step(model, read("read", model, given), expected, true)
        if dist.get_rank() == 1:
            model.lm_head.register_forward_hook(lambda module, given, out: None)


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
@ranks(2)
def test_a_decoder_that_communicates_is_not_run_for_a_proof(kind):
    rank, given = dist.get_rank(), batch(2, 10)
    mine = {name: x[rank : rank + 1] for name, x in given.items()}
    plain, model = make(kind), make(kind)
    if kind == "mixtral":
        plain.config.output_router_logits = model.config.output_router_logits = True
    expected, _ = loss_and_gradients(plain, **mine)
    model = use_fused_loss(fully_shard(model))
    for _ in range(2):
        found = model(**mine)
        assert found.logits is None
        assert error(found.loss, expected) < 3e-6


def test_a_proof_of_one_process_sends_nothing():
    with count_collectives() as sent:
        use_fused_loss(make("llama"))(**batch()).loss.backward()
    assert not sent
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("way", ["use_fused_loss", *slow("read")])
@ranks(2)
def test_saving_a_model_between_two_steps_changes_nothing(way):
    """The first rank alone writes the config, with the dtype that its weights have, and the class."""
    given, model = batch(2, 10), sharded(way, tp=2)
    dtype = "dtype" if hasattr(model.config, "dtype") else "torch_dtype"  # the second one up to transformers 4.55
    setattr(model.config, dtype, None)  # as from_config leaves both
    model.config.architectures = None
    before, folder = read(way, model, given), shared_folder()
    model.save_pretrained(folder)
    assert torch.equal(before, read(way, model, given))
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    if dist.get_rank() == 0:  # as transformers' Trainer does
        model.save_pretrained(folder, state_dict=whole)
        assert getattr(model.config, dtype) == "float32"
    assert torch.equal(before, read(way, model, given))
