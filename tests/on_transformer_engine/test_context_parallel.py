"""Context parallelism of Transformer Engine's attention, each way that it communicates, and packed sequences."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.gpt import model_parallel, tiny_batches, tiny_config
from tests.marks import slow
from tests.megatron.patching import packing
from tests.on_transformer_engine.models import ENGINE, assert_same_steps, losses_and_norms, te_spec
from tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("how", ["p2p", *slow("all_gather", "a2a")])
@pytest.mark.parametrize("overrides", [*slow({}), {"num_query_groups": 2}], ids=["mha", "gqa"])
def test_trains_as_on_one_rank(how, overrides):
    batches = tiny_batches(2)
    with model_parallel():  # two data-parallel ranks
        whole = losses_and_norms(te_spec, batches, **ENGINE, **overrides)
    with model_parallel(cp=2):
        split = losses_and_norms(te_spec, batches, cp_comm_type=how, **ENGINE, **overrides)
    assert_same_steps(split, whole)


LENGTHS = [8, 12, 4]  # of the sequences in a pack, each divisible by 2 ranks of 2 chunks


def attention():
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return TEDotProductAttention(
        config=tiny_config(**ENGINE),
        layer_number=1,
        attn_mask_type=AttnMaskType.padding_causal,
        attention_type="self",
        cp_comm_type="p2p",
    )


def pack():
    """(packed parameters, queries, keys, values, gradient of the output)."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(sum(LENGTHS), 4, 8, generator=generator) for _ in range(4)]
    return packing(*itertools.accumulate(LENGTHS, initial=0)), *tensors


def expected():
    """Output and gradients, sequence by sequence in plain PyTorch."""
    _, q, k, v, grad = pack()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    outs = []
    for one in zip(*(t.split(LENGTHS) for t in leaves), strict=True):
        heads = [t.transpose(0, 1) for t in one]
        outs.append(torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1))
    out = torch.cat(outs)
    out.backward(grad)
    return [out.detach(), *(t.grad for t in leaves)]


@ranks(1, 2)
def test_packed_sequences():
    """Each rank of a context-parallel group has two chunks of every sequence."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with model_parallel(cp=size):
        import transformer_engine_torch as tex
        from megatron.core.transformer.enums import AttnMaskType

        packed, *tensors = pack()
        own = tex.thd_get_partitioned_indices(packed.cu_seqlens_q, tensors[0].shape[0], size, rank).long()
        leaves = [t[own].clone().requires_grad_() for t in tensors[:3]]
        what = (*leaves, None, AttnMaskType.padding_causal)
        out = attention()(*what, packed_seq_params=packed)
        out.backward(tensors[3][own].flatten(1))
        for found, whole in zip([out, *(t.grad for t in leaves)], expected(), strict=True):
            torch.testing.assert_close(found.detach().view(-1, 4, 8), whole[own], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert torch.equal(attention().eval()(*what, packed_seq_params=packed), out)
