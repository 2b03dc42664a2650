"""Hooks of MkDocs: pages and files outside docs/ that pages link to, and the length of pages.

A link in the repository stays one on the site: README.md is its first page, other Markdown becomes
pages below repository/, and what else is linked lies there as it is.
"""

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINES = 300
# These grow with what they list, and are searched rather than read.
_LONG = ("reference/", "repository/")
_LINK = re.compile(r'(\]\(|(?:src|href)=")([^)\s"#]+)')
_log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked outside docs/, from README.md on."""
    there = [f"docs/{one.src_uri}" for one in files.documentation_pages()]
    seen = set(there)
    waiting = ["README.md", *there]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            path = str(ROOT / name)
            files.append(File.generated(config, _on_site(name), abs_src_path=path))
        if name.endswith(".md"):
            waiting += (it for it in _links(name) if not it.startswith("docs/") and it not in seen)
    style = Path(__file__).with_name("pages.css")
    files.append(File.generated(config, style.name, abs_src_path=str(style)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Have links lead to where their files are on the site."""
    source = _in_repository(page.file.src_uri)
    if not page.file.src_uri.startswith(_LONG) and markdown.count("\n") > LINES:
        _log.warning("%s has more than %d lines: divide it", source, LINES)
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(_on_site(target), here)

    return _LINK.sub(moved, markdown)


def _links(name: str) -> Iterator[str]:
    for _, link in _LINK.findall((ROOT / name).read_text()):
        if target := _target(name, link):
            yield target


def _target(name: str, link: str) -> str | None:
    """Return the file of the repository that a link leads to, if it does."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    return path if ":" not in link and (ROOT / path).is_file() else None


def _on_site(name: str) -> str:
    if name == "README.md":
        return "index.md"
    return name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"


def _in_repository(uri: str) -> str:
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
