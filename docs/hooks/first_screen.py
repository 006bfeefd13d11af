"""Puts the first screen of README, which says what the package is and how to use it, on the site's home page."""

from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
MARK = "The site that `make docs` builds has README's first screen here."
START, END = "<!-- first screen -->", "<!-- end of the first screen -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: the mark on a page becomes the text, whose links are from there."""
    return markdown.replace(MARK, first_screen()) if MARK in markdown else markdown


def first_screen() -> str:
    """The text between README's marks, with links from the folder of the docs; the build fails without them."""
    _, after = README.read_text(encoding="utf-8").split(START)
    text, _ = after.split(END)
    return text.replace("](docs/", "](").strip()
