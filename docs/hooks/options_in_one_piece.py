"""Keeps an option such as `--cpu` on one line, which a browser would break at its hyphens."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """MkDocs' event: the stylesheet knows an option by its class."""
    return re.sub(r"<code>(--?[\w-]{1,22})</code>", r'<code class="option">\1</code>', html)
