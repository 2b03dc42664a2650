"""Fails where a docstring begins with a clause, and so does not say what the code does."""

import ast
import re
import sys
from pathlib import Path

CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Of|Those|Where)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def clauses(path: Path) -> list[str]:
    """Return the places in a file whose docstring begins with a clause."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text and CLAUSE.match(text):
                found.append(f"{path}:{node.body[0].lineno}: {text.splitlines()[0]}")
    return found


def main(folders: list[str]) -> int:
    """Look at all Python files in these folders."""
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    found = [place for file in files for place in clauses(file)]
    for place in found:
        print(place)
    if found:
        print(
            "Begin a docstring with a verb (`Return ...`, `Tells ...`), or name the thing "
            "(`The messages between ...`)."
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
