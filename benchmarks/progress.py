"""A bar for long work, on stderr: none where that is no terminal, or where tqdm is not installed."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shown(items: Sequence[Item], what: str) -> Iterator[Item]:
    """`items`, one after the other, with a bar of how many of them are done."""
    if importlib.util.find_spec("tqdm") is None:  # a machine with a GPU may have torch alone
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, what, leave=False, dynamic_ncols=True, disable=None)


def say(text: str) -> None:
    """A line of results on stdout, above a bar that is shown."""
    if importlib.util.find_spec("tqdm") is None:
        print(text, flush=True)
        return
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(text, flush=True)
