"""Puts the package's version on each page of the site, and links to the sources where a repository is named."""

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_config(config: Any, **_: Any) -> Any:
    """MkDocs' event. MEGATRON_EXT_REPOSITORY is the address of the repository; without it no page has an edit link."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_ext" / "__init__.py").read_text(), re.M)
    config.copyright = f"megatron_ext {found[1] if found else ''}"
    config.repo_url = os.environ.get("MEGATRON_EXT_REPOSITORY") or None
    config.edit_uri = f"{config.repo_url.rstrip('/')}/edit/main/docs/" if config.repo_url else None
    return config
