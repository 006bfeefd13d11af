"""Mamba-2 in plain PyTorch against its recurrence, one position after the other in fp64; values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from megatron_on_cpu import state_space

SIZES = {"B": 2, "S": 11, "H": 4, "P": 3, "G": 2, "N": 5}


def drawn(*dims, scale=1.0):
    shape = [SIZES.get(dim, dim) for dim in dims]
    return (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()


def inputs():
    torch.manual_seed(0)
    return {
        "x": drawn(*"BSHP"),
        "dt": drawn(*"BSH"),
        "A": drawn("H"),
        "B": drawn(*"BSGN"),
        "C": drawn(*"BSGN"),
        "D": drawn("H"),
        "z": drawn(*"BSHP"),
        "dt_bias": drawn("H"),
        "initial_states": drawn(*"BHPN"),
    }


def recurrence(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None):
    """y `[B, S, H, P]` and the last state, by the formula, one position after the other."""
    steps = F.softplus(dt if dt_bias is None else dt + dt_bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    state = torch.zeros_like(x[:, 0, :, :, None] * B[:, 0, :, None]) if initial_states is None else initial_states
    ys = []
    for t in range(x.shape[1]):
        step = steps[:, t, :, None, None]
        entering = torch.einsum("bhp,bhn->bhpn", x[:, t], B[:, t])
        state = torch.exp(step * A[:, None, None]) * state + step * entering
        ys.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    y = torch.stack(ys, dim=1)
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * F.silu(z), state


def assert_same_grads(found, expected, inputs):
    weights = [torch.randn_like(x) for x in expected]
    mine, wanted = (torch.autograd.grad(x, inputs, weights) for x in (found, expected))
    for a, b in zip(mine, wanted, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 64])
def test_the_scan(chunk_size):
    given = inputs()
    given["A"] = (-given["A"].detach().exp()).requires_grad_()
    expected = recurrence(**given)
    found = state_space.mamba_chunk_scan_combined(
        **given, chunk_size=chunk_size, dt_softplus=True, return_final_states=True
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert_same_grads(found, expected, list(given.values()))


def test_long_decay_stays_finite():
    """The decay between far positions underflows; what is masked out would overflow."""
    given = inputs()
    x, B, C = given["x"], given["B"], given["C"]
    dt, A = torch.full_like(given["dt"], 50.0), torch.full_like(given["A"], -20.0)
    found = state_space.mamba_chunk_scan_combined(x, dt, A, B, C, 64, dt_softplus=True)
    torch.testing.assert_close(found, recurrence(x, dt, A, B, C)[0])
    for grad in torch.autograd.grad(found.sum(), [x, B, C]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("with_columns", [False, True])
def test_from_projection_to_projection(with_columns):
    """The convolution looks at the last positions alone; x, B and C are split behind it."""
    heads, size, groups, states, width = *(SIZES[name] for name in "HPGN"), 4
    inner, shared = heads * size, groups * states
    torch.manual_seed(1)
    projected = drawn("B", "S", 2 * inner + 2 * shared + heads)
    weight, bias = drawn(inner + 2 * shared, width), drawn(inner + 2 * shared)
    dt_bias, A, D = drawn("H"), drawn("H"), drawn(heads, size) if with_columns else drawn("H")
    with torch.no_grad():
        A.copy_(-A.exp())
    found = state_space.mamba_split_conv1d_scan_combined(
        projected,
        weight,
        bias,
        dt_bias,
        A,
        D=D,
        chunk_size=4,
        headdim=None if with_columns else size,
        ngroups=groups,
    )

    z, conv, dt = projected.split([inner, inner + 2 * shared, heads], dim=-1)
    past = F.pad(conv, (0, 0, width - 1, 0))
    conv = torch.stack([(past[:, t : t + width] * weight.T).sum(1) + bias for t in range(conv.shape[1])], dim=1)
    x, B, C = F.silu(conv).split([inner, shared, shared], dim=-1)
    x = x.unflatten(-1, (heads, size))
    y, _ = recurrence(x, dt, A, B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1)), dt_bias=dt_bias)
    y = y + x * (D if with_columns else D[:, None])
    expected = y.flatten(-2) * F.silu(z)
    torch.testing.assert_close(found, expected)
    assert_same_grads([found], [expected], [projected, weight, bias, dt_bias, A, D])


@pytest.mark.parametrize("gate", [None, "before", "after"])
def test_the_gated_norm(gate):
    torch.manual_seed(2)
    x, z = drawn("B", "S", 12), drawn("B", "S", 12)
    norm = state_space.GatedRMSNorm(12, eps=1e-3, group_size=4, norm_before_gate=gate == "after", dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_()
    found = norm(x) if gate is None else norm(x, z)
    entering = x * F.silu(z) if gate == "before" else x
    groups = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-3) for part in entering.split(4, dim=-1)]
    expected = torch.cat(groups, dim=-1) * norm.weight
    expected = expected * F.silu(z) if gate == "after" else expected
    torch.testing.assert_close(found, expected)
    assert_same_grads([found], [expected], [x, norm.weight] + ([] if gate is None else [z]))


def test_dtypes():
    given = {name: x.detach().bfloat16() for name, x in inputs().items()}
    given["A"] = -given["A"].exp()
    y, state = state_space.mamba_chunk_scan_combined(**given, chunk_size=4, return_final_states=True, dt_softplus=True)
    wide, wide_state = recurrence(**{name: x.double() for name, x in given.items()})
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), wide, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(state.double(), wide_state, rtol=1e-5, atol=1e-5)


def test_refusals():
    given = {name: x for name, x in inputs().items() if name in ("x", "dt", "A", "B", "C")}
    with pytest.raises(ValueError, match="seq_idx or cu_seqlens is given: .* one sequence per row"):
        state_space.mamba_chunk_scan_combined(**given, chunk_size=4, seq_idx=torch.zeros(2, 11))
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        state_space.mamba_split_conv1d_scan_combined(
            *(given["x"],) * 3, given["dt"], given["A"], None, 4, activation="gelu"
        )
