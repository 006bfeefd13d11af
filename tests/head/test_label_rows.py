"""The labels' terms of dW are added in bounded time, however the labels are distributed: by windows of tokens."""

import os

import pytest
import torch

from megatron_ext.head.row_passes import label_terms as plain

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
WINDOW = 4
DISTRIBUTIONS = {
    "one label": lambda tokens: torch.full((tokens,), 2),
    "one label and none": lambda tokens: torch.arange(tokens) % 2 * 3 - 1,
    "runs that begin and end anywhere": lambda tokens: torch.arange(tokens).sqrt().long(),
    "all differ": torch.arange,
}


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 43])
@pytest.mark.parametrize("labels", DISTRIBUTIONS)
def test_long_runs_are_summed_by_windows(labels, tokens, smoothed, monkeypatch):
    """The bits are those of sums within each window and of these, which no program adds more than a window of."""
    from megatron_ext.head.kernels import label_terms as twin

    monkeypatch.setattr(twin, "_WINDOW", WINDOW)
    target_T = DISTRIBUTIONS[labels](tokens)
    x_TD, value_T, out_VD = torch.randn(tokens, 6), torch.randn(tokens), torch.randn(tokens + 3, 6)
    common_D, counted_V = (torch.randn(6), torch.ones(tokens + 3)) if smoothed else (None, None)
    found_VD, want_VD = out_VD.clone(), out_VD.clone()
    twin.add_label_rows(found_VD, x_TD, target_T, value_T, common_D, counted_V)
    plain.add_label_rows(want_VD, x_TD, target_T, value_T, common_D, counted_V)
    torch.testing.assert_close(found_VD, want_VD, rtol=1e-5, atol=1e-5)
    sorted_T, order_T = target_T.sort(stable=True)
    for row in target_T[target_T >= 0].unique():
        places = (sorted_T == row).nonzero()[:, 0]
        windows = places // WINDOW
        total_D = out_VD[row] + common_D if smoothed else out_VD[row].clone()
        for window in windows.unique():
            part_D = torch.zeros(6) if len(windows.unique()) > 1 else total_D
            for token in order_T[places[windows == window]]:
                part_D = part_D + value_T[token] * x_TD[token]
            total_D = part_D if len(windows.unique()) == 1 else total_D + part_D
        torch.testing.assert_close(found_VD[row], total_D, rtol=0, atol=0)
