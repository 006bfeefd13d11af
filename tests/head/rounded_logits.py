"""A head whose logits are rounded to 16 bits, unsharded and in plain PyTorch.

Its numbers are such that fp32 has their products exactly: in any order of sums it is the rounding alone that decides.
"""

import torch

import megatron_ext.reference
from megatron_ext import head
from megatron_ext.head import LmHead

BF16 = torch.bfloat16
BENT = {"logit_scale": 0.75, "softcap": 6.0, "temperature": 1.5}


def problem(tokens=70, width=48, columns=544, dtype=BF16):
    """Hidden states and weight of few digits, labels, and a factor for each loss."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randint(-15, 16, (tokens, width), generator=g) / 16
    weight = torch.randint(-15, 16, (columns, width), generator=g) / 16
    labels = torch.randint(columns, (tokens,), generator=g)
    labels[3] = -100
    return hidden.to(dtype), weight.to(dtype), labels, torch.randn(tokens, generator=g)


def reference(hidden, weight, labels, slopes, bias=None, logit_scale=1.0, softcap=None, temperature=1.0, rounds=True):
    """Losses and entropies in fp64 of the rounded product, then dx and dW, for which the rounding is the identity."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, *(() if bias is None else (bias,)))]
    z = leaves[0] @ leaves[1].T
    if rounds:
        z = z + (z.to(hidden.dtype).double() - z).detach()
    z = (z if bias is None else z + leaves[2]) * logit_scale
    z = (z if softcap is None else softcap * (z / softcap).tanh()) / temperature
    found = [megatron_ext.reference.cross_entropy(z, labels)]
    found.append(megatron_ext.reference.entropy(z).where(labels != -100, 0.0))
    (sum(found) * slopes).sum().backward()
    return [x.detach() for x in found], [x.grad for x in leaves]


def computed(hidden, weight, labels, slopes, bias=None, **options):
    """The same of `LmHead`."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, *(() if bias is None else (bias,)))]
    of = LmHead(leaves[1], bias=None if bias is None else leaves[2], **options)
    found = of.read(leaves[0], head.CrossEntropy(labels), head.Entropy(labels != -100))
    (sum(found) * slopes).sum().backward()
    return [x.detach() for x in found], [x.grad for x in leaves]


def assert_near(found, truth, gradients=0.01):
    """Results to fp32's digits, gradients to those of 16 bits."""
    for x, true in zip(found[0], truth[0], strict=True):
        torch.testing.assert_close(x.double(), true, rtol=2e-6, atol=4e-6)
    for x, true in zip(found[1], truth[1], strict=True):
        assert (x.double() - true).norm() < gradients * true.norm()
