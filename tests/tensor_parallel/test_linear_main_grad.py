"""Weight gradients of the one linear function that go into `main_grad`, at once or later."""

import gc
import weakref

import pytest
import torch

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import drain_embedding_wgrad_compute
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from megatron_ext.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, numbers, piece, world
from tests.tensor_parallel.test_linear import LAYOUTS, D, N, S, cut


def with_main_grad(weight, *, listened=True, **marks):
    weight.requires_grad_()
    weight.main_grad = torch.ones(weight.shape, dtype=marks.pop("dtype", torch.float32))
    if listened:
        weight.grad_added_to_main_grad = False
    for name, value in marks.items():
        setattr(weight, name, value)
    return weight


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_weight_gradient_goes_into_main_grad(layouts, dtype):
    source, target = layouts
    dim = 0 if target == "sharded" else 1
    w = with_main_grad(piece(numbers(N, D, seed=0, dtype=dtype), dim))
    expected = {kind: torch.ones(w.shape, dtype=kind) for kind in (torch.float64, torch.float32)}
    for step in range(2):
        full, dy = numbers(S, D, seed=1 + step, dtype=dtype), numbers(S, N, seed=5 + step, dtype=dtype)
        y = parallel_linear(cut(full, source), w, None, LinearPlan(world(), source, target, fuse_main_grad=True))
        y.backward(cut(dy, target))
        for kind, sum_ in expected.items():
            sum_ += piece((dy.to(kind).t() @ full.to(kind)).to(dtype if kind == torch.float32 else kind), dim)
    assert_as_good(w.main_grad, expected[torch.float32], expected[torch.float64])
    assert w.grad_added_to_main_grad is True
    assert w.grad.shape == w.shape  # a dummy, for autograd's hooks
    assert w.grad.dtype == dtype


@pytest.mark.parametrize(
    "marks, dummy",
    [({"zero_out_wgrad": True}, torch.zeros(N, D)), ({"listened": False}, None)],
    ids=["zero where Megatron adds it", "none where nobody listens"],
)
def test_the_dummy_gradient(marks, dummy):
    w = with_main_grad(torch.randn(N, D), **marks)
    parallel_linear(torch.randn(4, D), w, None, LinearPlan(fuse_main_grad=True)).sum().backward()
    assert torch.equal(w.grad, dummy) if dummy is not None else w.grad is None


@ranks(1)
def test_main_grad_of_16_bits():
    x, w = torch.randn(4, D).bfloat16(), with_main_grad(torch.randn(N, D).bfloat16(), dtype=torch.bfloat16)
    parallel_linear(x, w, None, LinearPlan(fuse_main_grad=True)).backward(torch.ones(4, N).bfloat16())
    torch.testing.assert_close(w.main_grad, (1 + x.float().sum(0)).bfloat16().expand(N, D), rtol=2**-7, atol=2**-7)


@ranks(1)
def test_a_buffer_that_megatron_fsdp_lends_starts_at_zero():
    w, x = torch.randn(N, D, requires_grad=True), torch.randn(4, D)
    buffer = torch.full((N, D), torch.nan)
    w.__fsdp_param__, w.get_main_grad = True, lambda: buffer
    parallel_linear(x, w, None, LinearPlan(fuse_main_grad=True)).sum().backward()
    torch.testing.assert_close(buffer, x.sum(0).expand(N, D))


@ranks(2)
def test_missing_main_grad_is_named_before_anything_is_sent():
    x, w = torch.randn(4, D, requires_grad=True), torch.randn(N, D, requires_grad=True)
    y = parallel_linear(x, w, None, LinearPlan(world(), "replicated", "sharded", fuse_main_grad=True))
    with count_collectives() as counts, pytest.raises(ValueError, match="weight.main_grad is missing"):
        y.sum().backward()
    assert not counts


@ranks(1)
def test_main_grad_with_saved_tensors_on_their_way_elsewhere():
    """Hooks on saved tensors bring back copies, which have none of the parameter's attributes."""
    w = with_main_grad(torch.randn(N, D))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = parallel_linear(torch.ones(4, D, requires_grad=True), w, None, LinearPlan(fuse_main_grad=True))
    y.sum().backward()
    assert torch.equal(w.main_grad, torch.full((N, D), 5.0))


@ranks(1)
def test_memory_is_given_back():
    x, w = torch.randn(4, D, requires_grad=True), with_main_grad(torch.randn(N, D))
    watched = [weakref.ref(x), weakref.ref(w)]
    parallel_linear(x, w, None, LinearPlan(fuse_main_grad=True)).sum().backward()
    del x, w
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


# -- deferred weight gradients -----------------------------------------------------------------------------------------


@ranks(1)
def test_deferral_by_megatrons_argument():
    grads = []
    x, w = torch.randn(4, D), with_main_grad(torch.randn(N, D))
    for _ in range(3):
        y = linear_with_grad_accumulation_and_async_allreduce(x, w, None, True, False, False, grads, 2)
        y.backward(torch.ones_like(y))
    assert len(grads) == 2
    torch.testing.assert_close(w.main_grad - 1, x.sum(0).expand(N, D), rtol=1e-5, atol=1e-5)  # of the third


@ranks(1)
def test_draining_unequal_or_empty_lists():
    config, w = Config(gradient_accumulation_fusion=True), with_main_grad(torch.randn(N, D))
    drain_embedding_wgrad_compute(config, [], [], w, None)
    with pytest.raises(ValueError, match="embedding_activation_buffer has 1 tensors and grad_output_buffer 0"):
        drain_embedding_wgrad_compute(config, [torch.randn(4, D)], [], w, None)
