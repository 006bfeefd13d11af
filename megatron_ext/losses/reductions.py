"""Sums and means over the tokens and rows that count.

Legend: B rows, S positions. A mask `[B, S]` is 0 where a token does not count.
"""

from torch import Tensor


def counted(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` where a token counts, and 0 elsewhere, even for infinite or NaN values."""
    return x.where(mask > 0, 0.0)


def row_sums(x_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return `[B]`, the weighted sums over the tokens of each row that count."""
    return (counted(x_BS, mask_BS) * mask_BS).sum(1)


def row_means(x_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return `[B]`, the weighted means over the tokens of each row that count; 0 for a row without any."""
    return divide(row_sums(x_BS, mask_BS), mask_BS.sum(1))


def token_mean(x: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Return the weighted mean over the tokens that count, or their weighted sum divided by `count`."""
    return divide((counted(x, mask) * mask).sum(), mask.sum() if count is None else count)


def divide(x: Tensor, count: Tensor | float) -> Tensor:
    """`x / count`, 0 where nothing counts.

    Raises:
        ValueError: `count` is a negative number. A tensor's value is not checked: that would wait for the device.
    """
    if (fault := below_0(count)) is not None:
        raise fault
    if isinstance(count, Tensor):
        count = count.clamp(min=1e-8)
        return x / (count.reshape(()) if count.numel() == 1 else count)
    return x / max(count, 1e-8)


def below_0(count: Tensor | float, name: str = "count") -> ValueError | None:
    """Return the fault of a number below 0 or NaN; a tensor's value is not looked at."""
    if isinstance(count, Tensor) or count >= 0:
        return None
    return ValueError(f"{name} is {count}: it must be at least 0, the number of what counts")
