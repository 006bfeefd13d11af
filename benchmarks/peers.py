"""Two published algorithms, written anew, to count their FLOPs, memory and collectives.

Neither is the original's code: the order of matmuls, casts and collectives is kept, kernels are plain PyTorch. So their
times here are the costs of the algorithm on this machine, and say nothing of the original's kernels.

Legend: T tokens, N tokens of a chunk, D hidden size, V columns of this rank's shard, C columns of a block.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group


def own_target(labels_T: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in this shard (0 if it is in another), and whether the label is in this shard."""
    own_T = (labels_T >= start) & (labels_T < start + columns)
    return (labels_T - start).where(own_T, 0), own_T


def sharded_log_softmax(z_NV: Tensor, group: Group) -> Tensor:
    """Return the log-softmax of this rank's columns in fp32, by two all-reduces: maximum and sum of exponentials."""
    z_NV = z_NV.float()
    z_NV = z_NV - collectives.all_reduce(z_NV.amax(1, keepdim=True), group, op="max")
    return z_NV - collectives.all_reduce(z_NV.exp().sum(1, keepdim=True), group).log()


class NemoRL(torch.autograd.Function):
    """NeMo-RL's fused linear head: chunks of tokens, logits cast to fp32 in each, softmax recomputed in backward.

    Every chunk makes two all-reduces (maximum, sum of exponentials), in forward and again in backward; the gradient's
    matmuls run in fp32, on fp32 copies of the weight and the hidden states.
    """

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, start: int, group: Group) -> Tensor:
        ctx.save_for_backward(x_TD, w_VD, labels_T)
        ctx.start, ctx.group = start, group
        target_T, own_T = own_target(labels_T, start, w_VD.shape[0])
        picked = []
        for x_ND, target_N in zip(x_TD.split(NemoRL.CHUNK), target_T.split(NemoRL.CHUNK), strict=True):
            log_p_NV = sharded_log_softmax(x_ND @ w_VD.t(), group)
            picked.append(log_p_NV.gather(1, target_N[:, None]).squeeze(1))
            del log_p_NV
        return -collectives.all_reduce(torch.cat(picked) * own_T, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_TD, w_VD, labels_T = ctx.saved_tensors
        target_T, own_T = own_target(labels_T, ctx.start, w_VD.shape[0])
        wide_VD, dw_VD, dx = w_VD.float(), torch.zeros_like(w_VD, dtype=torch.float32), []
        chunks = (tensor.split(NemoRL.CHUNK) for tensor in (x_TD, grads[0], target_T, own_T))
        for x_ND, g_N, target_N, own_N in zip(*chunks, strict=True):
            dz_NV = sharded_log_softmax(x_ND @ w_VD.t(), ctx.group).exp_()
            dz_NV.scatter_add_(1, target_N[:, None], -own_N[:, None].float())
            dz_NV *= g_N[:, None]
            dx.append(dz_NV @ wide_VD)
            dw_VD += dz_NV.t() @ x_ND.float()
            del dz_NV
        dx_TD = collectives.all_reduce(torch.cat(dx).to(x_TD.dtype), ctx.group)
        return dx_TD, dw_VD.to(w_VD.dtype), None, None, None


class Verl(torch.autograd.Function):
    """verl's fused head: blocks of the vocabulary with running statistics, logits recomputed in backward.

    Forward makes four all-reduces (maximum, sum of exponentials, the label's logit, and the sum for the entropy, which
    is always computed), backward one, of the hidden states' gradient.
    """

    BLOCK, GRADIENT_BLOCK = 1024, 9504

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, start: int, group: Group) -> Tensor:
        target_T, own_T = own_target(labels_T, start, w_VD.shape[0])
        peak_T = x_TD.new_full(labels_T.shape, -torch.inf, dtype=torch.float32)
        total_T, weighted_T, picked_T = (torch.zeros_like(peak_T) for _ in range(3))
        for first in range(0, w_VD.shape[0], Verl.BLOCK):
            z_TC = (x_TD @ w_VD[first : first + Verl.BLOCK].t()).float()
            inside_T = own_T & (target_T >= first) & (target_T < first + z_TC.shape[1])
            picked_T += z_TC.gather(1, (target_T - first).where(inside_T, 0)[:, None]).squeeze(1) * inside_T
            new_T = torch.maximum(peak_T, z_TC.amax(1))
            e_TC = (z_TC - new_T[:, None]).exp_()
            shrink_T = (peak_T - new_T).exp()
            total_T = total_T * shrink_T + e_TC.sum(1)
            weighted_T = weighted_T * shrink_T + e_TC.mul_(z_TC).sum(1)
            peak_T = new_T
            del z_TC, e_TC
        top_T = collectives.all_reduce(peak_T, group, op="max")
        shrink_T = (peak_T - top_T).exp()
        total_T = collectives.all_reduce(total_T * shrink_T, group)
        entropy_T = top_T + total_T.log() - collectives.all_reduce(weighted_T * shrink_T, group) / total_T
        picked_T = collectives.all_reduce(picked_T, group)
        ctx.save_for_backward(x_TD, w_VD, target_T, own_T, top_T, total_T, entropy_T)
        ctx.group = group
        return top_T + total_T.log() - picked_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_TD, w_VD, target_T, own_T, top_T, total_T, _ = ctx.saved_tensors
        dx_TD, dw_VD = torch.zeros_like(x_TD, dtype=torch.float32), torch.empty_like(w_VD)
        for first in range(0, w_VD.shape[0], Verl.GRADIENT_BLOCK):
            block = slice(first, first + Verl.GRADIENT_BLOCK)
            dz_TC = (x_TD @ w_VD[block].t()).float()
            dz_TC.sub_(top_T[:, None]).exp_().div_(total_T[:, None])
            inside_T = own_T & (target_T >= first) & (target_T < first + dz_TC.shape[1])
            dz_TC.scatter_add_(1, (target_T - first).where(inside_T, 0)[:, None], -inside_T[:, None].float())
            narrow_TC = dz_TC.mul_(grads[0][:, None]).to(x_TD.dtype)
            del dz_TC
            dx_TD += narrow_TC @ w_VD[block]
            torch.mm(narrow_TC.t(), x_TD, out=dw_VD[block])
            del narrow_TC
        return collectives.all_reduce(dx_TD.to(x_TD.dtype), ctx.group), dw_VD, None, None, None
