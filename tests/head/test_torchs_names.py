"""Calls as torch's function of the same name takes them, and the options that an editor offers."""

from typing import get_type_hints

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import linear_cross_entropy
from megatron_ext.megatron.fused_loss.head_settings import HeadOptions, HeadSettings

X, W, Y = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_places_are_those_of_torch():
    expected = F.linear_cross_entropy(X, W, Y)
    torch.testing.assert_close(linear_cross_entropy(X, W, Y, reduction="mean"), expected)


def test_completion_knows_every_option_of_the_patch():
    own = get_type_hints(HeadSettings)
    del own["nemo_rl_chunk_size"]  # the patch's own argument chunk_size
    assert get_type_hints(HeadOptions) == own
