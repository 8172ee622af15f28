"""Pages of the site that are kept elsewhere, and links that lead out of the documents' folder. A hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: page of the site -> file of the repository
PAGES = {"format.md": "apportion/schemas/FORMAT.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Names of documents in `code` become links to their pages: README and docstrings call them so."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"`docs/(\w+)\.md`(?!\])", rf"[\1]({up}\1.md)", markdown)
