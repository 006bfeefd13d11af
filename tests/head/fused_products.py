"""Products whose epilogue takes exponentials beside the plain passes, for `twins`, and the head that uses them beside
plain PyTorch. A module of its own: the interpreter is chosen when triton is imported.
"""

import torch

from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head import Entropy, IsArgmax, LmHead, LogProbs
from megatron_ext.head.kernels import TRITON as twin
from megatron_ext.head.row_passes.passes import PYTORCH as plain

ALL = {"temperature": 0.7, "with_entropy": True, "with_hits": True}


def compare_fused_products(device, sizes, options, padding=0):
    """Statistics, exponentials and gradients: tokens near the sample's maximum and far from it, labels of other shards,
    a bias of -inf and a row that starts with 256 of them, and columns that do not count."""
    tokens, width, columns, counted = sizes
    generator = torch.Generator().manual_seed(columns)
    x_TD = torch.randn(tokens, width + padding, generator=generator).bfloat16()[:, :width].to(device)
    w_VD = torch.randn(columns, width, generator=generator).bfloat16().to(device)
    target_T = torch.randint(-1, max(counted, 1), (tokens,), generator=generator).clamp(max=counted - 1).to(device)
    x_TD[0], x_TD[1:3] = 0.01 * x_TD[0], 16 * x_TD[1:3]  # far from the sample
    bias_V = torch.randn(columns, generator=generator).to(device) if options else None
    if bias_V is not None:
        bias_V[: min(columns - 1, 300) : 2] = -torch.inf
    bends = {"counted": counted, "temperature": options.get("temperature", 1.0), "bias_V": bias_V}
    sums = {name: value for name, value in options.items() if name.startswith("with_")}
    rows = 3 + ("with_entropy" in options) + ("with_hits" in options)
    scale_T, slope_T = torch.randn(2, tokens, generator=generator).to(device)
    found = []
    for side in (plain, twin):
        wide = side is plain  # on a CPU a product of 16-bit operands is rounded
        x, w = (each.float() if wide and device == "cpu" else each for each in (x_TD, w_VD))
        made = []
        for kept in (0, columns, columns * 5 // 8):
            stats_KT, shift_T = x.new_empty(rows, tokens + 1, dtype=torch.float32), x.new_empty(tokens).float()
            exp_TV = x.new_full((tokens, columns), 7.0, dtype=torch.float32 if wide else x.dtype)
            given = exp_TV[:, :kept] if kept else None
            side.product_statistics(x, w, target_T, stats_KT[:, :tokens], shift_T, given, **bends, **sums)
            assert (exp_TV[:, kept:] == 7.0).all()
            beyond_T = (shift_T - stats_KT[0, :tokens].nan_to_num(neginf=0.0)).double().exp()
            made += [stats_KT[:, :tokens], exp_TV[:, :kept].double() * beyond_T.unsqueeze(1)]
        shift_T = made[0][0].nan_to_num(neginf=0.0)
        for inside in ({}, {"scale_T": scale_T}, {"scale_T": scale_T, "slope_T": slope_T}):
            out_TV = x.new_empty(tokens, columns, dtype=torch.float32 if wide else x.dtype)
            side.product_gradient(x, w, target_T, shift_T, out_TV, **inside, **bends)
            made.append(out_TV.double())
        found.append(made)
    for ours, theirs in zip(*found, strict=True):
        single = ours.dtype == torch.float32
        tolerance = {"rtol": 3e-5, "atol": 3e-5} if single else {"rtol": 2**-7, "atol": 1e-5}
        torch.testing.assert_close(theirs, ours, **tolerance)


CASES = [
    ((5, 16, 300, 290), {}, 0),
    ((130, 72, 512, 512), ALL, 0),
    ((4, 64, 1, 1), {}, 8),
    ((3, 8, 700, 0), ALL, 3),
    ((3, 8, 700, 259), ALL, 0),
]


def head_errors(device, cache):
    """The errors of values and gradients over those of plain PyTorch in bf16, without a fused epilogue and with one."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, columns = 150, 64, 701
    x_TD, w_VD = (torch.randn(n, width, generator=generator).bfloat16().to(device) for n in (tokens, columns))
    bias_V = torch.randn(columns, generator=generator).bfloat16().to(device)
    labels_T = torch.randint(0, columns - 5, (tokens,), generator=generator).to(device)
    labels_T[::7] = -100
    up_2T = torch.randn(2, tokens, generator=generator).to(device)

    def plainly(dtype):
        x, w = x_TD.to(dtype).requires_grad_(), w_VD.to(dtype).requires_grad_()
        z = (x @ w.t() + bias_V.to(dtype))[:, : columns - 3] / 0.7
        log_p = (z.float() if dtype is torch.bfloat16 else z).log_softmax(-1)
        of_labels = log_p.gather(1, labels_T.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(labels_T < 0, 0.0)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return of_labels, entropy, *torch.autograd.grad([of_labels, entropy], [x, w], [*up_2T.to(of_labels)])

    def ours(fused):
        x, w = x_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()
        vocab = VocabShard(0, columns, columns - 3)
        given = {"bias": bias_V, "temperature": 0.7, "cache": cache, "vocab": vocab, "fused_epilogue": fused}
        of_labels, entropy, hits = LmHead(w, **given).read(x, LogProbs(labels_T), Entropy(), IsArgmax(labels_T))
        with torch.no_grad():
            again = LmHead(w, **given).read(x, LogProbs(labels_T), IsArgmax(labels_T))
        torch.testing.assert_close(again[0], of_labels.detach(), rtol=1e-6, atol=1e-5)
        assert again[1].equal(hits)
        return of_labels, entropy, *torch.autograd.grad([of_labels, entropy], [x, w], [*up_2T])

    def errors(made):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(made, plainly(torch.float64), strict=True)]

    of_plain = errors(plainly(torch.bfloat16))
    return [[a / b for a, b in zip(errors(ours(fused)), of_plain, strict=True)] for fused in (False, True)]


def main():
    """Compare errors at each cache, under the interpreter."""
    from benchmarks.interpreter import round_to_bfloat16
    from tests.head.as_on_cuda import rehearsal

    round_to_bfloat16()
    with rehearsal():
        for cache in (0, 0.5, 1):
            apart, fused = head_errors("cpu", cache)
            print(f"cache {cache}: errors of values and gradients over plain PyTorch's", apart, fused)
            assert max(fused) <= 1.1, (cache, fused)


if __name__ == "__main__":
    main()
