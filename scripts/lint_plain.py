"""Checks that the code stays plain: its size, its docstrings, its calls.

`python scripts/lint_plain.py` fails where a package is over its line budget
(`scripts/line_budgets.toml`), where a budget has risen, where docstrings are more than 15 % of a
package's lines, where a docstring begins with a clause, where prose has one of the phrases that
CONTRIBUTING.md names, where a function takes more than six positional parameters, and where a
remote call names its method by a string. `--table` prints the lines of each package and checks
nothing.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BUDGETS = Path(__file__).with_name("line_budgets.toml")
DOCSTRING_SHARE = 0.15
POSITIONAL = 6
# Lines by group and package; `allowances` has them by issue and package.
Budgets = dict[str, dict[str, Any]]

_CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Of|Those|Where)\b")
_PHRASES = re.compile(
    r"\b(in line|lets? go|gives? way|at work|so many|(is|are) to|nobody|somebody|everybody)\b", re.I
)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# A typer command's parameters are its command line.
_COMMANDS = {"command", "callback"}
# Calls that take a method's name. vLLM's own are allowed in the one file that holds its client.
_BY_NAME = {"call_utility", "call_utility_async", "collective_rpc"}


@dataclass
class Size:
    """Lines of one package."""

    files: int = 0
    lines: int = 0
    docstring_lines: int = 0


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def complaints(path: Path, text: str, tree: ast.Module) -> Iterator[str]:
    """Yield what is not plain in a file, each with its place."""
    for docstring in docstrings(tree):
        first = docstring.value.strip().partition("\n")[0]
        if _CLAUSE.match(first):
            yield (
                f"{path}:{docstring.lineno}: begin the docstring with a verb (`Return ...`), "
                f"or name the thing: {first}"
            )
        for phrase in _PHRASES.finditer(docstring.value):
            yield f"{path}:{docstring.lineno}: `{phrase[0]}` in a docstring; name the thing"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (phrase := _PHRASES.search(token.string)):
            yield f"{path}:{token.start[0]}: `{phrase[0]}` in a comment; name the thing"
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTION) and _positional(node) > POSITIONAL:
            yield (
                f"{path}:{node.lineno}: `{node.name}` takes {_positional(node)} positional "
                f"parameters, over {POSITIONAL}: make them keyword-only, or one struct"
            )
        if isinstance(node, ast.Call) and _names_a_method(node):
            yield f"{path}:{node.lineno}: a remote call by string; give its client a method"


def _positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and called.attr in _COMMANDS:
            return 0
    parameters = [*function.args.posonlyargs, *function.args.args]
    return len([each for each in parameters if each.arg not in ("self", "cls")])


def _names_a_method(call: ast.Call) -> bool:
    """Return whether this is `getattr(actor, "name").remote(...)` or `collective_rpc("name")`."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "remote" and isinstance(got := function.value, ast.Call):
        return _called(got) == "getattr" and isinstance(got.args[1], ast.Constant)
    return function.attr in _BY_NAME and bool(call.args) and isinstance(call.args[0], ast.Constant)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def part_of_tests(path: Path, addons: Iterable[str]) -> str:
    """Return whether a test is of acceptance suites, of add-ons (experiments too), or the core."""
    if "acceptance" in path.parts:
        return "tests/acceptance"
    laboratory = {*addons, "experiments"} & {*path.parts}
    return "tests/add-ons" if laboratory else "tests/core"


def risen(versions: Sequence[Budgets]) -> Iterator[str]:
    """Yield each budget that rose by more than new allowances; ``versions``: the oldest first."""
    for before, after in pairwise(versions):
        for name, lines in _flat(after).items():
            was = _flat(before).get(name, lines)
            allowed = [sum(one.get(name, 0) for one in each.get("allowances", {}).values())
                       for each in (before, after)]  # fmt: skip
            if lines > was + allowed[1] - allowed[0]:
                yield (
                    f"{BUDGETS.name}: {name} has risen from {was} to {lines}; budgets only fall. "
                    "Remove something instead, or add the allowance of an issue"
                )


def _flat(budgets: Budgets) -> dict[str, int]:
    groups = [rows for group, rows in budgets.items() if group != "allowances"]
    return {name: lines for rows in groups for name, lines in rows.items()}


def history() -> Iterator[Budgets]:
    """Yield the budgets of each commit that changed them, and then the working tree's."""
    git = ["git", "-C", str(BUDGETS.parent)]
    log = [*git, "log", "--first-parent", "--reverse", "--format=%h", "--", BUDGETS.name]
    for commit in subprocess.run(log, capture_output=True, text=True, check=True).stdout.split():
        show = [*git, "show", f"{commit}:./{BUDGETS.name}"]
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        # Before there were groups, budgets could rise.
        if "core" in (budgets := tomllib.loads(text)):
            yield budgets
    yield tomllib.loads(BUDGETS.read_text())


def main(arguments: list[str]) -> int:
    """Check the packages that have a budget, or print their table."""
    versions = [*history()]
    found = [*risen(versions)]
    groups = versions[-1]
    budgets = _flat(groups)
    sizes = {name: Size() for name in budgets}
    for package in dict.fromkeys(name.partition("/")[0] for name in budgets):
        for path in sorted(Path(package).rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text)
            tests = package == "tests"
            size = sizes[part_of_tests(path, groups["add-ons"]) if tests else package]
            size.files += 1
            size.lines += len(text.splitlines())
            size.docstring_lines += sum(
                each.end_lineno - each.lineno + 1 for each in docstrings(tree)
            )
            if not tests:
                found += complaints(path, text, tree)
    if "--table" in arguments:
        print_table(sizes, groups)
        return 0
    for package, size in sizes.items():
        if size.lines > budgets[package]:
            found.append(
                f"{package} has {size.lines} lines, over its budget of {budgets[package]}: remove "
                "some"
            )
        if size.docstring_lines > DOCSTRING_SHARE * size.lines:
            found.append(
                f"{package}: docstrings are {size.docstring_lines / size.lines:.0%} of its lines, "
                f"over {DOCSTRING_SHARE:.0%}: remove those that restate a signature"
            )
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def print_table(sizes: dict[str, Size], groups: Budgets) -> None:
    """Print each package's lines, budget and share of docstrings, and each group's lines."""
    print(f"{'':18} {'files':>6} {'lines':>7} {'budget':>7} {'docstrings':>11}")
    for group, budgets in groups.items():
        if group == "allowances":
            continue
        lines = sum(sizes[name].lines for name in budgets)
        files = sum(sizes[name].files for name in budgets)
        print(f"{group:18} {files:6} {lines:7} {sum(budgets.values()):7}")
        for name, budget in budgets.items():
            size = sizes[name]
            share = size.docstring_lines / max(size.lines, 1)
            print(f"  {name:16} {size.files:6} {size.lines:7} {budget:7} {share:11.0%}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
