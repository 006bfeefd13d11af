"""Sections and code blocks of the documentation's pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def section(page: Path, heading: str) -> str:
    """Return the text under `## heading`, up to the next such heading."""
    return page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, text) of each fenced block, in order; the language is "" where none is named."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)


def python_blocks(text: str) -> list[str]:
    return [block for language, block in blocks(text) if language == "python"]
