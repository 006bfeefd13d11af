"""Formulas and diagrams that a browser shows without a network, whatever it can reach.

A block of `math` in LaTeX becomes MathML, which browsers draw themselves. Mermaid, which draws the diagrams, comes out
of the package mermaidx (that ships Mermaid as its authors build it) and is put on the pages that have a diagram: the
theme would load it from another server.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

MERMAID = "javascripts/mermaid.js"


def on_config(config: Any) -> Any:
    """MkDocs' event: fenced blocks of formulas are known, beside those of diagrams."""
    fences = config["mdx_configs"]["pymdownx.superfences"]["custom_fences"]
    if not any(fence["name"] == "math" for fence in fences):
        fences.append({"name": "math", "class": "math", "format": formula})
    return config


def formula(source: str, *_: Any, **__: Any) -> str:
    """The HTML of a block: a line of it is a formula, and a line of its own."""
    lines = [convert(line, display="block") for line in source.splitlines() if line.strip()]
    return f'<div class="formula">{"".join(lines)}</div>'


def on_files(files: Files, config: Any) -> Files:
    """MkDocs' event: Mermaid becomes a file of the site."""
    package = importlib.util.find_spec("mermaidx")
    assert package is not None, "requirements-docs.txt has mermaidx"
    assert package.origin is not None
    source = Path(package.origin).with_name("assets") / "mermaid.js"
    files.append(File.generated(config, MERMAID, abs_src_path=str(source)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """MkDocs' event: a page with a diagram loads Mermaid, and none loads anything from another server."""
    if elsewhere := re.search(r'<(?:script|link rel="stylesheet"|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', output):
        raise PluginError(f"{page.url} loads something from another server: {elsewhere[0]}")
    if 'class="mermaid"' not in output:
        return output
    return output.replace("</head>", f'<script src="{get_relative_url(MERMAID, page.url)}"></script></head>', 1)
