"""Calls of the compiled module's functions, shared by the tests of its stand-in."""

import inspect
import math

import torch


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def called(function, given):
    """Call a function with the arguments that it takes, by name; those that are not given are None."""
    return function(**{name: given.get(name) for name in inspect.signature(function).parameters})


def of_attention(tex, tensors, layout, mask, cu_q, cu_kv, **more):
    """The arguments of fused attention; `more`: other ones than neither bias, window, softmax offset nor dropout."""
    return {
        "Q": tensors[0],
        "K": tensors[1],
        "V": tensors[2],
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "max_seqlen_q": int(cu_q.diff().max()),
        "max_seqlen_kv": int(cu_kv.diff().max()),
        "qkv_layout": layout,
        "attn_mask_type": mask,
        "bias_type": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
        "softmax_type": tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        "window_size": (-1, -1),
        "attn_scale": 1 / math.sqrt(tensors[0].shape[-1]),
        "p_dropout": 0.0,
        "is_training": True,
        **more,
    }


def attended(tex, given, grad):
    """[output, gradients of queries, keys, values, of bias and offset] through the two functions."""
    out, *saved = called(tex.fused_attn_fwd, given)
    dtypes = {"fake_dtype": torch.float32, "dqkv_type": tex.DType.kFloat32}
    return [out, *called(tex.fused_attn_bwd, given | dtypes | {"O": out, "dO": grad, "Aux_CTX_Tensors": saved})]
