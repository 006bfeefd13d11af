from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm
from torch.nn.init import zeros_

from megatron_ext.distributed import collectives
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import InferenceLayerNormColumnParallelLinear, InferenceRowParallelLinear
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, alone, numbers, piece

S, B, H, F = 8, 2, 16, 32
EPS = 1e-3


config = partial(Config, sequence_parallel=True, params_dtype=torch.float64, layernorm_epsilon=EPS)


def build(config, group=None):
    """A row-parallel layer [F -> H] and the column-parallel one [H -> F] after it, with the same weights everywhere."""

    def init(weight):
        weight.copy_(numbers(*weight.shape, seed=0))

    common = {"config": config, "init_method": init, "bias": False, "tp_group": group or dist.group.WORLD}
    row = InferenceRowParallelLinear(F, H, input_is_parallel=True, skip_bias_add=False, **common)
    column = InferenceLayerNormColumnParallelLinear(H, F, gather_output=False, skip_bias_add=False, **common)
    with torch.no_grad():
        column.layer_norm_weight.copy_(numbers(H, seed=1))
    return row, column


def inputs():
    return [numbers(S, B, n, seed=2, dtype=torch.float64) for n in (F, H)]


def unsharded(column):
    """Compute both layers in one process: the residual stream and the column layer's output."""
    x, residual = inputs()
    row_weight, column_weight = (numbers(*shape, seed=0).double() for shape in ((H, F), (F, H)))
    stream = residual + x @ row_weight.t()
    return stream, rms_norm(stream, (H,), column.layer_norm_weight, EPS) @ column_weight.t()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@ranks(1, 2, 4)
@pytest.mark.parametrize("fused", [False, True])
def test_row_then_column(fused):
    """Told of the next layer's norm, the row layer adds the residual, else its caller does: with the same results."""
    row, column = (layer.eval() for layer in build(config()))
    x, residual = (piece(t, dim) for t, dim in zip(inputs(), (-1, 0), strict=True))
    stream, output = unsharded(column)
    if fused:
        row._set_next_layer_norm_weights(column.layer_norm_weight.data)
        row._set_residual(residual)
        column.skip_norm_and_all_gather = True
    with count_collectives() as counts:
        got, bias = row(x)
        got = got if fused else got + residual
        got_output, _ = column(got)
    close(got, piece(stream, 0))
    close(got_output, piece(output, -1))
    assert bias is None
    assert not got_output.requires_grad
    one = {"reduce_scatter_base": 1, "allgather_base": 1}
    assert counts == (one if dist.get_world_size() > 1 else {})
    if fused:
        with pytest.raises(ValueError, match="residual is None.*call _set_residual"):
            row(x)
    close(row(x, residual)[0], piece(stream, 0))


@ranks(2)
def test_replicated_tokens():
    row, column = (layer.eval() for layer in build(config(sequence_parallel=False)))
    x, residual = inputs()
    stream, output = unsharded(column)
    with count_collectives() as counts:
        got, _ = row(piece(x, -1), residual)
        got_output, _ = column(got)
    close(got, stream)
    close(got_output, piece(output, -1))
    assert counts == {"allreduce": 1}


@ranks(1, 2, 4)
def test_in_training_mode_gradients_flow():
    row, column = build(config())
    row._set_next_layer_norm_weights(column.layer_norm_weight)
    _, output = unsharded(column)
    x, residual = (piece(t, dim).requires_grad_() for t, dim in zip(inputs(), (-1, 0), strict=True))
    got = column(row(x, residual)[0])[0]
    close(got, piece(output, -1))
    got.square().sum().backward()

    whole_row, whole_column = build(config(), group=alone())
    whole_x, whole_residual = (t.requires_grad_() for t in inputs())
    whole_column(whole_row(whole_x, whole_residual)[0])[0].square().sum().backward()
    close(x.grad, piece(whole_x.grad, -1))
    close(residual.grad, piece(whole_residual.grad, 0))
    close(row.weight.grad, piece(whole_row.weight.grad, 1))
    close(column.weight.grad, piece(whole_column.weight.grad, 0))
    assert column.layer_norm_weight.sequence_parallel == (dist.get_world_size() > 1), "summed over ranks by Megatron"
    summed = collectives.all_reduce(column.layer_norm_weight.grad, dist.group.WORLD)
    close(summed, whole_column.layer_norm_weight.grad)


def test_what_is_refused():
    for bad in ({"normalization": "LayerNorm"}, {"layernorm_zero_centered_gamma": True}):
        with pytest.raises(ValueError, match=r"config.normalization is .* the inference layers have an RMSNorm"):
            InferenceLayerNormColumnParallelLinear(H, F, config=config(**bad), init_method=zeros_)
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    row = InferenceRowParallelLinear(F, H, config=config(), init_method=zeros_, **options)
    with pytest.raises(ValueError, match="weights cannot be set: the layer has a bias"):
        row._set_next_layer_norm_weights(torch.ones(H))
