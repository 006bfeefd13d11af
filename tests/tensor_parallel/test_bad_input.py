"""Arguments that are none of their kind: what each layer says names the argument, its value, the rule and the fix."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.init import zeros_

from megatron_ext.tensor_parallel._layers.vocab_parallel_embedding import padded_vocab_size
from megatron_ext.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from tests.ranks import ranks
from tests.tensor_parallel.sharded import CLASSES, build


def make(kind, *sizes, **options):
    return build(kind, *(sizes or (4, 6)), **{"config": SimpleNamespace(), "init_method": zeros_, **options})


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("place", [0, 1])
def test_sizes(kind, place):
    name = (("num_embeddings", "embedding_dim") if kind == "embedding" else ("input_size", "output_size"))[place]
    for wrong, said in (
        (None, "is None, a NoneType: it must be a whole number; pass an int"),
        ("12", "is '12', a str: it must be a whole number"),
        (12.0, "is 12.0, a float: it must be a whole number"),
        (-4, "is -4: it must be at least"),
    ):
        with pytest.raises(ValueError, match=f"{name} {said}"):
            make(kind, *((wrong, 6) if place == 0 else (4, wrong)))


@pytest.mark.parametrize("kind", CLASSES)
def test_first_values_and_configs(kind):
    for wrong in (None, "normal"):
        with pytest.raises(ValueError, match=f"init_method is {wrong!r}: it must be a function that fills a tensor"):
            make(kind, init_method=wrong)
    assert make(kind, init_method=None, config=SimpleNamespace(perform_initialization=False)).weight is not None
    with pytest.raises(
        ValueError, match=r"config is a dict: it must have the config's attributes; pass .*SimpleNamespace\("
    ):
        make(kind, config={"params_dtype": torch.float64})
    for dtype in ("bf16", torch.int64):
        with pytest.raises(ValueError, match=f"config.params_dtype is {dtype!r}: it must be a floating dtype"):
            make(kind, config=SimpleNamespace(params_dtype=dtype))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_inputs_and_strides(kind):
    for wrong in (None, [[1.0] * 4], 3):
        with pytest.raises(ValueError, match=f"input is {type(wrong).__name__}: it must be a tensor of floating"):
            make(kind)(wrong)
    for wrong, said in (("1", "is '1', a str: it must be a whole"), (0, "is 0: it must be at least 1")):
        with pytest.raises(ValueError, match=f"stride {said}"):
            make(kind, stride=wrong)


def test_weights_and_padding():
    with pytest.raises(ValueError, match="weight is str: it must be a tensor of floating"):
        make("column")(torch.zeros(2, 4), weight="shared")
    for function in (linear_with_grad_accumulation_and_async_allreduce, linear_with_frozen_weight):
        with pytest.raises(ValueError, match="weight is list: it must be a tensor of floating"):
            function(torch.zeros(2, 4), [[1.0] * 4], None, False, False, False)
    for arguments, said in (
        ((None, 2), "vocab_size is None, a NoneType"),
        ((3.5, 2), "vocab_size is 3.5, a float"),
        ((3, 0), "tp_size is 0: it must be at least 1"),
        ((3, 2, -1), "make_vocab_size_divisible_by is -1: it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            padded_vocab_size(*arguments)
    assert padded_vocab_size(5, 2, 4) == 8
    assert [padded_vocab_size(50257, tp_size, 128) for tp_size in (1, 8)] == [50304, 51200]
    assert padded_vocab_size(24, 4) == 24


@ranks(1)
def test_own_weight_that_is_a_dtensor_of_all_rows():
    layer = make("column", 6, 4)
    full = distribute_tensor(torch.ones(8, 6), init_device_mesh("cpu", (1,)), [Shard(0)])
    layer.weight = torch.nn.Parameter(full)
    with pytest.raises(ValueError, match=r"weight is a DTensor: .* pass its local tensor, weight.to_local\(\)"):
        layer(torch.ones(3, 6))
