"""Compare what patches change or use of another project with another release of it.

python -m scripts.check_upstream vllm 0.33.0

It downloads that release's wheel, installs nothing and imports nothing of it, and compares the
syntax tree of each seam (see `deployments/upstream/patch.py`) with that of the installed release.
Docstrings, comments and types do not count.
"""

import argparse
import ast
import difflib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conserve.versions import distribution_of
from deployments.upstream.patches import patches

WHEELS = Path("build/wheels")
# How many modules a name may pass through before it is defined.
_HOPS = 8

Verdict = Literal["same", "changed", "gone"]
Read = Callable[[str], str | None]
_COLOURS = {"same": "green", "changed": "yellow", "gone": "bold red"}
_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """The modules of one release, by their syntax trees.

    Args:
        read: returns the text of a file by its path in the wheel; None if there is none.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def seam(self, seam: str) -> str | None:
        """Return the code of a seam, normalised; None if it is gone."""
        module, _, name = seam.partition(":")
        nodes = self._find(module, name.split("."), _HOPS)
        return "\n".join(ast.unparse(_bare(node)) for node in nodes) or None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _find(self, module: str, name: list[str], hops: int) -> list[ast.AST]:
        tree = self._tree(module)
        if tree is None or not hops:
            return []
        found = _members(tree, name[0])
        if found and len(name) == 1:
            return found
        if found and isinstance(found[0], ast.ClassDef):
            return self._member(module, found[0], name[1:], hops)
        for where, there, statement in _imports(tree, module, name[0]):
            if nodes := self._find(where, [*there, *name[1:]] if there else name[1:], hops - 1):
                return nodes
            if self._tree(where) is None and statement:
                # It is another project's, so all that can change is where it comes from.
                return [ast.parse(statement)]
        return []

    def _member(
        self, module: str, owner: ast.ClassDef, name: list[str], hops: int
    ) -> list[ast.AST]:
        if found := _members(owner, name[0]) or _attributes(owner, name[0]):
            return found
        for base in owner.bases:
            named = ast.unparse(base).partition("[")[0].split(".")
            if nodes := self._find(module, [*named, *name], hops - 1):
                return nodes
        return []


def _members(owner: ast.Module | ast.ClassDef, name: str) -> list[ast.AST]:
    """Return what defines a name in a module or a class, also within its conditions."""
    found: list[ast.AST] = []
    for node in _statements(owner.body):
        if isinstance(node, _DEFINED) and node.name == name:
            found.append(node)
        if any(isinstance(one, ast.Name) and one.id == name for one in _targets(node)):
            found.append(node)
    return found


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what an assignment assigns to, also of several at once."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _attributes(owner: ast.ClassDef, name: str) -> list[ast.AST]:
    """Return the statements by which a class's methods set an attribute of instances."""
    return [
        node
        for node in ast.walk(owner)
        if any(isinstance(one, ast.Attribute) and one.attr == name for one in _targets(node))
    ]


def _imports(tree: ast.Module, module: str, name: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield the modules from which a name comes, its name there, and the import that says so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            base = [*parents[: len(parents) - node.level + 1]] if node.level else []
            where = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if name in (alias.asname or alias.name,) or alias.name == "*":
                    there = name if alias.name == "*" else alias.name
                    yield where, [there], f"from {where} import {there}"
                    yield f"{where}.{alias.name}", [], ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    yield alias.name, [], f"import {alias.name}"


def _bare(node: ast.AST) -> ast.AST:
    """Return a copy of a tree without docstrings and types."""
    copy = ast.parse(ast.unparse(node))
    for one in ast.walk(copy):
        if isinstance(one, _DEFINED | ast.Module) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            one.returns = None
        if isinstance(one, ast.arg):
            one.annotation = None
    return copy


def installed(package: str) -> Source:
    """Return the release that this environment has."""
    found = distribution_of(package)
    if found is None:
        raise SystemExit(f"check-upstream: {package} is not installed here")

    def read(path: str) -> str | None:
        file = Path(str(found.locate_file(path)))
        return file.read_text() if file.is_file() else None

    return Source(read)


def released(package: str, version: str, folder: Path = WHEELS) -> Source:
    """Return a release of which the wheel is downloaded, unless it is there."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        wanted = ["--disable-pip-version-check", "-d", str(folder), f"{package}=={version}"]
        subprocess.run([*download, *wanted], check=True, stdout=sys.stderr)
    wheel = zipfile.ZipFile(next(folder.glob(pattern)))
    names = set(wheel.namelist())
    return Source(lambda path: wheel.read(path).decode() if path in names else None)


def verdicts(
    pinned: Source, other: Source, seams: Iterable[str]
) -> Iterator[tuple[str, Verdict, str]]:
    """Yield each seam with its verdict and its difference.

    Raises:
        LookupError: the pinned release has no such seam.
    """
    for seam in seams:
        before, after = pinned.seam(seam), other.seam(seam)
        if before is None:
            raise LookupError(f"the installed release has no {seam}")
        if before == after:
            yield seam, "same", ""
        elif after is None:
            yield seam, "gone", ""
        else:
            lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=2)
            yield seam, "changed", "\n".join(list(lines)[2:])


def main() -> None:
    """Print a table of the seams of a package's patches, and the differences below it."""
    parser = argparse.ArgumentParser(description="Compare seams with another release's.")
    parser.add_argument("package", help="such as vllm, lmcache, ray, uvicorn")
    parser.add_argument("version", help="such as 0.33.0")
    parser.add_argument("--brief", action="store_true", help="print no differences")
    given = parser.parse_args()
    concerned = {
        patch: [seam for seam in patch.seams if seam.startswith(given.package)]
        for patch in patches()
    }
    if not any(concerned.values()):
        known = ", ".join(sorted({patch.package for patch in patches()}))
        parser.error(f"no patch changes {given.package}; those that are changed: {known}")
    other, pinned = released(given.package, given.version), installed(given.package)
    here = distribution_of(given.package)
    title = f"{given.package} {here.version if here else ''} and {given.version}"
    table = Table("patch", "seams", "", title=title, box=MARKDOWN)
    table.add_column("of them changed or gone", overflow="fold")
    console, differences = Console(), []
    for patch, seams in concerned.items():
        found = [*verdicts(pinned, other, seams)]
        if not found:
            continue
        worst = max((verdict for _, verdict, _ in found), key=[*_COLOURS].index)
        names = [
            f"{seam.partition(':')[2]}{' (gone)' if verdict == 'gone' else ''}"
            for seam, verdict, _ in found
            if verdict != "same"
        ]
        coloured = f"[{_COLOURS[worst]}]{worst}[/]"
        table.add_row(patch.name, str(len(found)), coloured, ", ".join(names))
        differences += [(patch, seam, difference) for seam, _, difference in found if difference]
    console.print(table)
    for patch, seam, difference in () if given.brief else differences:
        console.print(f"\n[bold]{patch.name}[/bold]: {seam}", soft_wrap=True, highlight=False)
        for line in difference.split("\n"):
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
            console.print(Text(line, colour), soft_wrap=True)


if __name__ == "__main__":
    main()
