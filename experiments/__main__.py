"""List the experiments: ``python -m experiments``."""

import ast
from pathlib import Path


def main() -> None:
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.glob("*/__main__.py")]):
        text = path.read_text()
        if (path.parent == here and "\ndef main(" not in text) or path == Path(__file__):
            continue
        name = path.stem if path.parent == here else path.parent.name
        said = ast.get_docstring(ast.parse(text)) or ""
        print(f"{name:14} {said.splitlines()[0]}")
    print("Run one with `make experiment NAME=...`; ARGS='--help' lists its options.")


if __name__ == "__main__":
    main()
