"""Hooks of mkdocs for `make docs-site`: pages as they stand in the repository, their links as they are on GitHub.

The site has the repository's own paths: all pages, and each file that one of them links to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "workloads/*.md", "benchmarks/*/*.md", "reports/*.md", "reports/gpu/**/*.md")
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Name headings as GitHub does."""
    config.mdx_configs["toc"] = {
        "permalink": True,
        "slugify": lambda text, _: re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"),
    }
    return config


def on_files(files: Files, config: Any) -> Files:
    """Return the theme's files, the pages, and the files that they link to."""
    pages = {path.resolve() for pattern in PAGES for path in ROOT.glob(pattern)}
    linked = {(page.parent / link).resolve() for page in pages for link in _LINK.findall(page.read_text())}
    there = sorted(pages | {path for path in linked if path.is_file() and path.suffix != ".md"})
    ours = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in there]
    return Files([file for file in files if file.src_dir != config.docs_dir] + ours)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write lists as Python's Markdown wants them: after an empty line, and indented by four."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for n, text in enumerate(parts[::2]):
        spaced = re.sub(r"^(?!\* |\d+\. |\s)(.+)\n(?=\* |\d+\. )", r"\1\n\n", text, flags=re.MULTILINE)
        parts[2 * n] = re.sub(r"^ {3}(?=\S|  )", "    ", spaced, flags=re.MULTILINE)
    return "".join(parts)
