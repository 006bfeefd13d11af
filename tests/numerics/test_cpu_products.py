"""16-bit products on processors that have none: what is set by hand here, any machine computes so."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.meter import measure
from megatron_ext import doctor, linear_cross_entropy, main_grad, reference
from megatron_ext.dtensor.styles import FusedColwise
from megatron_ext.numerics import cpu_products
from megatron_ext.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from tests.ranks import ranks

BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "tiles"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


class SixteenBitProducts(TorchDispatchMode):
    """`found` has the names of the products of 16-bit matrices that torch is asked for, in the order of the calls."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if name in ("mm", "addmm", "bmm", "baddbmm") and all(x.dtype in cpu_products.QUESTIONS for x in tensors):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def half_a_unit(x, dtype):
    """Half a unit in the last digit of numbers like `x`, and what the fp32 sum may be off by."""
    return x.abs() * torch.finfo(dtype).eps / 2 + 1e-4


@BOTH
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 7), (600, 40, 520), (40, 1100, 30), (64, 513, 1)], ids=str)
def test_rounded_once(native, dtype, shape):
    m, k, n = shape
    left, right, bias = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    true = left.double() @ right.double()
    with cpu_products.sixteen_bit_products(native):
        found = cpu_products.mm(left, right)
        turned = cpu_products.mm(left.t().contiguous().t(), right.t().contiguous().t())
        with_bias = cpu_products.mm(left, right, added=bias)
    assert found.dtype == dtype
    assert ((found.double() - true).abs() <= half_a_unit(true, dtype)).all()
    assert ((turned.double() - true).abs() <= half_a_unit(true, dtype)).all()
    true = true + bias.double()
    assert ((with_bias.double() - true).abs() <= half_a_unit(true, dtype)).all()


@BOTH
def test_in_memory_that_is_given(native):
    left, right, memory = randn(600, 30), randn(30, 20), torch.full((600, 24), 7.0, dtype=torch.bfloat16)
    with cpu_products.sixteen_bit_products(native):
        found = cpu_products.mm(left, right, memory[:, :20])
        assert found.data_ptr() == memory.data_ptr()
        assert torch.equal(found, cpu_products.mm(left, right))
        assert (memory[:, 20:] == 7).all()
        assert (cpu_products.mm(left[:, :0], right[:0], memory[:, :20]) == 0).all()
        assert cpu_products.mm(left[:0], right).shape == (0, 20)


def test_what_is_not_of_16_bits_on_a_cpu_is_torchs():
    with cpu_products.sixteen_bit_products(False):
        for dtype in (torch.float32, torch.float64):
            left, right = randn(600, 30, dtype=dtype), randn(30, 20, dtype=dtype)
            assert torch.equal(cpu_products.mm(left, right), left @ right)
        with pytest.raises(RuntimeError, match="dtype"):
            cpu_products.mm(randn(3, 3), randn(3, 3, dtype=torch.float32))


@DTYPES
@pytest.mark.parametrize("options", [{"cache": 1}, {"cache": 0}, {"chunk_tokens": 7}], ids=str)
def test_the_head_errs_as_with_16_bit_products(options, dtype):
    hidden, weight = randn(90, 33, dtype=dtype), randn(700, 33, dtype=dtype, seed=1)
    bias = randn(700, dtype=dtype, seed=2)
    labels, grad = torch.arange(90) * 7, randn(90, dtype=torch.float32, seed=3)

    def results(call, *leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        losses = call(*leaves)
        return [losses.detach(), *torch.autograd.grad(losses, leaves, grad.to(losses.dtype))]

    def ours(x, w, b):
        return linear_cross_entropy(x, w, labels, bias=b, **options)

    def plain(x, w, b):
        return -reference.log_probs(reference.logits(x, w, b), labels)

    true = results(plain, hidden.double(), weight.double(), bias.double())
    errors = {}
    for native in (True, False):
        with cpu_products.sixteen_bit_products(native):
            found = results(ours, hidden, weight, bias)
        errors[native] = [(x.double() - want).norm() / want.norm() for x, want in zip(found, true, strict=True)]
    for tiles, native in zip(errors[False], errors[True], strict=True):
        assert tiles <= 1.05 * native + 1e-6
        assert tiles <= 0.01


@BOTH
def test_a_layer_and_its_gradients(native):
    given = [x.requires_grad_() for x in (randn(3, 8, 40), randn(600, 40, seed=1), randn(600, seed=2))]
    grad = randn(3, 8, 600, seed=3)
    with cpu_products.sixteen_bit_products(native):
        found = linear_with_grad_accumulation_and_async_allreduce(*given, False, False, False)
        gradients = torch.autograd.grad(found, given, grad)
    leaves = [x.detach().double().requires_grad_() for x in given]
    true = torch.nn.functional.linear(*leaves)
    wanted = torch.autograd.grad(true, leaves, grad.double())
    for got, want in zip((found, *gradients), (true, *wanted), strict=True):
        assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-3).all()


@BOTH
@ranks(2)
def test_a_fused_projection_of_a_sharded_model(native):
    """Gate and up in one weight, each cut over the ranks: output and gradients, and who made the products."""
    mesh = init_device_mesh("cpu", (2,))
    hidden, grad = randn(3, 5, 16), randn(3, 5, 24, seed=1)
    linear = nn.Linear(16, 24).bfloat16()
    with torch.no_grad():
        linear.weight.copy_(randn(24, 16, seed=2))
        linear.bias.copy_(randn(24, seed=3))
    leaves = [x.detach().double().requires_grad_() for x in (hidden, linear.weight, linear.bias)]
    true = nn.functional.linear(*leaves)
    dx, dw, db = torch.autograd.grad(true, leaves, grad.double())

    def own(x):
        return torch.cat([part.chunk(2, -1)[dist.get_rank()] for part in x.chunk(2, -1)], -1)

    parallelize_module(linear, mesh, FusedColwise())
    hidden.requires_grad_()
    with cpu_products.sixteen_bit_products(native), SixteenBitProducts() as products:
        out = linear(hidden)
        out.backward(own(grad))
    assert bool(products.found) is native
    found = [out, hidden.grad, linear.weight.grad.full_tensor(), linear.bias.grad.full_tensor()]
    for got, want in zip(found, [own(true), dx, dw, db], strict=True):
        assert (got.double() - want).norm() <= 2**-7 * want.norm()


@BOTH
def test_fixed_bits(native):
    """Loss and gradients in bf16 do not depend on the chunks, and no product passes by the choice."""
    hidden, weight = randn(90, 33).requires_grad_(), randn(700, 33, seed=1).requires_grad_()
    labels, found = torch.arange(90) * 7, []
    with cpu_products.sixteen_bit_products(native), SixteenBitProducts() as products:
        for chunk_tokens in (64, 90):
            losses = linear_cross_entropy(hidden, weight, labels, bits="batch", chunk_tokens=chunk_tokens)
            found.append([losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight))])
    assert bool(products.found) is native
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    true = -reference.log_probs(reference.logits(hidden.double(), weight.double(), None), labels)
    assert (found[0][0].double() - true).abs().max() <= 2**-6 * true.abs().max()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_main_grad(native, dtype):
    """A sum in 16 bits is rounded once; a sum in 32 bits takes a product that is rounded."""
    left, right, total = randn(50, 600), randn(50, 20, seed=1), randn(600, 20, dtype=dtype, seed=2)
    product = left.double().t() @ right.double()
    true = total.double() + product
    with cpu_products.sixteen_bit_products(native), SixteenBitProducts() as products:
        main_grad.add_product(total, left, right)
    assert bool(products.found) is native
    rounded = true if dtype == torch.bfloat16 else product
    assert ((total.double() - true).abs() <= half_a_unit(rounded, torch.bfloat16)).all()


def test_memory_is_three_tiles():
    left, right = randn(2048, 1024), randn(1024, 1536)
    with cpu_products.sixteen_bit_products(False), measure() as costs:
        found = cpu_products.mm(left, right)
    assert found.nbytes < costs.peak_bytes <= found.nbytes + 3 * 4 * 512**2


def test_compiled():
    left, right = randn(600, 30), randn(30, 20)
    with cpu_products.sixteen_bit_products(False):
        torch._dynamo.reset()
        compiled = torch.compile(lambda a, b: cpu_products.mm(a, b) * 2, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(left, right), cpu_products.mm(left, right) * 2)
        torch._dynamo.reset()


@BOTH
def test_the_doctor_says_which(native):
    with cpu_products.sixteen_bit_products(native):
        (row,) = (row for row in doctor.kernels() if row["name"] == "16-bit products on the CPU")
    assert row["active"] is native
    assert ("lacks bfloat16 and float16: computed in fp32 tiles" in row["why"]) is not native


@pytest.mark.slow
def test_a_processor_of_avx2():
    asked = (
        "import torch; from megatron_ext.numerics import cpu_products as c; "
        "print(c.has_sixteen_bit_products(torch.bfloat16))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
