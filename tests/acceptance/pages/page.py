"""Pages of docs/start and docs/guides as a list of blocks, each with how a test runs it.

A comment right before a fenced block says it, and is written in the page's Markdown:

| comment | the block |
| --- | --- |
| `<!-- run -->` | runs in bash (`sh`) or Python (`python`), and has to end with 0 |
| `<!-- serve -->` | is a server, which runs until the next server or the end of the page |
| `<!-- gpu -->`, `<!-- gpu serve -->` | the same, where there is a stand-in for an H100 |
| `<!-- 4 gpus -->`, `<!-- 4 gpus serve -->` | the same, with four of them |
| `<!-- file: NAME -->` | is written to this file, before any other block runs |
| `<!-- client: NAME -->` | is run by that client's test, in `tests/acceptance/clients` |
| `<!-- not run: REASON -->` | is left out, and is listed in `not_run.toml` |
"""

import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checkout import ROOT

PAGES = sorted(path for name in ("start", "guides") for path in (ROOT / "docs" / name).glob("*.md"))
RUNNABLE = ("sh", "python")
_OTHERS = ("ini", "json", "mermaid", "text", "toml", "yaml")
_FENCE = re.compile(r"^( *)```(.*)$")
_COMMENT = re.compile(r"^ *<!-- (.*) -->$")
_RUNS = re.compile(r"run|serve|(?:gpu|(\d) gpus)(?: serve)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        line: of its opening fence, from 1.
        how: the comment before it; empty if there is none.
    """

    line: int
    language: str
    how: str
    text: str

    @property
    def runs(self) -> bool:
        return _RUNS.fullmatch(self.how) is not None

    @property
    def serves(self) -> bool:
        return self.runs and self.how.endswith("serve")

    @property
    def gpus(self) -> int:
        """How many stand-in cards its machine has."""
        runs = _RUNS.fullmatch(self.how)
        return int(runs[1] or 1) if runs is not None and "gpu" in self.how else 0

    @property
    def file(self) -> str | None:
        """Name of the file that its text is written to; None: it is written to none."""
        return self.how.removeprefix("file: ") if self.how.startswith("file: ") else None

    @property
    def left_out(self) -> bool:
        return self.how.startswith("not run: ")


def blocks(text: str) -> list[Block]:
    """Return a page's fenced blocks, in order."""
    found, before, inside, opened = [], "", [""], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            comment = _COMMENT.match(before)
            opened, inside = (number, fence[2], comment[1] if comment else ""), []
        elif fence and not fence[2] and opened is not None:
            found.append(Block(*opened, textwrap.dedent("\n".join(inside)) + "\n"))
            opened = None
        else:
            inside.append(line)
        before = line
    return found


def complaints(page: Sequence[Block], listed: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a page's blocks.

    Args:
        listed: first lines of its blocks that may be left out.
    """
    for block in page:
        if wrong := _wrong(block, listed):
            yield f"line {block.line}: {wrong}"
    there = {_first(block) for block in page if block.left_out}
    for line in listed:
        if line not in there:
            yield f"not_run.toml lists a block that the page runs, or does not have: {line}"


def _wrong(block: Block, listed: Sequence[str]) -> str | None:
    if block.language not in (*RUNNABLE, *_OTHERS):
        return f"`{block.language}` is no language of a block: commands are `sh`, output is `text`"
    if block.file is not None or block.how.startswith("client: "):
        return None
    if block.language not in RUNNABLE:
        return f"only `sh` and `python` run, not `{block.language}`" if block.how else None
    if not block.how:
        return "the comment before the block is missing, such as <!-- run -->"
    if not (block.runs or block.left_out):
        return f"unknown comment <!-- {block.how} -->"
    if block.left_out and _first(block) not in listed:
        return f"the block is not run, and not listed in not_run.toml: {_first(block)}"
    if block.language == "sh" and re.search(r"^\$ ", block.text, re.MULTILINE):
        return "a prompt (`$ `) is not part of a command"
    return None


def _first(block: Block) -> str:
    return block.text.partition("\n")[0]


def listed(page: Path) -> list[str]:
    """Return the first lines of a page's blocks that may be left out."""
    lists = tomllib.loads(Path(__file__).with_name("not_run.toml").read_text())
    return list(lists.get(f"{page.parent.name}/{page.name}", ()))
